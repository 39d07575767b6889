"""The verdicts of the deep checks on Macs, from recorded outputs; tests/hosts runs them for real."""

import json
import re
import sys
from pathlib import Path

import pytest

from devices import gpu, libsystem, macos
from devices.host import HostState
from devices.metal import Metal
from devices.pressure import PressureReading
from metal_agent.doctor import engines, fact_checks
from metal_agent.doctor.finding import FindingVerdict, check_same, check_value
from tests.unit.devices.recordings import recorded, stand_in

GIB = 2**30
MAC = {
    "IOHIDSystem": recorded("ioreg_hid_typed.txt"),
    "ioreg": recorded("ioreg_m5_pro_busy.txt"),
    "system_profiler": recorded("displays_m4_headless.json").replace('"10"', '"20"'),
    "devices.metal": json.dumps({"name": "Apple M5 Pro", "workingSetBytes": 50 * GIB}),
    "sw_vers": "26.2\n",
    "vm.swapusage": recorded("sysctl_pressure_critical.txt"),
    "sysctl": recorded("sysctl_m5_pro_64g.txt"),
    "vm_stat": recorded("vm_stat_mini_32g.txt"),
}


def verdicts(
    monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], level: int | None = 4
) -> dict[str, FindingVerdict]:
    stand_in(monkeypatch, outputs)
    monkeypatch.setattr(libsystem, "sysctl_int", lambda _: level)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(libsystem, "memory_use", lambda: macos.parse_vm_stat(recorded("vm_stat_mini_32g.txt")))
    state = HostState(pressure=PressureReading("critical", round(6820.25 * 2**20), 4 * GIB), gpu=gpu.read())
    return {finding.name: finding.verdict for finding in fact_checks.check_mac(macos.read(), state)}


def test_expected_mac_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(verdicts(monkeypatch, MAC).values()) == {"ok"}


def documented() -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \|", Path("docs/macos-verification.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in row.split(", ")}


def test_every_line_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, MAC).keys() <= documented()
    modules = [Path(fact_checks.__file__).with_name(f"{name}_checks.py") for name in ("fact", "process")]
    source = "".join(path.read_text() for path in modules)
    named = set(re.findall(r'(?:value|values|same|near|growth)\(\s*"([^"]+)"', source))
    assert len(named) > 20
    assert named <= documented(), named - documented()


@pytest.mark.parametrize(
    ("changes", "level", "name"),
    [
        ({"system_profiler": recorded("displays_m1.json")}, 4, "GPU cores"),
        ({"ioreg": recorded("ioreg_m2_ultra_idle.txt")}, 4, "Metal's device"),
        (
            {"devices.metal": json.dumps({"name": "Apple M5 Pro", "workingSetBytes": 60 * GIB})},
            4,
            "Metal's working set",
        ),
        ({"devices.metal": ""}, 4, "Metal's device"),
        ({"vm.swapusage": "vm.swapusage: total = 0.00M  used = 0.00M  free = 0.00M\n"}, 4, "swap by psutil"),
        ({"vm_stat": recorded("vm_stat_mini_32g.txt").replace("134298.", "334298.")}, 4, "memory in use by ctypes"),
        ({"vm_stat": ""}, 4, "memory in use by ctypes"),
        ({}, 1, "pressure by ctypes"),
        ({}, None, "pressure by ctypes"),
    ],
)
def test_differing_fact_fails(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], level: int | None, name: str
) -> None:
    assert verdicts(monkeypatch, MAC | changes, level)[name] == "problem"


def test_working_set_near_the_rule_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # 84 %, as on a Mac with 128 GB; the rule assumes 74 %, as on a Mac with 16 GB.
    said = json.dumps({"name": "Apple M5 Pro", "workingSetBytes": int(64 * GIB * 0.84) + 1})
    assert verdicts(monkeypatch, MAC | {"devices.metal": said}, 1)["Metal's working set"] == "ok"


def test_mac_without_facts_has_no_ok_line(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verdicts(monkeypatch, {}, None)
    assert "ok" not in outcome.values()
    assert outcome["Metal's working set"] == "problem"


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("Available devices:\n  MTL0: Apple M4 (12124 MiB, 12123 MiB free)\n", "ok"),
        ("Available devices:\n  Metal: Apple M3 Max (12124 MiB, 12123 MiB free)\n", "ok"),
        ("Available devices:\n  MTL0: Apple M4 (10922 MiB, 10922 MiB free)\n", "problem"),
        ("Available devices:\n  (none)\n", "problem"),
        ("", "problem"),
    ],
)
def test_device_of_llama_cpp_must_be_the_gpu(said: str, verdict: FindingVerdict) -> None:
    assert engines.check_device(said, Metal(working_set_bytes=12124 * 2**20)).verdict == verdict


def test_verdict_depends_on_found_expected_and_needed() -> None:
    assert check_value("a", 3, "3").verdict == "ok"
    assert check_value("a", 0, "a number", holds=False).verdict == "problem"
    assert check_value("a", None, "3", needed=False).verdict == "unknown"
    assert check_value("a", None, "3").verdict == "problem"
    assert check_same("a", 3, 3, "b").verdict == "ok"
    assert check_same("a", 3, 4, "b").verdict == "problem"
    assert check_same("a", 3, None, "b").verdict == "unknown"
    assert check_same("a", None, None, "b").verdict == "problem"
