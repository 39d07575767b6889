"""The verdicts of the self test on Macs, from recorded outputs; tests/hosts runs it for real."""

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli import log
from cli.agent import selftest
from devices import gpu, libsystem, macos
from devices.host import HostState
from devices.metal import Metal
from devices.pressure import PressureReading
from metal_agent.selftest import engine, facts, run
from metal_agent.selftest.line import Line, Verdict, check_known, check_same
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


def verdicts(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], level: int | None = 4) -> dict[str, Verdict]:
    stand_in(monkeypatch, outputs)
    monkeypatch.setattr(libsystem, "sysctl_int", lambda _: level)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(libsystem, "memory_use", lambda: macos.parse_vm_stat(recorded("vm_stat_mini_32g.txt")))
    state = HostState(pressure=PressureReading("critical", round(6820.25 * 2**20), 4 * GIB), gpu=gpu.read())
    return {line.name: line.verdict for line in facts.check_mac(macos.read(), state)}


def test_expected_mac_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, MAC)
    assert found.pop("limit that was set") == "unknown"
    assert set(found.values()) == {"ok"}


def documented() -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \|", Path("docs/macos-verification.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in row.split(", ")}


def test_every_line_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, MAC).keys() <= documented()
    source = "".join(path.read_text() for path in Path(facts.__file__).parent.glob("*.py"))
    named = set(re.findall(r'(?:known|same|_growth)\(\s*"([^"]+)"', source))
    assert len(named) > 40
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
    assert verdicts(monkeypatch, MAC | changes, level)[name] == "FAILED"


def test_working_set_near_the_rule_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # 84 %, as on a Mac with 128 GB; the rule assumes 74 %, as on a Mac with 16 GB.
    said = json.dumps({"name": "Apple M5 Pro", "workingSetBytes": int(64 * GIB * 0.84) + 1})
    assert verdicts(monkeypatch, MAC | {"devices.metal": said}, 1)["Metal's working set"] == "ok"


def test_mac_without_facts_has_no_ok_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, {}, None)
    assert "ok" not in found.values()
    assert found["Metal's working set"] == "FAILED"
    assert found["memory bandwidth"] == "unknown"


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("Available devices:\n  MTL0: Apple M4 (12124 MiB, 12123 MiB free)\n", "ok"),
        ("Available devices:\n  Metal: Apple M3 Max (12124 MiB, 12123 MiB free)\n", "ok"),
        ("Available devices:\n  MTL0: Apple M4 (10922 MiB, 10922 MiB free)\n", "FAILED"),
        ("Available devices:\n  (none)\n", "FAILED"),
        ("", "FAILED"),
    ],
)
def test_device_of_llama_cpp_must_be_the_gpu(said: str, verdict: Verdict) -> None:
    assert engine.check_device(said, Metal(working_set_bytes=12124 * 2**20)).verdict == verdict


def test_verdict_depends_on_found_expected_and_needed() -> None:
    assert check_known("a", 3, "3").verdict == "ok"
    assert check_known("a", 0, "a number", holds=False).verdict == "FAILED"
    assert check_known("a", None, "3").verdict == "unknown"
    assert check_known("a", None, "3", needed=True).verdict == "FAILED"
    assert check_same("a", 3, 3, "b").verdict == "ok"
    assert check_same("a", 3, 4, "b").verdict == "FAILED"
    assert check_same("a", 3, None, "b").verdict == "unknown"
    assert check_same("a", None, None, "b", needed=True).verdict == "FAILED"


async def test_check_that_raises_is_a_failed_line_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def breaks(_: Path) -> list[Line]:
        raise OSError("no such thing")

    async def holds(_: Path) -> list[Line]:
        return [check_known("b", 1, "1")]

    monkeypatch.setattr(run, "_CHECKS", (("a", breaks), ("b", holds)))
    assert await run.run_selftest(tmp_path) == [
        Line("a", "FAILED", "OSError: no such thing", "no error"),
        Line("b", "ok", "1", "1"),
    ]


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("unknown", 0), ("FAILED", 1)])
def test_exit_code_is_one_after_a_failure(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int) -> None:
    async def found(_: Path) -> list[Line]:
        return [Line("memory", verdict, "16 GiB", "17 GiB")]

    monkeypatch.setattr(selftest, "run_selftest", found)
    monkeypatch.setattr(log, "configure", lambda **_: None)
    result = CliRunner().invoke(selftest.command)
    assert result.exit_code == code
    assert f"{verdict:<9}memory: 16 GiB (expected: 17 GiB)" in result.output
    assert json.loads(CliRunner().invoke(selftest.command, ["--output=json"]).output)[0]["verdict"] == verdict
