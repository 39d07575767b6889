"""Intel's graphics cards by files of the kernel, and Gaudi by recorded outputs of hl-smi or files of its driver."""

from pathlib import Path

import pytest

from crds.nodefitness import NodeDevice
from crds.size import MIB
from devices.node.gaudi import name_gaudi_architecture, parse_hl_smi, read_gaudi
from devices.node.intel import read_intel
from tests.unit.devices.node.stand_ins import ToolFolder, recorded, write_tree

GIB = 2**30
ARC = """\
class/drm/card1/device/uevent: DRIVER={driver}|PCI_ID=8086:{id}|PCI_SLOT_NAME=0000:03:00.0
class/drm/card1/device/hwmon/hwmon3/temp2_input: 51000
proc/sys/kernel/osrelease: 6.11.0
"""
ACCEL = """\
class/accel/accel0/device/uevent: DRIVER=habanalabs|PCI_ID=1DA3:1020|PCI_SLOT_NAME=0000:43:00.0
class/accel/accel0/device/device_type: GAUDI2
class/accel/accel1/device/uevent: DRIVER=intel_vpu|PCI_ID=8086:7D1D|PCI_SLOT_NAME=0000:00:0b.0
module/habanalabs/version: 1.20.0-abc123
"""


def test_integrated_gpu_is_no_device_of_a_node(tmp_path: Path) -> None:
    assert read_intel(write_tree(tmp_path, recorded("sysfs_integrated_intel.txt")), tmp_path) is None


@pytest.mark.parametrize(
    ("driver", "files"),
    [
        ("i915", [f"lmem_total_bytes: {16 * GIB}"]),
        ("xe", [f"device/tile0/physical_vram_size_bytes: {16 * GIB}"]),
        ("xe", [f"device/tile{n}/physical_vram_size_bytes: {8 * GIB}" for n in range(2)]),
    ],
)
def test_card_states_its_memory_by_either_driver(tmp_path: Path, driver: str, files: list[str]) -> None:
    sys = write_tree(tmp_path, ARC.format(driver=driver, id="56A0"))
    write_tree(sys, "\n".join(f"class/drm/card1/{file}" for file in files))
    reading = read_intel(sys, sys / "proc")
    assert reading is not None
    assert (reading.driver, reading.problems) == (f"{driver} 6.11.0", ())
    expected = NodeDevice(id="0000:03:00.0", product="Arc A770", memory_bytes=16 * GIB, temperature_celsius=51)
    assert reading.devices == (expected,)


def test_memory_of_some_tiles_only_is_unknown(tmp_path: Path) -> None:
    sys = write_tree(tmp_path, ARC.format(driver="xe", id="0BD5"))
    write_tree(sys, f"class/drm/card1/device/tile0/physical_vram_size_bytes: {64 * GIB}")
    write_tree(sys, "class/drm/card1/device/tile1/physical_vram_size_bytes: none")
    reading = read_intel(sys, sys)
    assert reading is not None
    assert reading.devices[0].memory_bytes is None
    assert "does not state the memory of the graphics card 0000:03:00.0: use the driver xe" in reading.problems[0]


def test_cards_are_read_from_the_recorded_table() -> None:
    reading = parse_hl_smi(recorded("hl_smi_gaudi3.csv"))
    assert (len(reading.devices), reading.driver, reading.problems) == (8, "1.24.1-b336d5e", ())
    assert reading.devices[0] == NodeDevice(
        id="01P4-HL3090A0-18-UAN071-12-03-01",
        product="Gaudi3",
        architecture="gaudi3",
        memory_bytes=131_072 * MIB,
        free_bytes=130_400 * MIB,
    )


def test_columns_are_found_by_their_names(tools: ToolFolder, tmp_path: Path) -> None:
    tools.add_recorded("hl-smi", {"-Q index,name": recorded("hl_smi_gaudi2_units.csv")})
    reading = read_gaudi(tmp_path, tmp_path)
    assert reading is not None
    (device,) = reading.devices
    assert (device.utilization_percent, device.temperature_celsius, device.architecture) == (37, 41, "gaudi2")


def test_field_that_a_version_does_not_know_loses_no_card(tools: ToolFolder, tmp_path: Path) -> None:
    (tmp_path / "table").write_text(recorded("hl_smi_gaudi3.csv"))
    tools.add("hl-smi", f'case "$2" in *aip*) echo "unknown field"; exit 1;; *) exec cat {tmp_path}/table;; esac')
    reading = read_gaudi(tmp_path, tmp_path)
    assert reading is not None
    assert (len(reading.devices), reading.problems) == (8, ())


def test_kernels_files_answer_without_the_tool(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    reading = read_gaudi(write_tree(tmp_path, ACCEL), tmp_path)
    assert reading is not None
    assert (reading.source, reading.driver) == ("sysfs", "1.20.0-abc123")
    expected = NodeDevice(id="0000:43:00.0", product="Gaudi2", architecture="gaudi2", memory_bytes=96 * GIB)
    assert reading.devices == (expected,)


@pytest.mark.parametrize("script", ["echo 'driver is not loaded'; exit 1", "echo garbage"])
def test_kernels_files_answer_if_the_tool_does_not(tools: ToolFolder, tmp_path: Path, script: str) -> None:
    tools.add("hl-smi", script)
    reading = read_gaudi(write_tree(tmp_path, ACCEL), tmp_path)
    assert reading is not None
    assert reading.source == "sysfs"
    assert len(reading.devices) == len(reading.problems) == 1
    assert reading.problems[0].startswith("hl-smi ")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("HL-205", "gaudi"),
        ("HL-225", "gaudi2"),
        ("HL-288", "gaudi2"),
        ("HL-338", "gaudi3"),
        ("GAUDI3", "gaudi3"),
        ("?", ""),
    ],
)
def test_architecture_of_a_card_is_in_its_name(name: str, architecture: str) -> None:
    assert name_gaudi_architecture(name) == architecture
