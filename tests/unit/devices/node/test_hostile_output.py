"""Whatever a tool, a label or a file of the kernel states: no probe raises, and no value leaves the schema's range."""

import tempfile
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from crds.nodefitness import NodeDevice
from devices.node.amd import list_amd_devices, parse_rocm_smi, read_topology
from devices.node.gaudi import parse_hl_smi, read_gaudi
from devices.node.intel import read_intel
from devices.node.kernel_files import list_cards, list_pci_devices
from devices.node.labels import read_labels
from devices.node.nvidia import (
    FIELDS,
    find_refused_field,
    list_devices,
    parse_gpus,
    parse_links,
    parse_partition_memory,
    parse_partitions,
)
from devices.node.processor import parse_processor
from devices.node.vendor_reading import VendorReading
from devices.node_hardware import choose_reading
from tests.unit.devices.node.stand_ins import recorded
from tests.unit.devices.node.test_node_labels import H100, MI300X, SHARED_P106

RECORDED = [
    recorded(name)
    for name in (
        *("nvidia_h100_mig_query.csv", "nvidia_h100_mig_list.txt", "nvidia_h100_mig_q.txt"),
        *("nvidia_8_h100_topology.txt", "rocm_smi_mi100_rocm602.json", "hl_smi_gaudi3.csv"),
    )
]
HARD = [
    "-1",
    "9" * 19,
    "1" * 5000,
    "nan",
    "inf",
    "1e308",
    "0x10",
    "٣",
    "\x00",
    "\x1b[31m",
    "[N/A]",
    "x" * 5000,
    '"',
    "{}",
]
KERNEL_FILES = (
    *(f"class/drm/card0/device/{name}" for name in ("mem_info_vram_total", "mem_info_vram_used", "product_name")),
    *("class/drm/card0/device/current_compute_partition", "class/drm/card0/device/hwmon/hwmon0/temp1_input"),
    *("class/drm/card1/lmem_total_bytes", "class/accel/accel0/device/device_type"),
    *("class/kfd/kfd/topology/nodes/1/properties", "bus/pci/devices/0000:00:01.0/modalias"),
)
HARD_TEXTS = st.one_of(st.text(max_size=60), st.sampled_from(HARD))


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A recording in which a few parts were replaced, or any text."""
    text = draw(st.sampled_from(RECORDED))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(HARD_TEXTS) + text[start + draw(st.integers(0, 12)) :]
    return text if draw(st.integers(0, 9)) else draw(st.text(max_size=300))


def check(devices: tuple[NodeDevice, ...]) -> None:
    for device in devices:
        body = msgspec.to_builtins(device)
        assert msgspec.convert(body, NodeDevice) == device
        assert device.id
        assert all(text.isprintable() for text in (device.id, device.product, device.architecture, device.partition))
        assert device.memory_bytes != 0, "unknown is not 0"


def check_reading(reading: VendorReading) -> None:
    check(choose_reading([reading], None, []).devices)
    assert all(len(problem) < 400 and problem.isprintable() for problem in reading.problems)
    assert len(reading.driver) <= 256
    assert reading.devices or reading.problems


@given(query=damaged(), listed=damaged(), details=damaged(), topology=damaged())
def test_hostile_nvidia_smi_is_harmless(query: str, listed: str, details: str, topology: str) -> None:
    gpus = list(parse_gpus(query, FIELDS))
    check(list_devices(gpus, parse_partitions(listed), parse_partition_memory(details), parse_links(topology)))
    assert find_refused_field(query) is None


@given(cells=st.lists(HARD_TEXTS, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_hostile_cell_is_harmless(cells: list[str]) -> None:
    line = ", ".join(["0", "GPU-a", "0000:18:00.0", "H100", *cells[4:]])
    check(tuple(gpu.device for gpu in parse_gpus(line, FIELDS)))


@given(text=damaged())
def test_hostile_tools_of_other_vendors_are_harmless(text: str) -> None:
    check_reading(parse_rocm_smi(text))
    check_reading(parse_hl_smi(text))
    parse_processor(text, "x86_64")


@given(changes=st.dictionaries(st.sampled_from([*SHARED_P106, *H100, *MI300X]), HARD_TEXTS, max_size=6))
def test_hostile_labels_are_harmless(changes: dict[str, str]) -> None:
    for labels in (SHARED_P106, MI300X):
        if reading := read_labels(labels | changes):
            check_reading(reading)


@given(contents=st.lists(HARD_TEXTS, min_size=9, max_size=9), number=HARD_TEXTS)
def test_hostile_kernel_files_are_harmless(contents: list[str], number: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys = Path(folder)
        for path, content in zip(KERNEL_FILES, contents, strict=True):
            (sys / path).parent.mkdir(parents=True, exist_ok=True)
            (sys / path).write_text(content)
        for vendor, card in (("1002", "class/drm/card0"), ("8086", "class/drm/card1"), ("1da3", "class/accel/accel0")):
            (sys / card / "device").mkdir(parents=True, exist_ok=True)
            (sys / card / "device/uevent").write_text(
                f"PCI_ID={vendor}:{number}\nPCI_SLOT_NAME={number}\nDRIVER=amdgpu\n"
            )
        cards = list_amd_devices(list_cards(sys, "1002"), read_topology(sys))
        check(cards)
        for reading in (read_intel(sys, sys), read_gaudi(sys, sys)):
            check(reading.devices if reading else ())
        list_pci_devices(sys)
