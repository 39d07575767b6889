"""The hardware of one replica, as far as its fit and its speed depend on it: pods, hosts and processors alike."""

from typing import Final, NamedTuple

from crds.size import MIB
from devices.device_class import name_device_class
from devices.products import find_product

_GIGA: Final = 10**9
_TERA: Final = 10**12


class ServingDevices(NamedTuple):
    """The devices of one replica, which are all alike; None is unknown, never 0."""

    vendor: str
    """Accelerator as `devices/vendors.py` names it: nvidia, amd, intel-gaudi, intel, metal or cpu."""
    device_class: str
    """Its name by `devices/device_class.py`."""
    product: str = ""
    """Product, or the chip of a host, or the model of a processor; empty: unknown."""
    device_count: int = 1
    """Devices that the replica has; 1 on a host or processor."""
    memory_bytes: int | None = None
    """Memory of each device that a replica may have if nothing else runs there: for a host its budget, for a processor
    the memory of the node."""
    free_bytes: int | None = None
    """The part of it that is free now."""
    bandwidth_bytes_per_second: int | None = None
    """Memory bandwidth of each device, by its maker or measured."""
    flops: float | None = None
    """Dense 16-bit floating-point operations a second of each device, by its maker, without sparsity."""
    cores: int | None = None
    """Processor cores, of a replica that computes on them."""
    family: str = ""
    """Architecture that a node label states, in case the product is not listed; empty: none is stated."""


def describe_devices(
    vendor: str,
    product: str,
    count: int = 1,
    *,
    partition: str = "",
    memory_bytes: int | None = None,
    free_bytes: int | None = None,
    bandwidth: int | None = None,
) -> ServingDevices:
    """Return the devices of a replica in a pod; figures that are not given are those of the listed product.

    Memory and arithmetic speed of a listed product are those of the whole device, so a partition of it does not get
    them. It gets a part of the bandwidth, in proportion to its memory, if that is known.

    Args:
        vendor: its name in `devices/vendors.py`.
        product: the product as a label or the vendor's tool names it.
        count: devices of the replica.
        partition: the partition of a device, such as the MIG profile `1g.10gb`; empty: whole devices.
        memory_bytes: memory of each device or partition; None: that of the product.
        free_bytes: the part of it that is free.
        bandwidth: bytes a second by the vendor's tool; None: that of the product.
    """
    # 1. Find the product; the memory of a whole device tells products of one name apart.
    whole_mib = memory_bytes // MIB if memory_bytes and not partition else None
    listed = find_product(vendor, product, whole_mib)
    listed_bytes = listed.memory_bytes if listed else None

    # 2. Without a measured bandwidth, take that of the product, or the partition's part of it.
    if bandwidth is None and listed and listed.gb_per_second:
        bandwidth = round(listed.gb_per_second * _GIGA)
        if partition and memory_bytes and listed_bytes:
            bandwidth = round(bandwidth * min(1.0, memory_bytes / listed_bytes))
        elif partition:
            # It is unknown how large a part of the device the partition is.
            bandwidth = None

    return ServingDevices(
        vendor=vendor,
        device_class=name_device_class(vendor, product, count, partition),
        product=product,
        device_count=count,
        memory_bytes=memory_bytes or (None if partition else listed_bytes),
        free_bytes=free_bytes,
        bandwidth_bytes_per_second=bandwidth,
        flops=listed.tflops * _TERA if listed and listed.tflops and not partition else None,
    )
