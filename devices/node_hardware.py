"""The hardware of a node: its accelerator devices, processor, memory and disk, as its node agent reports them.

Facts come from the vendor's tool or the kernel, and from the labels of other labellers of nodes where neither answers.
Whatever is missing, hangs or lies costs only itself: it is a problem in words beside the facts that were read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from crds.nodefitness import NodeDevice

NodeVendor = Literal["nvidia", "amd", "intel-gaudi", "intel", "cpu"]
FactSource = Literal["nvidia-smi", "rocm-smi", "hl-smi", "sysfs", "labels", "proc"]


class NodeRoots(NamedTuple):
    """The folders at which a container sees parts of its node."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    disk: Path = Path("/")
    """A folder in the file system of the node's pods."""


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


def read_node_hardware(labels: Mapping[str, str], roots: NodeRoots = NodeRoots()) -> NodeHardware:
    """Read the hardware of this node now. Blocks for the time limit of a vendor's tool at most.

    Args:
        labels: labels of the Node, by which other labellers state devices.
        roots: the folders at which this process sees its node.
    """
    del labels, roots
    raise NotImplementedError


def measure_memory_bandwidth() -> int | None:
    """Return the memory bandwidth of the processor, in bytes per second. Blocks for some 100 ms."""
    raise NotImplementedError
