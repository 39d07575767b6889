"""The nodes and hosts on which models fit: their hardware, and what is free there after all that is placed.

Of the devices of a node, those that pods hold count as the fullest ones: the rest is free, as full as its node agent
has seen it. A replica that still loads is thus subtracted although its device looks empty. On a processor, and on a
host, the same holds of the memory.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from console.machine_facts import MachineFacts, describe_host_machine, describe_node_machine
from controller.placement.cell_facts import close_node
from controller.placement.pod_requests import count_allocatable
from controller.placement.units import MEMORY, Amounts
from crds.metalhost import MetalHost, MetalHostStatus
from crds.metalprocess import MetalProcess
from crds.nodefitness import NodeFitnessStatus
from crds.size import GIB
from devices.node_labels import read_share
from devices.vendors import Vendor, Vendors
from fitness.serving_devices import ServingDevices
from fitness.stated_hardware import DeviceHardware, describe_host, describe_node
from kube.client import Obj

_STEPS: Final = 128
"""Free memory is rounded down to this part of a device, so that cells that are almost alike are assessed once."""
_NODE_MEMORY_STEP: Final = GIB
_BANDWIDTH_STEP: Final = 4 * 10**9
"""Each node measures a little different one."""
_COUNTS: Final = (1, 2, 4, 8, 16)
"""Devices of a replica: engines divide a model among powers of two."""


class DensityCell(NamedTuple):
    """A node or host, and the replicas that could be there."""

    name: str
    kind: Literal["node", "host"]
    accelerator: str
    """nvidia, amd, intel-gaudi, intel, metal, or cpu for a node without devices; empty: unknown."""
    bases: tuple[ServingDevices, ...]
    """Devices of a replica if nothing else runs there, by the number of its devices; empty: the hardware is unknown."""
    free_bytes: tuple[int, ...]
    """Free memory of each device that no pod holds, the emptiest first; of a processor or host that of the machine."""
    replicas: tuple[ServingDevices, ...]
    """Devices of a further replica now, by the number of its devices."""
    machine: MachineFacts
    last_seen: str | None = None
    """When its facts were read; None: it does not state it."""
    is_stale: bool = False
    """Its reporter is silent: nothing is placed by its facts."""
    closure: str = ""
    """Why it takes no new replica; empty: it does."""
    is_exclusive: bool = False
    """A pod holds its devices alone."""
    device_share: float | None = 1.0
    """Part of a device that each one is which pods request: less where they share it; None: unknown."""
    engines: tuple[str, ...] = ()
    """Engines that a host has."""

    @property
    def exclusion(self) -> str:
        """Return why nothing is placed there; empty: it may be."""
        return "its facts are stale" if self.is_stale else self.closure


def list_replicas(bases: Sequence[ServingDevices], free_bytes: Sequence[int]) -> tuple[ServingDevices, ...]:
    """Return what a further replica would have, for each number of devices that are free; for one in any case."""
    return tuple(
        base._replace(free_bytes=_round_free(base, free_bytes[count - 1] if count <= len(free_bytes) else 0))
        for base in bases
        if (count := base.device_count) == 1 or count <= len(free_bytes)
    )


def take_room(cell: DensityCell, count: int, needed_bytes: int) -> tuple[int, ...]:
    """Return the free memory of a cell with a further replica there.

    Args:
        cell: the cell.
        count: devices of the replica, of which it takes the emptiest.
        needed_bytes: what it takes of each.
    """
    taken, rest = cell.free_bytes[:count], cell.free_bytes[count:]
    if cell.is_exclusive:
        return rest
    return tuple(sorted((*(max(0, each - needed_bytes) for each in taken), *rest), reverse=True))


def _round_free(base: ServingDevices, free: int) -> int:
    """Return free memory, rounded down; that of an idle device is not rounded."""
    step = max(1, (base.memory_bytes or free) // _STEPS)
    return free if free == base.memory_bytes else free // step * step


class NodeUse(NamedTuple):
    """Amounts that pods take of a node."""

    amounts: Amounts
    """Requests by resource."""


def build_node_cell(
    node: Obj, fitness: NodeFitnessStatus | None, use: NodeUse, vendors: Vendors, *, is_stale: bool
) -> DensityCell:
    """Return the cell of a node.

    Args:
        node: the part of the Node that `controller/placement/nodes.py` keeps.
        fitness: what its node agent reports; None: nothing.
        use: what pods take of it.
        vendors: the table of vendors.
        is_stale: its node agent is silent.
    """
    hardware = describe_node(node["metadata"]["labels"], fitness, vendors)
    allocatable = count_allocatable(node["status"]["allocatable"])
    memory = _find_free_memory(allocatable, fitness, use)
    bases, free = _describe_room(hardware, vendors, allocatable, fitness, use, memory=memory)
    return DensityCell(
        name=node["metadata"]["name"],
        kind="node",
        accelerator=hardware.vendor,
        bases=bases,
        free_bytes=free,
        replicas=list_replicas(bases, free),
        machine=describe_node_machine(hardware, fitness, memory),
        last_seen=fitness.observed_at if fitness else None,
        is_stale=is_stale,
        closure=close_node(node).message,
        is_exclusive=hardware.vendor != "cpu" and not hardware.is_shared,
        device_share=_find_share(hardware.vendor, node["metadata"]["labels"], vendors),
    )


def _find_free_memory(allocatable: Amounts, fitness: NodeFitnessStatus | None, use: NodeUse) -> int | None:
    """Return the memory of a node that is neither used nor requested; None: unknown."""
    known = [fitness.available_bytes] if fitness and fitness.available_bytes is not None else []
    if MEMORY in allocatable:
        known.append(allocatable[MEMORY] - use.amounts.get(MEMORY, 0))
    return max(0, min(known)) if known else None


def _describe_room(
    hardware: DeviceHardware,
    vendors: Vendors,
    allocatable: Amounts,
    fitness: NodeFitnessStatus | None,
    use: NodeUse,
    *,
    memory: int | None,
) -> tuple[tuple[ServingDevices, ...], tuple[int, ...]]:
    """Return the replicas of an idle node, and the free memory of each device; empty: they are unknown."""
    hardware = hardware._replace(
        node_memory_bytes=_round_down(hardware.node_memory_bytes, _NODE_MEMORY_STEP),
        processor_bandwidth_bytes_per_second=_round_down(
            hardware.processor_bandwidth_bytes_per_second, _BANDWIDTH_STEP
        ),
    )
    if hardware.vendor == "cpu":
        replica = hardware.describe_replica(0)
        return ((replica,), (memory,)) if replica.device_class and memory is not None else ((), ())
    vendor = next((each for name, each in vendors.items() if name == hardware.vendor), None)
    if vendor is None:
        return (), ()
    devices = _list_devices(hardware, vendor, allocatable, fitness)
    if not devices:
        return (), ()
    held = 0 if hardware.is_shared else _count_devices(vendor, use.amounts)
    bases = tuple(_describe_base(hardware, count) for count in _COUNTS if count <= len(devices))
    return bases, tuple(devices[: max(0, len(devices) - held)])


def _round_down(value: int | None, step: int) -> int | None:
    """Return a value of which each node has a slightly different one; one below a step stays."""
    return value if value is None or value < step else value // step * step


def _describe_base(hardware: DeviceHardware, count: int) -> ServingDevices:
    found = hardware.describe_replica(count, hardware.partition)
    stated = [each for each in hardware.memory_bytes if each is not None]
    # The labels of a node whose devices are partitions state the memory of one partition.
    return found if found.memory_bytes or not stated else found._replace(memory_bytes=min(stated))


def _list_devices(
    hardware: DeviceHardware, vendor: Vendor, allocatable: Amounts, fitness: NodeFitnessStatus | None
) -> list[int]:
    """Return the free memory of each device by what is observed, the emptiest first, without those of unknown size."""
    if hardware.lists_devices and fitness:
        observed = [each.memory_bytes if each.free_bytes is None else each.free_bytes for each in fitness.devices]
    else:
        one = hardware.describe_replica(1).memory_bytes
        sizes = hardware.memory_bytes or (one,)
        observed = [*sizes] * _count_devices(vendor, allocatable)
    return sorted((each for each in observed if each is not None), reverse=True)


def _find_share(accelerator: str, labels: Mapping[str, str], vendors: Vendors) -> float | None:
    """Return the part of a device that each one is which pods request, by the labels of the vendor's labeller."""
    vendor = next((each for name, each in vendors.items() if name == accelerator), None)
    share = read_share(accelerator, vendor, labels) if vendor is not None else None
    if share is None:
        return 1.0
    return 1 / share.pods if share.pods > 1 else None


def _count_devices(vendor: Vendor, amounts: Amounts) -> int:
    return sum(count for name, count in amounts.items() if vendor.offers(name))


def build_host_cell(host: MetalHost, processes: Sequence[MetalProcess]) -> DensityCell:
    """Return the cell of a host.

    Args:
        host: the host.
        processes: those that are bound to it.
    """
    status = host.status
    free = _find_free_budget(status, processes)
    replica = describe_host(status)
    is_ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
    name = host.metadata.name
    bases, room = ((replica,), (free,)) if free is not None else ((), ())
    return DensityCell(
        name=name,
        kind="host",
        accelerator="metal",
        bases=bases,
        free_bytes=room,
        replicas=list_replicas(bases, room),
        machine=describe_host_machine(status, free),
        # The controller, which sees the Lease, says whether the agent is alive.
        is_stale=not is_ready,
        closure=f"host {name} is cordoned: pomona host uncordon {name}" if host.spec.is_cordoned else "",
        engines=tuple(status.runtimes),
    )


def _find_free_budget(status: MetalHostStatus, processes: Sequence[MetalProcess]) -> int | None:
    """Return the free part of a host's budget after all that is bound to it; None: unknown."""
    if status.available_bytes is None:
        return None
    listed = {each.uid for each in status.processes}
    bound = sum(each.spec.memory_bytes or 0 for each in processes if each.metadata.uid not in listed)
    return max(0, status.available_bytes - bound)


class CellProfile(NamedTuple):
    """Cells on which each model fits equally well."""

    accelerator: str
    replicas: tuple[ServingDevices, ...]
    names: tuple[str, ...]
    """In the order of the alphabet."""


def group_cells(cells: Mapping[str, DensityCell]) -> tuple[CellProfile, ...]:
    """Return the cells on which something may be placed, those that are alike together."""
    found: dict[tuple[str, tuple[ServingDevices, ...]], list[str]] = {}
    for name in sorted(cells):
        cell = cells[name]
        if cell.bases and not cell.exclusion:
            found.setdefault((cell.accelerator, cell.replicas), []).append(name)
    return tuple(CellProfile(*key, tuple(names)) for key, names in found.items())
