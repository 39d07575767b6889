"""The hardware of a node: its accelerator devices, processor, memory and disk, as its node agent reports them.

Facts come from the vendor's tool or the kernel, and from the labels of other labellers of nodes where neither answers.
Whatever is missing, hangs or lies costs only itself: it is a problem in words beside the facts that were read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from crds.nodefitness import NodeDevice
from devices.device_class import name_device_class, name_processor_class
from devices.node.amd import read_amd
from devices.node.gaudi import read_gaudi
from devices.node.intel import INTEL_CARDS, read_intel
from devices.node.kernel_files import PciDevice, list_pci_devices
from devices.node.labels import read_labels
from devices.node.memory_bandwidth import measure_memory_bandwidth
from devices.node.number_formats import NumberFormats, find_number_formats
from devices.node.nvidia import read_nvidia
from devices.node.processor import MachineMemory, Processor, read_file_system, read_memory, read_processor
from devices.node.vendor_reading import VENDOR_NAMES, FactSource, NodeVendor, VendorReading
from devices.products import find_product

__all__ = ["FactSource", "NodeHardware", "NodeRoots", "NodeVendor", "measure_memory_bandwidth", "read_node_hardware"]

_TOOLS: Final[Mapping[NodeVendor, str]] = {"nvidia": "nvidia-smi", "amd": "rocm-smi", "intel-gaudi": "hl-smi"}


class NodeRoots(NamedTuple):
    """The folders at which a container sees parts of its node."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    disk: Path = Path("/")
    """A folder in the file system of the node's pods."""


_MACHINE: Final = NodeRoots()


class NodeHardware(NamedTuple):
    """The hardware of a node now. What could not be read is None or empty, never 0."""

    vendor: NodeVendor
    """Vendor of the devices; cpu if the node has none that models run on."""
    source: FactSource
    """Where the facts of the devices come from; proc if there are none."""
    device_class: str
    """Class of a single device, or of the processor if there are none, by `devices/device_class.py`."""
    driver: str = ""
    """Version of the driver of the devices."""
    devices: tuple[NodeDevice, ...] = ()
    int4: bool | None = None
    """True if the devices compute with 4-bit integers."""
    fp8: bool | None = None
    """True if the devices compute with 8-bit floating-point numbers."""
    processor: str = ""
    """Model of the processor, as the kernel names it."""
    cpu_cores: int | None = None
    cpu_features: tuple[str, ...] = ()
    """Instructions of the processor that engines use, sorted, for example avx2 or amx_tile."""
    architecture: str = ""
    """Processor architecture, for example x86_64."""
    memory_bytes: int | None = None
    available_bytes: int | None = None
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    problems: tuple[str, ...] = ()
    """Each tool that is missing, hung or printed what is no answer, in a sentence with the way out."""


def read_node_hardware(labels: Mapping[str, str], roots: NodeRoots = _MACHINE) -> NodeHardware:
    """Read the hardware of this node now. Blocks for the time limit of a vendor's tool at most.

    Args:
        labels: labels of the Node, by which other labellers state devices.
        roots: the folders at which this process sees its node.
    """
    by_probe = [read_nvidia(), read_amd(roots.sys, roots.proc), read_gaudi(roots.sys, roots.proc)]
    readings = [reading for reading in (*by_probe, read_intel(roots.sys, roots.proc)) if reading]
    chosen = choose_reading(readings, read_labels(labels), list_pci_devices(roots.sys))
    processor, memory = read_processor(roots.proc), read_memory(roots.proc)
    devices = share_memory(chosen.devices, memory) if chosen.shares_memory else chosen.devices
    formats = _find_formats(chosen)
    disk = read_file_system(roots.disk)
    return NodeHardware(
        vendor=chosen.vendor,
        source=chosen.source,
        device_class=_name_class(chosen, processor),
        driver=chosen.driver,
        devices=devices,
        int4=formats.int4,
        fp8=formats.fp8,
        processor=processor.model,
        cpu_cores=processor.cores,
        cpu_features=processor.features,
        architecture=processor.architecture,
        memory_bytes=memory.memory_bytes,
        available_bytes=memory.available_bytes,
        disk_bytes=disk.size_bytes,
        disk_free_bytes=disk.free_bytes,
        problems=chosen.problems,
    )


def choose_reading(
    readings: Sequence[VendorReading], by_labels: VendorReading | None, on_bus: Sequence[PciDevice]
) -> VendorReading:
    """Return the devices to report, with the problems of all probes.

    Args:
        readings: what the vendors' probes found, the preferred vendor first.
        by_labels: what labels state, for a node where no probe finds a device.
        on_bus: devices that the node has whether or not a probe can read them.
    """
    problems = [problem for reading in readings for problem in _explain_failures(reading)]
    usable = [reading for reading in readings if reading.devices]
    answered = {reading.vendor for reading in readings}
    if not usable and by_labels is not None:
        # They are all that most nodes without the vendor's runtime class have: nothing has failed there.
        answered.add(by_labels.vendor)
    on_bus_only = dict.fromkeys(
        vendor for device in on_bus if (vendor := _find_vendor(device)) and vendor not in answered
    )
    problems += (_explain_missing_tool(vendor) for vendor in on_bus_only)
    if not usable and by_labels is not None:
        usable, problems = [by_labels], [*problems, *by_labels.problems]
    if not usable:
        return VendorReading("cpu", "proc", problems=tuple(problems))
    problems += (
        f"the node has devices of {VENDOR_NAMES[reading.vendor]} as well, which are not reported: "
        f"a node is of one vendor, and this one of {VENDOR_NAMES[usable[0].vendor]}"
        for reading in usable[1:]
    )
    return usable[0]._replace(problems=tuple(problems)).limit_devices()


def share_memory(devices: Sequence[NodeDevice], memory: MachineMemory) -> tuple[NodeDevice, ...]:
    """Return the devices with the memory of the machine, in which they compute."""
    return tuple(
        replace(device, memory_bytes=memory.memory_bytes, free_bytes=memory.available_bytes)
        if device.memory_bytes is None
        else device
        for device in devices
    )


def _explain_failures(reading: VendorReading) -> list[str]:
    tool = _TOOLS.get(reading.vendor, "")
    hint = f"run {tool} on the node, and see the driver's messages there (dmesg)"
    return [
        f"{problem}: {hint}" if tool and problem.startswith(f"{tool} ") else problem for problem in reading.problems
    ]


def _find_vendor(device: PciDevice) -> NodeVendor | None:
    """Return the vendor of a device that the node has for models; None for integrated GPUs and others."""
    if device.vendor_id == "10de":
        return "nvidia"
    if device.vendor_id == "1da3":
        return "intel-gaudi"
    if device.vendor_id == "1002" and find_product("amd", device.device_id):
        return "amd"
    return "intel" if device.vendor_id == "8086" and device.device_id in INTEL_CARDS else None


def _explain_missing_tool(vendor: NodeVendor) -> str:
    tool = _TOOLS.get(vendor)
    missing = f"{tool} is not in the node agent's container" if tool else "no driver of the kernel states it"
    return (
        f"the node has a device of {VENDOR_NAMES[vendor]}, and {missing}: install the driver on the node, run the "
        "agent with the vendor's runtime class or with the tool mounted, or let the vendor's labeller label the node"
    )


def _find_formats(reading: VendorReading) -> NumberFormats:
    """Return the formats in which every device computes; None where that is not known of all."""
    all_formats = [find_number_formats(reading.vendor, device.architecture) for device in reading.devices]
    return NumberFormats(
        int4=_find_common([all_format.int4 for all_format in all_formats]),
        fp8=_find_common([all_format.fp8 for all_format in all_formats]),
    )


def _find_common(values: Sequence[bool | None]) -> bool | None:
    if not values or None in values:
        return False if False in values else None
    return all(values)


def _name_class(reading: VendorReading, processor: Processor) -> str:
    if not reading.devices:
        return name_processor_class(processor.model, processor.cores or 1)
    first = reading.devices[0]
    return name_device_class(reading.vendor, first.product, partition=first.partition)
