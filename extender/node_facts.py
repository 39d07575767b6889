"""The facts of a node by which it is scored, from its NodeFitness, its labels and its annotations.

Nodes with equal facts have equal scores for every model, so facts are coarse: thousands of nodes are of few kinds.
"""

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from crds.meta import GROUP
from crds.nodefitness import NodeFitnessStatus
from crds.size import GIB, MIB
from devices.device_class import name_device_class, name_processor_class
from devices.node_labels import read_device_mib, read_share
from devices.products import find_product
from devices.vendors import Vendors
from fitness.serving_devices import ServingDevices

DEFAULT_ANNOTATION_PREFIX: Final = GROUP
_PRODUCT: Final = re.compile(r"(?P<product>.*?)(-MIG-(?P<partition>.+?))?(-SHARED)?")
"""Value of a product label, of which GPU feature discovery makes names of partitions and shared devices."""
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_SINGLE: Final = "x1"
_PERCENT: Final = 100
_UTILIZATION_STEPS: Final = 20
_PROCESSOR: Final = "cpu"


class DeviceHardware(NamedTuple):
    """The hardware of a node, which is the same on many."""

    vendors: frozenset[str] = frozenset()
    """Vendors of devices that the node has, by their names in `devices/vendors.py`; empty: unknown."""
    vendor: str = ""
    """The one that the other facts are about; cpu: the node has no devices; empty: unknown."""
    product: str = ""
    single_class: str = ""
    """Device class of a replica with one device; empty: unknown."""
    memory_bytes: tuple[int | None, ...] = ()
    """Memory of each device; one entry for all if `lists_devices` is false."""
    lists_devices: bool = False
    """The node agent reports each device; else only labels are known."""
    is_shared: bool = False
    """Several pods get the same device."""
    bandwidth_bytes_per_second: int | None = None
    """Memory bandwidth of each device."""
    processor_class: str = ""
    """Device class of a replica that computes on all cores of the processor; empty: unknown."""
    processor: str = ""
    cores: int | None = None
    node_memory_bytes: int | None = None
    processor_bandwidth_bytes_per_second: int | None = None

    def name_class(self, count: int, partition: str = "") -> str:
        """Return the device class of a replica with `count` devices; 0: on the processor; empty: unknown."""
        if count == 0:
            return self.processor_class
        if partition and self.product:
            return name_device_class(self.vendor, self.product, count, partition)
        return f"{self.single_class.removesuffix(_SINGLE)}x{count}" if self.single_class else ""

    def describe_replica(self, count: int, partition: str = "") -> ServingDevices:
        """Return the devices of a replica, for an estimate of its speed."""
        if count == 0:
            return ServingDevices(
                *(_PROCESSOR, self.processor_class, self.processor),
                memory_bytes=self.node_memory_bytes,
                bandwidth_bytes_per_second=self.processor_bandwidth_bytes_per_second,
                cores=self.cores,
            )
        replica = ServingDevices(self.vendor, self.name_class(count, partition), self.product, count)
        if partition:
            return replica  # neither memory nor bandwidth of a whole device is that of a part of it
        stated = [each for each in self.memory_bytes if each is not None]
        listed = find_product(self.vendor, self.product)
        bandwidth = self.bandwidth_bytes_per_second
        if bandwidth is None and listed is not None and listed.gb_per_second is not None:
            bandwidth = round(listed.gb_per_second * 1e9)
        return replica._replace(
            memory_bytes=min(stated) if stated else None,
            bandwidth_bytes_per_second=bandwidth,
            flops=listed.tflops * 1e12 if listed is not None and listed.tflops is not None else None,
        )


class ScoringFacts(NamedTuple):
    """Everything by which a node is scored."""

    hardware: DeviceHardware = DeviceHardware()
    utilization: float | None = None
    """From 0 to 1, in steps of a twentieth."""
    cost: float | None = None
    """In whatever unit all nodes have it."""
    free_gib: tuple[int | None, ...] = ()
    """Free memory of each device that pods share, in whole GiB; empty: unknown, or no device is shared."""


class NodeReading(NamedTuple):
    """The facts of a node, and the annotations that could not be read, with their values."""

    facts: ScoringFacts
    ignored: tuple[tuple[str, str], ...] = ()


def read_node(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    fitness: NodeFitnessStatus | None,
    vendors: Vendors,
    annotation_prefix: str = DEFAULT_ANNOTATION_PREFIX,
) -> NodeReading:
    """Return the facts of a node.

    Args:
        labels: labels of the Node.
        annotations: annotations of the Node.
        fitness: what its node agent reports; None: nothing, or it is stale.
        vendors: the table of vendors.
        annotation_prefix: prefix of the annotations with utilization and cost.
    """
    hardware = _read_hardware(labels, fitness, vendors)
    names = [f"{annotation_prefix}/{name}" for name in ("gpu.util", "cost")]
    stated_util, stated_cost = (annotations.get(name) for name in names)
    util, cost = _read_number(stated_util, most=1.0), _read_number(stated_cost)
    ignored = tuple(
        (name, value[:64])
        for name, value, found in zip(names, (stated_util, stated_cost), (util, cost), strict=True)
        if value is not None and found is None
    )
    if util is None and fitness is not None:
        read = [each.utilization_percent for each in fitness.devices if each.utilization_percent is not None]
        util = sum(read) / len(read) / _PERCENT if read else None
    free: tuple[int | None, ...] = ()
    if hardware.is_shared and fitness is not None:
        free = tuple(None if each.free_bytes is None else each.free_bytes // GIB for each in fitness.devices)
    steps = None if util is None else round(util * _UTILIZATION_STEPS) / _UTILIZATION_STEPS
    return NodeReading(ScoringFacts(hardware, steps, cost, free), ignored)


def _read_number(text: str | None, most: float = math.inf) -> float | None:
    """Return a number from 0; None for anything else."""
    if text is None or not _NUMBER.fullmatch(text) or float(text) > most:
        return None
    return float(text)


def _read_hardware(labels: Mapping[str, str], fitness: NodeFitnessStatus | None, vendors: Vendors) -> DeviceHardware:
    labelled = _read_labels(labels, vendors)
    if fitness is None or not fitness.device_class:
        return labelled
    processor = DeviceHardware(
        processor_class=name_processor_class(fitness.processor, fitness.cpu_cores) if fitness.cpu_cores else "",
        processor=fitness.processor,
        cores=fitness.cpu_cores,
        node_memory_bytes=fitness.memory_bytes,
        processor_bandwidth_bytes_per_second=fitness.memory_bandwidth_bytes_per_second,
    )
    if not fitness.devices:
        return processor._replace(vendors=labelled.vendors, vendor=fitness.vendor)
    bandwidths = [each.memory_bandwidth_bytes_per_second for each in fitness.devices]
    stated = [each for each in bandwidths if each is not None]
    return processor._replace(
        vendors=labelled.vendors | {fitness.vendor},
        vendor=fitness.vendor,
        product=fitness.devices[0].product,
        single_class=fitness.device_class if fitness.device_class.endswith(_SINGLE) else "",
        memory_bytes=tuple(each.memory_bytes for each in fitness.devices),
        lists_devices=True,
        is_shared=labelled.is_shared,
        bandwidth_bytes_per_second=min(stated) if stated else None,
    )


def _read_labels(labels: Mapping[str, str], vendors: Vendors) -> DeviceHardware:
    """Return the devices that the labels of the vendors' labellers state."""
    found = DeviceHardware()
    for name, vendor in vendors.items():
        stated = labels.get(vendor.product_label or "", "")
        if not stated and not labels.get(vendor.memory_label or ""):
            continue
        named = _PRODUCT.fullmatch(stated)
        product = named["product"] if named else ""
        partition = (named["partition"] if named else None) or ""
        mib = read_device_mib(name, vendor, labels)
        found = DeviceHardware(
            vendors=found.vendors | {name},
            vendor=name,
            product=product,
            single_class=name_device_class(name, product, 1, partition) if product else "",
            memory_bytes=() if mib is None else (mib * MIB,),
            is_shared=read_share(name, vendor, labels) is not None,
        )
    return found
