"""AMD's GPUs by the kernel's files as recorded, and by recorded outputs of two versions of rocm-smi."""

from pathlib import Path

import pytest

from crds.nodefitness import NodeDevice
from devices.node.amd import format_address, format_target, parse_rocm_smi, read_amd, read_topology
from devices.node.vendor_reading import VendorReading
from tests.unit.devices.node.stand_ins import ToolFolder, recorded, write_tree

GIB = 2**30
CARD = "uevent: DRIVER=amdgpu|PCI_ID=1002:{id}|PCI_SLOT_NAME=0000:{bus}:00.0"


def read(sys: Path) -> VendorReading:
    reading = read_amd(sys, sys / "proc")
    assert reading is not None
    return reading


def add_mi210(sys: Path, card: int, bus: str, node: int, *links: int) -> None:
    device = f"class/drm/card{card}/device"
    lines = (
        f"{device}/{CARD.format(id='740F', bus=bus)}",
        f"{device}/mem_info_vram_total: {64 * GIB}",
        f"{device}/mem_info_vram_used: {4 * GIB}",
        f"{device}/hwmon/hwmon{card}/temp1_input: 41000",
    )
    write_tree(sys, "\n".join(lines))
    folder = sys / f"class/kfd/kfd/topology/nodes/{node}"
    folder.mkdir(parents=True)
    facts = recorded("kfd_mi210_properties.txt").replace("location_id 768", f"location_id {int(bus, 16) << 8}")
    (folder / "properties").write_text(facts)
    for number, target in enumerate(links):
        link = folder / f"io_links/{number}/properties"
        link.parent.mkdir(parents=True)
        link.write_text(recorded("kfd_mi210_link_properties.txt").replace("node_to 2", f"node_to {target}"))


def test_card_is_read_from_the_kernels_files(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    sys = write_tree(tmp_path, recorded("sysfs_vega.txt"))
    write_tree(tmp_path, "module/amdgpu/version: 6.10.5")
    assert read(sys) == VendorReading(
        vendor="amd",
        source="sysfs",
        driver="6.10.5",
        devices=(
            NodeDevice(
                id="0123456789abcdef",
                product="AMD 687f",
                memory_bytes=8_573_157_376,
                free_bytes=8_573_157_376 - 1_490_378_752,
                utilization_percent=4,
            ),
        ),
    )


def test_driver_of_the_kernel_is_named_by_the_kernel(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    sys = write_tree(tmp_path, recorded("sysfs_vega.txt") + "proc/sys/kernel/osrelease: 6.8.0-45-generic\n")
    assert read(sys).driver == "amdgpu 6.8.0-45-generic"


def test_target_and_links_come_from_the_compute_driver(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    add_mi210(tmp_path, 0, "03", 4, 5)
    add_mi210(tmp_path, 1, "83", 5, 4, 99)
    first, second = read(tmp_path).devices
    assert (first.product, first.architecture, first.temperature_celsius) == ("MI210", "gfx90a", 41)
    assert (first.id, first.links) == ("0000:03:00.0", ["0000:83:00.0"])
    assert (second.id, second.links) == ("0000:83:00.0", ["0000:03:00.0"])
    assert first.free_bytes == 60 * GIB


def test_processor_in_the_topology_is_no_gpu(tmp_path: Path) -> None:
    write_tree(tmp_path, "class/kfd/kfd/topology/nodes/0/properties: cpu_cores_count 48|gfx_target_version 0")
    assert read_topology(tmp_path) == ()


def test_integrated_gpu_is_no_device(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    device = "class/drm/card0/device"
    write_tree(tmp_path, f"{device}/{CARD.format(id='164E', bus='0b')}\n{device}/mem_info_vram_total: {GIB // 2}\n")
    assert read_amd(tmp_path, tmp_path) is None


def test_partition_is_named(tools: ToolFolder, tmp_path: Path) -> None:
    assert tools.folder.exists()
    add_mi210(tmp_path, 0, "03", 1)
    assert read(tmp_path).devices[0].partition == ""
    write_tree(tmp_path, "class/drm/card0/device/current_compute_partition: SPX")
    assert read(tmp_path).devices[0].partition == "", "a whole device"
    modes = ("current_compute_partition: CPX", "current_memory_partition: NPS4")
    write_tree(tmp_path, "\n".join(f"class/drm/card0/device/{mode}" for mode in modes))
    assert read(tmp_path).devices[0].partition == "cpx_nps4"


def test_rocm_smi_answers_where_the_kernels_files_do_not(tools: ToolFolder, tmp_path: Path) -> None:
    tools.add_recorded("rocm-smi", {"--showproductname": recorded("rocm_smi_mi100_rocm602.json")})
    reading = read(tmp_path)
    assert (reading.source, reading.driver, reading.problems) == ("rocm-smi", "6.3.6", ())
    assert reading.devices[1] == NodeDevice(
        id="0x4edfb117a17a07d",
        product="Arcturus GL-XL [Instinct MI100]",
        architecture="gfx908",
        memory_bytes=34_342_961_152,
        free_bytes=34_342_961_152 - 6_750_208,
        utilization_percent=0,
        temperature_celsius=55,
    )


def test_other_version_of_rocm_smi_is_read() -> None:
    # ROCm 6.1 writes `Card Series`, and states no unique id for this card.
    (device,) = parse_rocm_smi(
        "WARNING: AMD GPU device(s) is/are in a low-power state\n" + recorded("rocm_smi_rx6700xt_rocm612.json")
    ).devices
    assert (device.id, device.architecture) == ("0000:07:00.0", "gfx1031")
    assert device.product == "Navi 22 [Radeon RX 6700/6700 XT / 6800M]"


@pytest.mark.parametrize(
    "text", ["ERROR: No AMD GPUs", "{", "[1]", '{"card0": 3}', '{"card0": {"Unique ID": 1}}', "{" * 9999]
)
def test_garbage_of_rocm_smi_is_a_problem(text: str) -> None:
    reading = parse_rocm_smi(text)
    assert reading.devices == ()
    assert "which states no GPU" in reading.problems[0]


@pytest.mark.parametrize("other", ['"system": null', '"card9": null', '"note": "text"', '"card9": {"a": NaN}'])
def test_odd_section_of_rocm_smi_hides_no_card(other: str) -> None:
    text = recorded("rocm_smi_mi100_rocm602.json").strip()
    assert len(parse_rocm_smi(f"{text[:-1]}, {other}}}").devices) == len(parse_rocm_smi(text).devices) > 0


def test_failure_of_rocm_smi_is_a_problem(tools: ToolFolder, tmp_path: Path) -> None:
    tools.add("rocm-smi", "echo 'cannot open /dev/kfd'; exit 1")
    assert read(tmp_path).problems == ("rocm-smi exited with 1 and printed `cannot open /dev/kfd`",)


@pytest.mark.parametrize(
    ("version", "target"),
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (0, ""),
        (97777, ""),
    ],
)
def test_target_is_named_as_the_compiler_names_it(version: int, target: str) -> None:
    assert format_target(version) == target


def test_location_is_an_address_on_the_bus() -> None:
    assert format_address(0, 0x8300) == "0000:83:00.0"
    assert format_address(2, 0x030A) == "0002:03:01.2"
