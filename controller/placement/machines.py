"""The machines on which models fit: each node and host with its cell, and with what its agent reports beside it.

The cell says how many devices and how much memory are free, as the queue counts. What the agent has seen of each device
says how full the free ones are: those that pods hold count as the fullest ones, so that a replica that still loads is
subtracted although its device looks empty.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from controller.placement.units import MEMORY, Cell
from crds.metalhost import MetalHostStatus
from crds.nodefitness import NodeFitnessStatus
from devices.node_labels import read_share
from devices.vendors import Vendor, Vendors
from fitness.serving_devices import ServingDevices
from fitness.stated_hardware import DeviceHardware, describe_host

_STEPS: Final = 128
"""Free memory is rounded down to this part of a device, so that machines that are almost alike are assessed once."""
_COUNTS: Final = (1, 2, 4, 8, 16)
"""Devices of a replica: engines divide a model among powers of two."""


class ViewedMachine(NamedTuple):
    """A node or host, and the replicas that could be there."""

    cell: Cell
    accelerator: str
    """nvidia, amd, intel-gaudi, intel, metal, or cpu for a node without devices; empty: unknown."""
    report: NodeFitnessStatus | MetalHostStatus
    """The report of its agent; empty if there is none."""
    is_stale: bool
    """Its agent is silent: nothing is placed by its facts."""
    hardware: DeviceHardware = DeviceHardware()
    """The devices of a node."""
    free_memory: int | None = None
    """Memory of the machine that is neither used nor requested; of a host the free part of its budget. None: unknown.
    """
    bases: tuple[ServingDevices, ...] = ()
    """Devices of a replica if nothing else runs there, by the number of its devices; empty: the hardware is unknown."""
    free_bytes: tuple[int, ...] = ()
    """Free memory of each device that no pod holds, the emptiest first; of a processor or host that of the machine."""
    replicas: tuple[ServingDevices, ...] = ()
    """Devices of a further replica now, by the number of its devices."""
    device_share: float | None = 1.0
    """Part of a device that each one is which pods request: less where they share it; None: unknown."""

    @property
    def last_seen(self) -> str | None:
        """When the facts of a node were read; None: that is not stated."""
        return self.report.observed_at if isinstance(self.report, NodeFitnessStatus) else None

    @property
    def exclusion(self) -> str:
        """Return why nothing is placed there; empty: it may be."""
        return "its facts are stale" if self.is_stale else self.cell.closed_message

    @property
    def is_exclusive(self) -> bool:
        """True if a pod holds its devices alone."""
        return self.cell.kind == "node" and self.accelerator != "cpu" and not self.hardware.is_shared


def build_node(
    cell: Cell, hardware: DeviceHardware, report: NodeFitnessStatus | None, vendors: Vendors, *, is_stale: bool
) -> ViewedMachine:
    """Return a node as a machine: its cell, what its agent reports, and the replicas that could be there.

    Args:
        cell: its cell.
        hardware: its devices, as labels and its agent state them.
        report: what its node agent reports; None: nothing.
        vendors: the table of vendors.
        is_stale: its node agent is silent.
    """
    report = report or NodeFitnessStatus()
    # Free memory of the node: the agent sees what is used, the cell what is requested, and the less of both counts.
    stated_memory = [amount for amount in (report.available_bytes, cell.free.get(MEMORY)) if amount is not None]
    memory = max(0, min(stated_memory)) if stated_memory else None

    # `bases`: the devices of a replica on the idle node, by their number; `free`: the free bytes of each device now.
    # Rounded hardware lets nodes that are alike share their estimates.
    vendor = vendors.get(hardware.vendor)
    is_known = vendor is not None
    bases, free = _describe_room(cell, hardware.round_down(), report, memory) if is_known else ((), ())

    return ViewedMachine(
        cell=cell,
        accelerator=hardware.vendor,
        report=report,
        is_stale=is_stale,
        hardware=hardware,
        free_memory=memory,
        bases=bases,
        free_bytes=free,
        replicas=list_replicas(bases, free),
        device_share=_find_share(hardware.vendor, vendor, cell.node["metadata"]["labels"] if cell.node else {}),
    )


def build_host(cell: Cell, report: MetalHostStatus, *, is_stale: bool) -> ViewedMachine:
    """Return a host as a machine: its cell, what its agent reports, and the one replica that could be there.

    There is none if the agent has not reported the free memory.
    """
    # A host counts as one device, which has the free memory of the cell (the host, as the queue counts it).
    is_known = report.available_bytes is not None
    free = (cell.free[MEMORY],) if is_known else ()  # of each device, so one at the most
    bases = (describe_host(report),) if is_known else ()  # the device of a replica if nothing else runs there

    return ViewedMachine(
        cell=cell,
        accelerator="metal",
        report=report,
        is_stale=is_stale,
        free_memory=free[0] if free else None,
        bases=bases,
        free_bytes=free,
        replicas=list_replicas(bases, free),
    )


def list_replicas(bases: Sequence[ServingDevices], free_bytes: Sequence[int]) -> tuple[ServingDevices, ...]:
    """Return the devices of one further replica on a machine, for each number of devices that are free.

    A replica with one device is returned in any case: with no free memory if no device is free.

    Args:
        bases: the devices of a replica on an idle machine, by their number (1, 2, 4 ...).
        free_bytes: free memory of each device, the emptiest first.
    """
    replicas = []
    for base in bases:
        count = base.device_count
        has_enough_devices = count <= len(free_bytes)
        if count != 1 and not has_enough_devices:
            continue

        # A replica takes the emptiest devices, and has as much memory as the fullest of them leaves.
        least_free = free_bytes[count - 1] if has_enough_devices else 0
        replicas.append(base._replace(free_bytes=_round_free(base, least_free)))
    return tuple(replicas)


def compute_remaining_bytes(machine: ViewedMachine, count: int, needed_bytes: int) -> tuple[int, ...]:
    """Return the free memory of each device that would remain with a further replica on a machine.

    Args:
        machine: the machine.
        count: devices of the replica, of which it takes the emptiest.
        needed_bytes: what it takes of each.
    """
    taken, untouched = machine.free_bytes[:count], machine.free_bytes[count:]
    if machine.is_exclusive:
        return untouched
    left_of_taken = (max(0, free_bytes - needed_bytes) for free_bytes in taken)
    return tuple(sorted((*left_of_taken, *untouched), reverse=True))


def _round_free(base: ServingDevices, free: int) -> int:
    """Return free memory, rounded down; that of an idle device is not rounded."""
    step = max(1, (base.memory_bytes or free) // _STEPS)
    return free if free == base.memory_bytes else free // step * step


def _describe_room(
    cell: Cell, hardware: DeviceHardware, report: NodeFitnessStatus, memory: int | None
) -> tuple[tuple[ServingDevices, ...], tuple[int, ...]]:
    """Return the replicas that an idle node could have, and the free memory of each device now; empty: unknown.

    A node without devices has one replica, on its processor, with the free memory of the node. Of devices that are not
    shared, as many as pods hold are left out, the fullest: a pod that still loads holds a device that looks empty.
    """
    # 1. A node without devices.
    if hardware.vendor == "cpu":
        replica = hardware.describe_replica(0)  # 0 devices: it computes on the processor
        if not replica.device_class or memory is None:
            return (), ()
        return (replica,), (memory,)

    # 2. The free memory of each device, and the replicas on the idle node.
    # `cell.devices`: the resources that count each device once; None: not stated, and nothing is subtracted below.
    device_resources = cell.devices or frozenset()
    sizes = _list_devices(hardware, report, sum(cell.total[name] for name in device_resources))
    # Engines divide a model among 1, 2, 4, 8 or 16 devices (`_COUNTS`).
    bases = tuple(_describe_base(hardware, count) for count in _COUNTS if count <= len(sizes))

    # 3. Leave out the devices that pods hold. Shared devices still have room for further pods.
    if device_resources and not hardware.is_shared:
        # The devices that pods hold count as the fullest ones.
        held = sum(cell.total[name] - cell.free[name] for name in device_resources)
        return bases, tuple(sizes[: max(0, len(sizes) - held)])
    return bases, tuple(sizes)


def _describe_base(hardware: DeviceHardware, count: int) -> ServingDevices:
    """Return `count` idle devices for a replica.

    If no memory is stated for their class, it is the least that any device states. On a node whose devices are
    partitions (`hardware.partition`, such as 1g.10gb; empty: none), the labels state the memory of one partition.
    """
    replica = hardware.describe_replica(count, hardware.partition)
    stated = [size for size in hardware.memory_bytes if size is not None]
    # `replica.memory_bytes`: memory of one device of this class; None: unknown.
    return replica if replica.memory_bytes or not stated else replica._replace(memory_bytes=min(stated))


def _list_devices(hardware: DeviceHardware, report: NodeFitnessStatus, count: int) -> list[int]:
    """Return the free memory of each device, the emptiest first, without devices of unknown size.

    If the agent lists the devices, it says what is free. Otherwise `count` devices are assumed, each with its full
    memory as the labels state it.
    """
    observed: Sequence[int | None]
    if hardware.lists_devices:
        # A device whose free memory is not reported counts with all of its memory.
        observed = [
            device.memory_bytes if device.free_bytes is None else device.free_bytes for device in report.devices
        ]
    else:
        # The labels state one size for all devices. Without it, that of their class counts; None: that is unknown, too.
        observed = (hardware.memory_bytes or (hardware.describe_replica(1).memory_bytes,)) * count
    return sorted((size for size in observed if size is not None), reverse=True)


def _find_share(accelerator: str, vendor: Vendor | None, labels: Mapping[str, str]) -> float | None:
    """Return the part of a device that a pod gets for each one that it requests, by the vendor's labels.

    1 if pods do not share devices; None if they do and the labels do not say how many share one.
    """
    share = read_share(accelerator, vendor, labels) if vendor is not None else None
    if share is None:
        return 1.0
    # `share.pods` is 1 if the labels say that devices are shared, but not among how many pods.
    return 1 / share.pods if share.pods > 1 else None
