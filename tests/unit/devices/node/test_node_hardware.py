"""All probes together: this machine as it is, the choice among vendors and labels, and problems with their way out."""

from pathlib import Path

import pytest

from crds.nodefitness import MOST_DEVICES, NodeDevice, NodeFitnessStatus
from devices.node.kernel_files import PciDevice, list_pci_devices
from devices.node.vendor_reading import VendorReading
from devices.node_hardware import HardwareReading, NodeRoots, choose_reading, read_node_hardware
from tests.unit.devices.node.stand_ins import ToolFolder, recorded, write_tree
from tests.unit.devices.node.test_node_labels import H100
from tests.unit.devices.node.test_nvidia_probe import GB10, WHOLE

NVIDIA = VendorReading("nvidia", "nvidia-smi", (NodeDevice(id="GPU-a", product="H100", architecture="sm_90"),))
AMD = VendorReading("amd", "sysfs", (NodeDevice(id="0000:03:00.0", product="MI300X", architecture="gfx942"),))


@pytest.fixture
def roots(tmp_path: Path) -> NodeRoots:
    """A node without devices, whose processor is this machine's."""
    return NodeRoots(sys=tmp_path / "sys", disk=tmp_path)


def test_this_machine_is_read_as_it_is(tools: ToolFolder) -> None:
    assert tools.folder.exists()
    hardware, problems = read_node_hardware({})
    assert (hardware.vendor, hardware.source, hardware.devices) == ("cpu", "proc", [])
    assert (hardware.int4, hardware.fp8) == (None, None)
    assert hardware.device_class.startswith("cpu-")
    assert hardware.device_class.endswith(f"x{hardware.cpu_cores}")
    assert None not in (hardware.memory_bytes, hardware.available_bytes, hardware.disk_bytes, hardware.disk_free_bytes)
    assert problems == ()


def test_devices_are_read_by_their_tool(tools: ToolFolder, roots: NodeRoots) -> None:
    tools.add_recorded("nvidia-smi", {"--query-gpu=": WHOLE})
    hardware = read_node_hardware(H100, roots).hardware
    assert (hardware.vendor, hardware.source, hardware.driver) == ("nvidia", "nvidia-smi", "550.54.15")
    assert hardware.device_class == "nvidia-h100-80gb-hbm3x1"
    assert (hardware.int4, hardware.fp8) == (False, True)


@pytest.mark.parametrize(
    ("capability", "formats"), [("9.0", (False, True)), ("8.6", (False, False)), ("[N/A]", (False, None))]
)
def test_format_is_one_of_all_devices(
    tools: ToolFolder, roots: NodeRoots, capability: str, formats: tuple[bool | None, bool | None]
) -> None:
    second = WHOLE.replace("0, GPU-a", "1, GPU-b").replace("9.0", capability)
    tools.add_recorded("nvidia-smi", {"--query-gpu=": WHOLE + second})
    hardware = read_node_hardware({}, roots).hardware
    assert (hardware.int4, hardware.fp8) == formats


def test_class_by_labels_is_that_by_the_tool(tools: ToolFolder, roots: NodeRoots) -> None:
    by_labels = read_node_hardware(H100, roots).hardware
    tools.add_recorded("nvidia-smi", {"--query-gpu=": WHOLE})
    assert by_labels.source == "labels"
    assert by_labels.device_class == read_node_hardware({}, roots).hardware.device_class


def test_partitions_have_a_class_of_their_own(tools: ToolFolder, roots: NodeRoots) -> None:
    answers = {"--query-gpu=": recorded("nvidia_h100_mig_query.csv"), "-L": recorded("nvidia_h100_mig_list.txt")}
    tools.add_recorded("nvidia-smi", answers)
    assert read_node_hardware({}, roots).hardware.device_class == "nvidia-h100-80gb-hbm3-3g.40gbx1"


def test_device_without_memory_has_that_of_the_machine(tools: ToolFolder, roots: NodeRoots) -> None:
    tools.add_recorded("nvidia-smi", {"--query-gpu=": GB10})
    hardware = read_node_hardware({}, roots).hardware
    (device,) = hardware.devices
    assert (device.memory_bytes, device.free_bytes) == (hardware.memory_bytes, hardware.available_bytes)


def test_labels_answer_for_a_tool_that_fails(tools: ToolFolder, roots: NodeRoots) -> None:
    tools.add("nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver."; exit 9')
    hardware, (problem,) = read_node_hardware(H100, roots)
    assert (hardware.source, len(hardware.devices)) == ("labels", 8)
    assert problem.startswith("nvidia-smi exited with 9 and printed `NVIDIA-SMI has failed")
    assert problem.endswith("run nvidia-smi on the node, and see the driver's messages there (dmesg)")


def test_missing_tool_is_named_if_the_hardware_is_there(tools: ToolFolder, roots: NodeRoots) -> None:
    assert tools.folder.exists()
    alias = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00"
    write_tree(roots.sys, f"bus/pci/devices/0000_18_00.0/modalias: {alias}")
    (roots.sys / "bus/pci/devices/0000_18_00.0").rename(roots.sys / "bus/pci/devices/0000:18:00.0")
    hardware, (problem,) = read_node_hardware({}, roots)
    assert hardware.vendor == "cpu"
    assert problem.startswith(
        "the node has a device of NVIDIA, and nvidia-smi is not in the node agent's container: install the driver"
    )


def test_tool_is_not_missing_where_labels_answer_for_its_vendor() -> None:
    """Each NVIDIA node without the vendor's runtime class was said to be not ready, although nothing was wrong."""
    on_bus, labelled = [PciDevice("10de", "2330")], NVIDIA._replace(source="labels")
    chosen = choose_reading([], labelled, on_bus)
    assert (chosen.devices, chosen.problems) == (labelled.devices, ())
    of_others = choose_reading([], AMD._replace(source="labels"), on_bus)
    assert len(of_others.problems) == 1


@pytest.mark.parametrize(
    ("device", "named"),
    [
        (PciDevice("1da3", "1020"), "Intel Gaudi"),
        (PciDevice("1002", "74a1"), "AMD"),
        (PciDevice("8086", "56c0"), "Intel"),
        (PciDevice("8086", "5917"), ""),
        (PciDevice("1002", "164e"), ""),
        (PciDevice("1a03", "2000"), ""),
    ],
)
def test_only_hardware_for_models_needs_a_tool(device: PciDevice, named: str) -> None:
    problems = choose_reading([], None, [device, device]).problems
    assert [problem.partition(",")[0] for problem in problems] == (
        [f"the node has a device of {named}"] if named else []
    )


def test_tool_that_answered_is_not_missing() -> None:
    on_bus = [PciDevice("10de", "2330")]
    assert choose_reading([NVIDIA], None, on_bus).problems == ()
    failed = VendorReading("nvidia", "nvidia-smi", problems=("nvidia-smi did not answer within 10 s",))
    assert len(choose_reading([failed], None, on_bus).problems) == 1


def test_second_vendor_is_named_and_not_mixed() -> None:
    chosen = choose_reading([NVIDIA, AMD], None, [])
    assert chosen.devices == NVIDIA.devices
    assert chosen.problems == (
        "the node has devices of AMD as well, which are not reported: a node is of one vendor, and this one of NVIDIA",
    )


def test_devices_are_bounded() -> None:
    many = NVIDIA._replace(devices=NVIDIA.devices * (MOST_DEVICES + 1))
    chosen = choose_reading([many], None, [])
    assert len(chosen.devices) == MOST_DEVICES
    assert "65 devices" in chosen.problems[0]


def test_unreadable_bus_has_no_devices(tmp_path: Path) -> None:
    assert list_pci_devices(tmp_path) == ()


def test_nothing_readable_is_a_node_without_facts(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    absent = tmp_path / "absent"
    reading = read_node_hardware({}, NodeRoots(proc=absent, sys=absent, disk=absent))
    processor = reading.hardware.architecture
    nothing = NodeFitnessStatus(vendor="cpu", source="proc", device_class="cpu-unknownx1", architecture=processor)
    assert reading == HardwareReading(nothing)
