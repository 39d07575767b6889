"""The probes of macOS read recorded outputs of its tools; a missing, cut or invalid value is None."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.metalhost import CoreLevel
from devices import gpu, libsystem, macos, metal, power, pressure, thermal
from devices.chips import CHIPS, bandwidth_bytes_per_second
from devices.facts import HostFacts
from devices.gpu import Gpu
from devices.metal import Metal
from devices.power import Power
from tests.unit.devices.recordings import FIXTURES, recorded, stand_in

GIB = 2**30
MIB = 2**20
GB = 10**9


def said_by_metal(working_set_bytes: int) -> str:
    return json.dumps({"name": "Apple M", "workingSetBytes": working_set_bytes})


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        pytest.param(
            {
                "sysctl": "sysctl_m1_16g.txt",
                "sw_vers": "15.6.1\n",
                "system_profiler": "displays_m1.json",
            },
            HostFacts(
                chip="Apple M1",
                machine="MacBookAir10,1",
                cpu_cores=8,
                core_levels=(CoreLevel(name="Performance", cores=4), CoreLevel(name="Efficiency", cores=4)),
                gpu_cores=8,
                os="macOS 15.6.1",
                memory_bytes=16 * GIB,
                memory_bandwidth_bytes_per_second=68 * GB,
                model_memory_bytes=16 * GIB * 2 // 3,
            ),
            id="M1, Metal does not tell, and no cores in the registry",
        ),
        pytest.param(
            {
                "sysctl": "sysctl_m2_ultra_192g.txt",
                "sw_vers": "26.2\n",
                "ioreg": "ioreg_m2_ultra_idle.txt",
                "devices.metal": said_by_metal(180224 * MIB),
            },
            HostFacts(
                chip="Apple M2 Ultra",
                machine="Mac14,14",
                cpu_cores=24,
                core_levels=(CoreLevel(name="Performance", cores=16), CoreLevel(name="Efficiency", cores=8)),
                gpu_cores=76,
                os="macOS 26.2",
                memory_bytes=192 * GIB,
                memory_bandwidth_bytes_per_second=800 * GB,
                working_set_bytes=180224 * MIB,
                wired_limit_bytes=180224 * MIB,
                model_memory_bytes=180224 * MIB,
            ),
            id="M2 Ultra with a raised limit",
        ),
        pytest.param(
            {"sysctl": "sysctl_hw_m3_max_96g.txt", "sw_vers": "14.5\n"},
            HostFacts(
                chip="Apple M3 Max",
                cpu_cores=14,
                core_levels=(CoreLevel(name="Performance", cores=10), CoreLevel(name="Efficiency", cores=4)),
                os="macOS 14.5",
                memory_bytes=96 * GIB,
                model_memory_bytes=72 * GIB,
            ),
            id="M3 Max, of which without its GPU cores no bandwidth is known",
        ),
        pytest.param(
            {
                "sysctl": "sysctl_m5_pro_64g.txt",
                "sw_vers": "27.0\n",
                "ioreg": "ioreg_m5_pro_busy.txt",
                "devices.metal": said_by_metal(55 * GIB),
            },
            HostFacts(
                chip="Apple M5 Pro",
                machine="Mac17,8",
                cpu_cores=18,
                core_levels=(CoreLevel(name="Super", cores=6), CoreLevel(name="Performance", cores=12)),
                gpu_cores=20,
                os="macOS 27.0",
                memory_bytes=64 * GIB,
                memory_bandwidth_bytes_per_second=307 * GB,
                working_set_bytes=55 * GIB,
                model_memory_bytes=55 * GIB,
            ),
            id="M5 Pro",
        ),
        pytest.param(
            {"sysctl": "sysctl_virtual_machine.txt", "sw_vers": "26.1\n", "system_profiler": "displays_intel.json"},
            HostFacts(
                chip="Apple M2 (Virtual)",
                machine="VirtualMac2,1",
                cpu_cores=4,
                core_levels=(CoreLevel(name="Level 0", cores=4),),
                os="macOS 26.1",
                memory_bytes=8 * GIB,
                model_memory_bytes=int(8 * GIB * 0.74),
            ),
            id="virtual machine: keys are missing, and the chip is none of the table",
        ),
        pytest.param({}, HostFacts(), id="no tool tells"),
    ],
)
def test_facts_of_a_mac(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], expected: HostFacts) -> None:
    texts = {tool: recorded(text) if (FIXTURES / text).exists() else text for tool, text in outputs.items()}
    stand_in(monkeypatch, texts)
    facts = macos.read()
    assert {name: getattr(facts, name) for name in HostFacts.__slots__ if name != "architecture"} == {
        name: getattr(expected, name) for name in HostFacts.__slots__ if name != "architecture"
    }


def test_sysctl_values_are_read_with_either_separator() -> None:
    assert "hw.osenvironment" not in macos.parse_sysctl(recorded("sysctl_hw_m3_max_96g.txt"))
    assert macos.parse_sysctl(recorded("sysctl_raised_limit.txt"))["hw.memsize"] == "51539607552"


@pytest.mark.parametrize("text", [None, "", "0", "-1", "many", "1" * 21, "٣"])
def test_unknown_value_is_none_and_never_zero(text: str | None) -> None:
    assert macos.parse_positive(text) is None


def test_the_limit_that_the_owner_set_has_two_names() -> None:
    for name, mib in [("sysctl_raised_limit.txt", 45056), ("sysctl_macos13_limit.txt", 28672)]:
        assert macos.wired_limit_bytes(macos.parse_sysctl(recorded(name))) == mib * MIB
    assert macos.wired_limit_bytes(macos.parse_sysctl(recorded("sysctl_m1_16g.txt"))) is None


def test_levels_without_all_their_cores_are_unknown() -> None:
    values = macos.parse_sysctl(recorded("sysctl_m1_16g.txt"))
    del values["hw.perflevel1.physicalcpu"]
    assert macos.core_levels(values) == ()


def test_memory_pressure_and_swap_as_sysctl_prints_them() -> None:
    values = macos.parse_sysctl(recorded("sysctl_pressure_critical.txt"))
    assert macos.parse_swap_used(values["vm.swapusage"]) == round(6820.25 * MIB)
    assert pressure.kernel_level(macos.parse_positive(values["kern.memorystatus_vm_pressure_level"])) == "critical"
    assert macos.parse_swap_used("total = 0.00M  used = 0.00M  free = 0.00M  (encrypted)") == 0
    assert macos.parse_swap_used("total = 0.00M  used = many") is None
    assert macos.parse_swap_used(None) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ioreg_m3_pro_short.txt", Gpu("Apple M3 Pro", None, 11, 734003200)),
        ("ioreg_m5_pro_busy.txt", Gpu("Apple M5 Pro", 20, 96, 36 * GIB)),
        ("ioreg_m2_ultra_idle.txt", Gpu("Apple M2 Ultra", 76, 0, 0)),
        ("ioreg_wrapped_counter.txt", Gpu("Apple M1", 7, None, None)),
    ],
)
def test_gpu_facts_are_read(name: str, expected: Gpu) -> None:
    assert gpu.parse(recorded(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pmset_battery.txt", Power("battery", 54)),
        ("pmset_charging.txt", Power("ac", 81)),
        ("pmset_charged.txt", Power("ac", 100)),
        ("pmset_no_estimate.txt", Power("battery", 38)),
        ("pmset_not_charging.txt", Power("ac", 79)),
        ("pmset_desktop.txt", Power("ac", None)),
        ("pmset_ups.txt", Power("ups", None)),
    ],
)
def test_power_source_and_battery_are_read(name: str, expected: Power) -> None:
    assert power.parse_pmset(recorded(name)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("com.apple.system.thermalpressurelevel 0\n", "nominal"),
        ("com.apple.system.thermalpressurelevel 1\n", "moderate"),
        ("com.apple.system.thermalpressurelevel 2\n", "heavy"),
        ("com.apple.system.thermalpressurelevel 4\n", "sleeping"),
        ("com.apple.system.thermalpressurelevel 7\n", None),
        ("com.apple.system.thermalpressurelevel 40\n", None),
        ("com.apple.system.thermalpressurelevel: Failed with code 9\n", None),
        ("Failed with code 9\n", None),
    ],
)
def test_thermal_level_is_read(text: str, expected: thermal.ThermalLevel | None) -> None:
    assert thermal.parse_notifyutil(text) == expected


@pytest.mark.parametrize(("name", "cores"), [("displays_m1.json", 8), ("displays_m4_headless.json", 10)])
def test_gpu_cores_of_the_system_profiler(name: str, cores: int) -> None:
    assert macos.parse_displays(recorded(name)) == cores


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"SPDisplaysDataType": []}', '{"SPDisplaysDataType": [7, {}]}', '{"SPDisplaysDataType": [{}]}'],
)
def test_missing_gpu_cores_are_none(text: str) -> None:
    assert macos.parse_displays(text) is None


@pytest.mark.parametrize("text", ["", "null", "[1]", '{"workingSetBytes": true, "name": 3}'])
def test_metal_without_an_answer_is_none(text: str) -> None:
    assert metal.parse(text) == Metal()


PARSERS: dict[str, Callable[[str], object]] = {
    "sysctl": lambda text: tuple(sorted(macos.parse_sysctl(text).items())),
    "ioreg": gpu.parse,
    "pmset": power.parse_pmset,
    "displays": macos.parse_displays,
}


def list_facts(facts: object) -> list[object]:
    return list(facts) if isinstance(facts, tuple) else [facts]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("[sipd]*")), ids=lambda path: path.name)
def test_cut_output_has_fewer_values_and_no_wrong_ones(path: object) -> None:
    name = getattr(path, "name", "")
    text = recorded(name)
    parse = PARSERS[name.partition("_")[0]]
    whole = list_facts(parse(text))
    for end in range(0, len(text), max(1, len(text) // 400)):
        for part in list_facts(parse(text[:end])):
            assert part is None or part in whole, (end, text[:end][-60:])


@given(st.text())
def test_garbage_is_unknown_and_breaks_nothing(text: str) -> None:
    assert gpu.parse(text) == Gpu()
    assert power.parse_pmset(text) == Power()
    assert thermal.parse_notifyutil(text) is None
    assert macos.parse_displays(text) is None
    assert metal.parse(text) == Metal()
    assert macos.parse_swap_used(text) is None
    values = macos.parse_sysctl(text)
    assert macos.core_levels(values) == ()
    assert macos.wired_limit_bytes(values) is None
    assert macos.parse_positive(text) != 0


@given(st.sampled_from(sorted(path.name for path in FIXTURES.glob("ioreg*"))), st.data())
def test_a_changed_recording_breaks_nothing(name: str, data: st.DataObject) -> None:
    text = recorded(name)
    at = data.draw(st.integers(0, len(text)))
    reading = gpu.parse(text[:at] + data.draw(st.text(max_size=5)) + text[at + data.draw(st.integers(0, 20)) :])
    assert reading.cores != 0
    assert reading.utilization_percent is None or 0 <= reading.utilization_percent <= 100


@pytest.mark.parametrize(
    ("memory_gib", "limit_mib", "version", "expected_mib"),
    [
        (16, None, "15.6", 10922),  # value of an M1 of 16 GB
        (24, None, "14.5", 16384),
        (128, None, "15.1", 98304),
        (16, None, "26.1", 12124),
        (128, None, "26.0.1", 110100),
        (48, 45056, "15.6", 45056),
        (16, 99999, "15.6", 16384),  # a limit above the memory of the machine
        (64, None, "", 49152),
    ],
)
def test_working_set_by_memory_limit_and_version(
    memory_gib: int, limit_mib: int | None, version: str, expected_mib: int
) -> None:
    working_set = macos.working_set_bytes(memory_gib * GIB, None if limit_mib is None else limit_mib * MIB, version)
    assert working_set is not None
    assert working_set // MIB == expected_mib


@pytest.mark.parametrize(
    ("chip", "gpu_cores", "gb_per_second"),
    [
        ("Apple M1", None, 68),
        ("Apple M2 Ultra", 60, 800),
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M3 Max", None, None),
        ("Apple M4 Max", 40, 546),
        ("Apple M5 Max", 32, 460),
        ("Apple M5 Max", 36, None),
        ("Apple M7", 40, None),
        ("Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz", None, None),
        (None, 40, None),
    ],
)
def test_memory_bandwidth_by_chip_and_gpu_cores(
    chip: str | None, gpu_cores: int | None, gb_per_second: int | None
) -> None:
    assert bandwidth_bytes_per_second(chip, gpu_cores) == (gb_per_second and gb_per_second * GB)


def test_every_chip_has_one_bandwidth_for_each_variant_and_its_source() -> None:
    for chip, variants in CHIPS.items():
        cores = [variant.gpu_cores for variant in variants]
        assert len(set(cores)) == len(cores), chip
        assert cores == [None] or None not in cores, chip
        assert all(variant.source for variant in variants), chip


def test_memory_in_use_as_vm_stat_prints_it() -> None:
    said = recorded("vm_stat_mini_32g.txt")
    use = macos.parse_vm_stat(said)
    assert use is not None
    assert use.total_bytes == (134298 + 96636 + 640314 - 23079) * 16384
    # A page size that is not known, or a line that was cut.
    assert macos.parse_vm_stat(said.partition("\n")[2]) is None
    assert macos.parse_vm_stat(said[: said.index("Anonymous pages") + 30]) is None


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"iogpu.wired_limit_mb": 4096}, 4 * GIB),
        ({"debug.iogpu.wired_limit": 4096}, 4 * GIB),
        ({"iogpu.wired_limit_mb": 0}, None),
        ({}, None),
    ],
)
def test_limit_that_the_owner_sets_is_read_without_a_tool(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, int], limit: int | None
) -> None:
    monkeypatch.setattr(libsystem, "sysctl_int", values.get)
    assert macos.read_wired_limit_bytes() == limit
