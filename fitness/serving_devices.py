"""The hardware of one replica, as far as its fit and its speed depend on it: pods, hosts and processors alike."""

from typing import NamedTuple


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
    host_memory_bytes: int | None = None
    """Free memory beside the devices, to which layers or experts may be offloaded; None also if the devices have the
    memory of the machine."""
    host_bandwidth_bytes_per_second: int | None = None
    """Bandwidth of that memory."""
    cores: int | None = None
    """Processor cores, of a replica that computes on them."""
