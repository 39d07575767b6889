"""The watchdog performs the actions of the pressure policy; processes come and go while it writes its record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import durable
from devices.pressure import PressureLevel, PressureReading
from metal_agent.assignments import UNREADABLE, Assignment
from metal_agent.holds.hold_gate import HoldGate
from metal_agent.lifecycle import ProcessState
from metal_agent.memory import pressure_policy
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.pressure_policy import HoldAction
from metal_agent.memory.pressure_watchdog import PressureRecord, PressureWatchdog


async def no_idle_times() -> dict[str, float | None]:
    return {}


def watch(
    path: Path,
    level: PressureLevel | None,
    actions: list[HoldAction] | None = None,
    runners: dict[str, Any] | None = None,
) -> PressureWatchdog:
    """Return a watchdog of a host with this level of pressure, which appends its actions to `actions`."""
    done = [] if actions is None else actions
    runners = {} if runners is None else runners
    return PressureWatchdog(
        path,
        runners,
        HoldGate(runners),
        Ledger(1, dict.fromkeys(runners, 1)),
        lambda action, _: done.append(action),
        read=lambda: PressureReading(level),
        idle_seconds=no_idle_times,
    )


async def test_process_that_is_removed_while_its_eviction_is_recorded_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CRITICAL_SECONDS", "CRITICAL_DISPLACEMENT_SECONDS", "SETTLE_SECONDS"):
        monkeypatch.setattr(pressure_policy, name, 0.0)
    loading = SimpleNamespace(
        assignment=Assignment("u1", "team", "u1", UNREADABLE),
        state=ProcessState("Starting", exists=True, pid=7),
        notify=lambda _event: None,
    )
    runners: dict[str, Any] = {"u1": loading}
    actions: list[HoldAction] = []
    watchdog = watch(tmp_path / "p.json", "critical", actions, runners)
    written = durable.write

    def remove_and_write(path: Path, record: Any) -> None:
        if record.evicted:
            runners.clear()
        written(path, record)

    monkeypatch.setattr(durable, "write", remove_and_write)
    while HoldAction("evict", "u1") not in actions:
        await watchdog.sample()
    assert runners == {}


async def test_full_disk_does_not_prevent_an_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _record: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write", fail)
    monkeypatch.setattr(pressure_policy, "CRITICAL_SECONDS", 0.0)
    actions: list[HoldAction] = []
    watchdog = watch(tmp_path / "p.json", "critical", actions)
    while HoldAction("hold") not in actions:
        await watchdog.sample()


async def test_evicted_process_that_is_assigned_no_more_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    durable.write(path, PressureRecord(is_under_pressure=True, evicted=("u1", "u2")))
    watchdog = watch(path, "warn")
    watchdog.retain({"u2"})
    await watchdog.sample()
    record = durable.read(path, PressureRecord)
    assert record
    assert record.evicted == ("u2",)


@pytest.mark.parametrize("level", ["normal", "warn", None])
@pytest.mark.parametrize("left", [{}, {"evicted": ("u1",)}, {"displacing": "u1"}])
async def test_pressure_that_ended_while_no_agent_ran_holds_nothing(
    tmp_path: Path, level: PressureLevel | None, left: dict[str, Any]
) -> None:
    """The steps of the policy do what a displacement or an eviction has left to do."""
    path = tmp_path / "p.json"
    durable.write(path, PressureRecord(is_under_pressure=True, **left))
    watchdog = watch(path, level)
    assert watchdog.find_hold("u2"), "nothing is known before the first sample"
    await watchdog.sample()
    assert (watchdog.find_hold("u2") is None) == (level != "warn" and not left)
