"""The hardware of a node or host in the words of the API: sizes in GiB, and one entry for devices that are alike."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from msgspec import Struct

from crds.metalhost import MetalHostStatus
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from crds.size import GIB

_BACKENDS: Final = {"nvidia": "CUDA", "amd": "ROCm", "intel": "SYCL", "intel-gaudi": "Gaudi", "metal": "Metal"}
_X86: Final = frozenset({"x86_64", "amd64", "i686", ""})


class MachineDevice(Struct, frozen=True, rename="camel"):
    """Devices of a machine that are alike."""

    name: str
    vram_gb: float | None
    """Memory of each."""
    free_vram_gb: float | None
    """Free memory of all of them together, as it was read last."""
    backend: str
    count: int
    unified_memory: bool
    memory_bandwidth_gbps: float | None = None


class MachineFacts(Struct, frozen=True, rename="camel"):
    """The hardware of a node or host; null is unknown."""

    total_ram_gb: float | None
    available_ram_gb: float | None
    """Neither used nor requested; of a host the free part of its budget."""
    cpu_cores: int | None
    cpu_name: str
    has_gpu: bool
    gpu_vram_gb: float | None
    """Memory of the largest device; of a host its budget."""
    gpu_name: str | None
    gpu_count: int
    unified_memory: bool
    backend: str
    gpus: list[MachineDevice]


def describe_node_machine(
    vendor: str, stated: NodeFitnessStatus, devices: Sequence[NodeDevice], free_bytes: int | None
) -> MachineFacts:
    """Return the hardware of a node, with devices that are alike in one entry, those with most memory first.

    Args:
        vendor: vendor of its devices.
        stated: what its agent reads of it.
        devices: its devices.
        free_bytes: its memory that is free.
    """
    # Alike are devices of the same product, partition and memory.
    alike = groupby(sorted(devices, key=_group_key), key=_group_key)
    groups = [_describe_group(vendor, list(members)) for _, members in alike]
    groups.sort(key=lambda device: device.vram_gb or 0, reverse=True)

    # The largest group stands for the machine where only one device is named.
    largest = groups[0] if groups else None
    processor = "CPU (x86)" if stated.architecture in _X86 else "CPU (ARM)"

    return MachineFacts(
        total_ram_gb=to_gib(stated.memory_bytes),
        available_ram_gb=to_gib(free_bytes),
        cpu_cores=stated.cpu_cores,
        cpu_name=stated.processor,
        has_gpu=bool(groups),
        gpu_vram_gb=largest.vram_gb if largest else None,
        gpu_name=largest.name if largest else None,
        gpu_count=len(devices),
        unified_memory=False,
        backend=largest.backend if largest else processor,
        gpus=groups,
    )


def describe_host_machine(status: MetalHostStatus, free_bytes: int | None) -> MachineFacts:
    """Return the hardware of a host outside the cluster, a Mac, whose GPU shares the memory with the processor.

    Args:
        status: what its agent reports.
        free_bytes: the free part of its budget, the memory that models may take; None: unknown.
    """
    bandwidth = status.memory_bandwidth_bytes_per_second
    device = MachineDevice(
        name=status.chip,
        vram_gb=to_gib(status.budget_bytes),
        free_vram_gb=to_gib(free_bytes),
        backend=_BACKENDS["metal"],
        count=1,
        unified_memory=True,
        memory_bandwidth_gbps=to_gbps(bandwidth),
    )
    return MachineFacts(
        total_ram_gb=to_gib(status.memory_bytes),
        available_ram_gb=to_gib(free_bytes),
        cpu_cores=status.cpu_cores,
        cpu_name=status.chip,
        has_gpu=True,
        gpu_vram_gb=device.vram_gb,
        gpu_name=status.chip or None,
        gpu_count=1,
        unified_memory=True,
        backend=device.backend,
        gpus=[device],
    )


def to_gib(size_bytes: int | None) -> float | None:
    """Return a size in GiB with two digits; None: unknown."""
    return None if size_bytes is None else round(size_bytes / GIB, 2)


def to_gbps(bytes_per_second: int | None) -> float | None:
    """Return a bandwidth in GB a second; None: unknown."""
    return None if bytes_per_second is None else round(bytes_per_second / 1e9, 1)


def _group_key(device: NodeDevice) -> tuple[str, str, int]:
    """Return the facts in which devices are alike."""
    return device.product, device.partition, device.memory_bytes or 0


def _describe_group(vendor: str, devices: list[NodeDevice]) -> MachineDevice:
    """Return devices that are alike as one entry, with their free memory together.

    That is unknown if the free memory of one of them is.
    """
    first = devices[0]
    free_sizes = [device.free_bytes for device in devices if device.free_bytes is not None]
    return MachineDevice(
        name=f"{first.product} {first.partition}".strip(),
        vram_gb=to_gib(first.memory_bytes),
        free_vram_gb=to_gib(sum(free_sizes)) if len(free_sizes) == len(devices) else None,
        backend=_BACKENDS.get(vendor, vendor),
        count=len(devices),
        unified_memory=False,
        memory_bandwidth_gbps=to_gbps(first.memory_bandwidth_bytes_per_second),
    )
