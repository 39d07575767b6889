"""The watchdog of pauses: its record, its readings on a Mac, and what it reports."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from artifacts import durable
from devices.power import Power
from metal_agent.holds import owner_policy
from metal_agent.holds.hold_gate import HoldGate, HostHold
from metal_agent.holds.owner_policy import OwnerPolicy, OwnerSample
from metal_agent.holds.pause_policy import Pause, PauseAction, Resume
from metal_agent.holds.pause_watchdog import PauseInputs, PauseRecord, PauseWatchdog, read_owner_sample
from tests.unit.devices.recordings import recorded, stand_in

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ACTIVE, AWAY, UNKNOWN = (OwnerSample(NOON, idle_seconds=seconds) for seconds in (0.0, 3600.0, None))


class Pauses:
    """A watchdog of a host without processes."""

    def __init__(self, folder: Path, policy: OwnerPolicy) -> None:
        self.done: list[PauseAction] = []
        self.sample = UNKNOWN
        runners: dict[str, Any] = {}
        inputs = PauseInputs(policy, lambda _sources: self.sample)
        self.watchdog = PauseWatchdog(
            folder / "holds.json", runners, HoldGate(runners), inputs, lambda action, _note: self.done.append(action)
        )

    async def see(self, sample: OwnerSample) -> list[PauseAction]:
        self.sample = sample
        before = len(self.done)
        await self.watchdog.sample()
        return self.done[before:]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in owner_policy.BEGIN_SECONDS:
        monkeypatch.setitem(owner_policy.BEGIN_SECONDS, source, 0.0)
        monkeypatch.setitem(owner_policy.END_SECONDS, source, 0.0)


async def test_pause_outlives_an_agent_also_while_its_source_is_unknown(tmp_path: Path) -> None:
    policy = OwnerPolicy(idle_minutes=10)
    first = Pauses(tmp_path, policy)
    assert await first.see(ACTIVE) == [Pause()]
    assert first.watchdog.hold_for("a")
    next_one = Pauses(tmp_path, policy)
    assert next_one.watchdog.hold_for("a"), "before its first sample"
    assert await next_one.see(UNKNOWN) == []
    (hold,) = next_one.watchdog.list_holds()
    assert hold == HostHold("activity", policy.describe("activity"), "2026-11-23T12:00:00Z")
    assert await next_one.see(AWAY) == [Resume()]
    assert (next_one.watchdog.hold_for("a"), next_one.watchdog.list_holds()) == (None, [])


async def test_source_that_the_owner_turned_off_holds_nothing_any_more(tmp_path: Path) -> None:
    await Pauses(tmp_path, OwnerPolicy(idle_minutes=10)).see(ACTIVE)
    without = Pauses(tmp_path, OwnerPolicy())
    assert await without.see(UNKNOWN) == [Resume()]
    assert durable.read(tmp_path / "holds.json", PauseRecord) == PauseRecord()


async def test_record_of_a_later_version_with_a_source_of_its_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "holds.json").write_text('{"sources": {"full-moon": "2026-11-23T12:00:00Z"}, "more": 1}')
    assert await Pauses(tmp_path, OwnerPolicy(idle_minutes=10)).see(UNKNOWN) == [Resume()]


async def test_first_of_several_sources_is_the_reason_and_all_are_named(tmp_path: Path) -> None:
    pauses = Pauses(tmp_path, OwnerPolicy(idle_minutes=10, battery_percent=100))
    assert pauses.watchdog.paused_condition()["reason"] == "NotPaused"
    await pauses.see(OwnerSample(NOON, power=Power("battery", 80)))
    assert pauses.watchdog.paused_condition()["reason"] == "OnBattery"
    await pauses.see(OwnerSample(NOON, 0.0, Power("battery", 80)))
    condition = pauses.watchdog.paused_condition()
    assert (condition["status"], condition["reason"]) == ("True", "OwnerActive")
    assert condition["message"] == "it runs on battery and somebody works at it, until there is no input for 10 minutes"
    assert await pauses.see(OwnerSample(NOON, 0.0, Power("ac", 80))) == []
    assert pauses.watchdog.hold_for("a"), "the end of one frees nothing that another holds"
    assert await pauses.see(OwnerSample(NOON, 3600.0, Power("ac", 80))) == [Resume()]


def test_sample_of_a_mac_has_only_what_the_owner_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    outputs = {
        "pmset": recorded("pmset_battery.txt"),
        "notifyutil": "com.apple.system.thermalpressurelevel 2\n",
        "ioreg": recorded("ioreg_hid_typed.txt"),
    }
    stand_in(monkeypatch, outputs)
    found = read_owner_sample(("activity", "battery", "heat"))
    assert (found.idle_seconds, found.power, found.thermal) == (123.456789012, Power("battery", 54), "heavy")
    assert read_owner_sample(("schedule",))[1:] == (None, Power(), None)
    stand_in(monkeypatch, {})
    assert read_owner_sample(("activity", "battery", "heat"))[1:] == (None, Power(), None)
