"""The hardware of a node: its accelerator devices, processor, memory and disk, as its node agent reports them.

Facts come from the vendor's tool or the kernel, and from the labels of other labellers of nodes where neither answers.
Whatever is missing, hangs or lies costs only itself: it is a problem in words beside the facts that were read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from crds.nodefitness import MOST_DEVICES, NodeDevice, NodeFitnessStatus
from devices.device_class import name_device_class, name_processor_class
from devices.node.amd import read_amd
from devices.node.gaudi import read_gaudi
from devices.node.intel import INTEL_CARDS, read_intel
from devices.node.kernel_files import PciDevice, list_pci_devices
from devices.node.labels import read_labels
from devices.node.number_formats import find_number_formats
from devices.node.nvidia import read_nvidia
from devices.node.processor import read_machine
from devices.node.vendor_reading import VENDOR_NAMES, NodeVendor, VendorReading
from devices.products import find_product

_TOOLS: Final[Mapping[NodeVendor, str]] = {"nvidia": "nvidia-smi", "amd": "rocm-smi", "intel-gaudi": "hl-smi"}


class NodeRoots(NamedTuple):
    """The folders at which a container sees parts of its node."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    disk: Path = Path("/")
    """A folder in the file system of the node's pods."""


_MACHINE: Final = NodeRoots()


class HardwareReading(NamedTuple):
    """The hardware of a node now, and what could not be read."""

    hardware: NodeFitnessStatus
    problems: tuple[str, ...] = ()
    """Each tool that is missing, hung or printed what is no answer, in a sentence with the way out."""


def read_node_hardware(labels: Mapping[str, str], roots: NodeRoots = _MACHINE) -> HardwareReading:
    """Read the hardware of this node now: processor, memory and disk, and the accelerator devices of one vendor.

    Blocks until the vendors' tools have answered, each of which has a time limit.

    Args:
        labels: labels of the Node, by which other labellers state devices.
        roots: the folders at which this process sees its node.
    """
    # The order is that of preference: a node reports the devices of one vendor.
    by_probe = [read_nvidia(), read_amd(roots.sys, roots.proc), read_gaudi(roots.sys, roots.proc)]
    readings = [reading for reading in (*by_probe, read_intel(roots.sys, roots.proc)) if reading]
    chosen = choose_reading(readings, read_labels(labels), list_pci_devices(roots.sys))
    # Processor, memory and disk.
    machine = read_machine(roots.proc, roots.disk)

    # A number format counts if all devices compute with it.
    formats = [find_number_formats(chosen.vendor, device.architecture) for device in chosen.devices]
    hardware = replace(
        machine,
        vendor=chosen.vendor,
        source=chosen.source,
        device_class=_name_class(chosen, machine),
        driver=chosen.driver,
        devices=share_memory(chosen.devices, machine) if chosen.shares_memory else list(chosen.devices),
        int4=_find_common([device_formats.int4 for device_formats in formats]),
        fp8=_find_common([device_formats.fp8 for device_formats in formats]),
    )
    return HardwareReading(hardware, chosen.problems)


def choose_reading(
    readings: Sequence[VendorReading], labelled: VendorReading | None, bus: Sequence[PciDevice]
) -> VendorReading:
    """Return the devices to report, those of one vendor, with the problems of all probes.

    1. Devices that a probe has found come first; those that labels state count if no probe has found any.
    2. Problems are the failures of probes, devices on the PCI bus of a vendor that no reading is about, and devices of
       further vendors, which are left out.
    3. Without any device, the node computes on its processor. Devices beyond the limit are left out.

    Args:
        readings: the readings of the vendors' probes, the preferred vendor first.
        labelled: what labels state, for a node where no probe finds a device.
        bus: devices that the node has whether or not a probe can read them.
    """
    # 1. Readings with devices: those of probes, else that of labels.
    with_devices = [reading for reading in readings if reading.devices]
    if not with_devices and labelled is not None:
        # Labels are all that most nodes without the vendor's runtime class have: nothing has failed there.
        # From here on, the labels are a reading like those of probes.
        with_devices, readings = [labelled], [*readings, labelled]

    # 2. The failures of probes, and devices on the bus that no reading is about.
    problems = [problem for reading in readings for problem in _explain_failures(reading)]
    answered_vendors = {reading.vendor for reading in readings}
    vendors_on_bus = dict.fromkeys(vendor for device in bus if (vendor := _find_vendor(device)))
    problems += [_explain_missing_tool(vendor) for vendor in vendors_on_bus if vendor not in answered_vendors]

    # 3. Choose one vendor and its first devices; what is left out is a problem, too.
    if not with_devices:
        return VendorReading("cpu", "proc", problems=tuple(problems))
    chosen = with_devices[0]
    problems += [
        f"the node has devices of {VENDOR_NAMES[reading.vendor]} as well, which are not reported: "
        f"a node is of one vendor, and this one of {VENDOR_NAMES[chosen.vendor]}"
        for reading in with_devices[1:]
    ]
    if len(chosen.devices) > MOST_DEVICES:
        count = len(chosen.devices)
        problems.append(f"{chosen.source} states {count} devices, of which the first {MOST_DEVICES} are reported")
    return chosen._replace(devices=chosen.devices[:MOST_DEVICES], problems=tuple(problems))


def share_memory(devices: Sequence[NodeDevice], machine: NodeFitnessStatus) -> list[NodeDevice]:
    """Return the devices; one without memory of its own gets the memory of the machine, in which it computes."""
    return [
        replace(device, memory_bytes=machine.memory_bytes, free_bytes=machine.available_bytes)
        if device.memory_bytes is None
        else device
        for device in devices
    ]


def _explain_failures(reading: VendorReading) -> list[str]:
    """Return the problems of a reading, with a hint where the tool of the vendor has failed."""
    # _TOOLS: the program by which each vendor's devices are read. A problem of a tool begins with its name.
    tool = _TOOLS.get(reading.vendor, "")
    hint = f"run {tool} on the node, and see the driver's messages there (dmesg)"
    return [
        f"{problem}: {hint}" if tool and problem.startswith(f"{tool} ") else problem for problem in reading.problems
    ]


def _find_vendor(device: PciDevice) -> NodeVendor | None:
    """Return the vendor of a PCI device on which models can run; None for integrated GPUs and all others."""
    # The ids are those that the PCI registry gives to NVIDIA, Habana (Intel Gaudi), AMD and Intel.
    if device.vendor_id == "10de":
        return "nvidia"
    if device.vendor_id == "1da3":
        return "intel-gaudi"
    if device.vendor_id == "1002" and find_product("amd", device.device_id):
        return "amd"
    return "intel" if device.vendor_id == "8086" and device.device_id in INTEL_CARDS else None


def _explain_missing_tool(vendor: NodeVendor) -> str:
    """Return the problem that a node has devices of a vendor which nothing reads, with the way out."""
    tool = _TOOLS.get(vendor)
    missing = f"{tool} is not in the node agent's container" if tool else "no driver of the kernel states it"
    return (
        f"the node has a device of {VENDOR_NAMES[vendor]}, and {missing}: install the driver on the node, run the "
        "agent with the vendor's runtime class or with the tool mounted, or let the vendor's labeller label the node"
    )


def _find_common(values: Sequence[bool | None]) -> bool | None:
    """Return whether all devices can do something: False if one cannot; else None if that is unknown of any."""
    if False in values:
        return False
    return True if values and None not in values else None


def _name_class(reading: VendorReading, machine: NodeFitnessStatus) -> str:
    """Return the device class of the first device, or of the processor if there are none."""
    if not reading.devices:
        return name_processor_class(machine.processor, machine.cpu_cores or 1)
    first = reading.devices[0]
    return name_device_class(reading.vendor, first.product, partition=first.partition)
