"""The result of the probe of one vendor's devices, alike for all vendors."""

from typing import Final, Literal, NamedTuple

from crds.nodefitness import NodeDevice

NodeVendor = Literal["nvidia", "amd", "intel-gaudi", "intel", "cpu"]
FactSource = Literal["nvidia-smi", "rocm-smi", "hl-smi", "sysfs", "labels", "proc"]
VENDOR_NAMES: Final = {"nvidia": "NVIDIA", "amd": "AMD", "intel-gaudi": "Intel Gaudi", "intel": "Intel"}


class VendorReading(NamedTuple):
    """Devices of one vendor; none if nothing answered."""

    vendor: NodeVendor
    source: FactSource
    devices: tuple[NodeDevice, ...] = ()
    driver: str = ""
    problems: tuple[str, ...] = ()
    shares_memory: bool = False
    """True if the devices have no memory of their own and compute in that of the machine."""
