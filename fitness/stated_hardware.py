"""The hardware of a node or host as the objects of the cluster state it: labels, NodeFitness, MetalHost.

Placement, the scheduler extender and benchmarks read it here, so that they agree about the device class of a node.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from crds.metalhost import MetalHostStatus
from crds.nodefitness import NodeFitnessStatus
from crds.size import GIB, MIB
from devices.chips import bandwidth_bytes_per_second
from devices.device_class import SINGLE, name_device_class, name_host_class, name_processor_class, scale_class
from devices.node_labels import read_device_mib, read_product, read_share
from devices.vendors import Vendors
from fitness.serving_devices import ServingDevices, describe_devices

_BANDWIDTH_STEP: Final = 4 * 10**9
_MOST_BYTES: Final = 1 << 50
"""Most bytes, or bytes a second, that a NodeFitness can state; the schema of a MetalHost has no bound."""


class DeviceHardware(NamedTuple):
    """The hardware of a node, which is the same on many."""

    vendors: frozenset[str] = frozenset()
    """Vendors of devices that the node has, by their names in `devices/vendors.py`; empty: unknown."""
    vendor: str = ""
    """The one that the other facts are about; cpu: the node has no devices; empty: unknown."""
    product: str = ""
    partition: str = ""
    """Partition that each of its devices is, such as the MIG profile 1g.10gb; empty: whole devices."""
    single_class: str = ""
    """Device class of a replica with one device; empty: unknown."""
    memory_bytes: tuple[int | None, ...] = ()
    """Memory of each device; one entry for all if `lists_devices` is false."""
    lists_devices: bool = False
    """The node agent reports each device; else only labels are known."""
    is_shared: bool = False
    """Several pods get the same device."""
    family: str = ""
    """Architecture that the vendor's labeller states; empty: none is stated."""
    processor_class: str = ""
    """Device class of a replica that computes on all cores of the processor; empty: unknown."""
    processor: str = ""
    cores: int | None = None
    node_memory_bytes: int | None = None
    processor_bandwidth_bytes_per_second: int | None = None

    def name_class(self, count: int, partition: str = "") -> str:
        """Return the device class of a replica on this node, by which speeds are kept, such as `nvidia-l4x2`.

        An empty class is unknown.

        Args:
            count: devices of the replica; 0: it computes on the processor.
            partition: the partition that each of them is, such as the MIG profile 1g.10gb; empty: that of the node.
        """
        if count == 0:
            return self.processor_class
        if partition and self.product:
            return name_device_class(self.vendor, self.product, count, partition)
        return scale_class(self.single_class, count)

    def describe_replica(self, count: int, partition: str = "") -> ServingDevices:
        """Return the devices of a replica on this node, for an estimate of its speed.

        Args:
            count: devices of the replica; 0: it computes on the processor.
            partition: the partition that each of them is, if the node does not have the same for all; empty: that of
                the node, if it has one.
        """
        if count == 0:
            return ServingDevices(
                vendor="cpu",
                device_class=self.processor_class,
                product=self.processor,
                memory_bytes=self.node_memory_bytes,
                bandwidth_bytes_per_second=self.processor_bandwidth_bytes_per_second,
                cores=self.cores or 0,
            )

        # Devices: those of the product, with the least of the sizes that the node states.
        known_sizes = [size for size in self.memory_bytes if size is not None]
        devices = describe_devices(
            self.vendor,
            self.product,
            count,
            # The known sizes are those of the node's devices, not that of a given partition.
            memory_bytes=min(known_sizes) if known_sizes and not partition else None,
            partition=partition or self.partition,
        )
        return devices._replace(device_class=self.name_class(count, partition), family=self.family)

    def round_down(self) -> "DeviceHardware":
        """Return the hardware with coarse figures of its processor, since each node measures slightly different ones.

        So nodes that are alike compare equal and share their estimates: to estimate all models for each node takes
        seconds.
        """
        bandwidth = self.processor_bandwidth_bytes_per_second
        return self._replace(
            node_memory_bytes=_round_down(self.node_memory_bytes, GIB),
            processor_bandwidth_bytes_per_second=_round_down(bandwidth, _BANDWIDTH_STEP),
        )


def _round_down(amount: int | None, step: int) -> int | None:
    """Return the largest multiple of a step that is not larger; an amount below the first one stays."""
    return amount if amount is None or amount < step else amount // step * step


def describe_node(labels: Mapping[str, str], fitness: NodeFitnessStatus | None, vendors: Vendors) -> DeviceHardware:
    """Return the hardware of a node, by labels of its Node and by what Pomona's node agent reports there.

    Labels of a vendor's labeller, such as NVIDIA's GPU feature discovery, come first for devices. The node agent adds
    the processor, and devices that no label names.

    Args:
        labels: labels of the Node.
        fitness: what its node agent reports; None: nothing.
        vendors: the table of vendors.
    """
    # 1. Devices by labels.
    labelled = _read_labels(labels, vendors)
    if fitness is None or not fitness.device_class:
        return labelled

    # 2. The processor.
    hardware = labelled._replace(
        processor_class=name_processor_class(fitness.processor, fitness.cpu_cores) if fitness.cpu_cores else "",
        processor=fitness.processor,
        cores=fitness.cpu_cores,
        node_memory_bytes=fitness.memory_bytes,
        processor_bandwidth_bytes_per_second=fitness.memory_bandwidth_bytes_per_second,
    )

    # 3. Devices that no label names. Labels are trusted more, as a node agent's token cannot write them: whoever steals
    # that token must not choose the class by which speeds are kept.
    if labelled.single_class:
        return hardware
    hardware = hardware._replace(vendor=fitness.vendor, product="", partition="", memory_bytes=())
    if not fitness.devices:
        return hardware._replace(is_shared=False, family="")
    return hardware._replace(
        vendors=labelled.vendors | {fitness.vendor},
        product=fitness.devices[0].product,
        # SINGLE is the end of the class of one device; any other class tells nothing about one.
        single_class=fitness.device_class if fitness.device_class.endswith(SINGLE) else "",
        memory_bytes=tuple(device.memory_bytes for device in fitness.devices),
        lists_devices=True,
    )


def _read_labels(labels: Mapping[str, str], vendors: Vendors) -> DeviceHardware:
    """Return the devices of a node as the labels state them that vendors' labellers write; unknown without such labels.

    If labels of several vendors are there, all are named in `vendors`, and the other facts are those of the last one.
    """
    hardware = DeviceHardware()
    for name, vendor in vendors.items():
        # A vendor without such a label has no name for it, and no label has an empty name.
        has_product, has_memory = labels.get(vendor.product_label or ""), labels.get(vendor.memory_label or "")
        if not has_product and not has_memory:
            continue

        product, partition = read_product(vendor, labels)
        mib = read_device_mib(name, vendor, labels)
        hardware = DeviceHardware(
            vendors=hardware.vendors | {name},
            vendor=name,
            product=product,
            partition=partition,
            single_class=name_device_class(name, product, 1, partition) if product else "",
            memory_bytes=() if mib is None else (mib * MIB,),
            is_shared=read_share(name, vendor, labels) is not None,
            family=labels.get(vendor.family_label or "", ""),
        )
    return hardware


def describe_host(status: MetalHostStatus) -> ServingDevices:
    """Return the devices of a replica on a host, whose budget is the part of its memory that models may have."""
    chip, gpu_cores = status.chip, status.gpu_cores
    bandwidth = _keep_plausible(status.memory_bandwidth_bytes_per_second)
    return ServingDevices(
        vendor="metal",
        # Without a chip there is no class: hosts of all kinds would share one, and with it their measured speeds.
        device_class=name_host_class(chip, gpu_cores, _keep_plausible(status.memory_bytes)) if chip else "",
        product=chip,
        memory_bytes=_keep_plausible(status.budget_bytes),
        bandwidth_bytes_per_second=bandwidth or bandwidth_bytes_per_second(chip, gpu_cores),
    )


def _keep_plausible(amount: int | None) -> int | None:
    """Return an amount that a host states; None if no host can have so much, or none is stated.

    The speeds in the status of services follow from it, and the API server would refuse impossible ones.
    """
    return amount if amount is not None and 0 < amount <= _MOST_BYTES else None
