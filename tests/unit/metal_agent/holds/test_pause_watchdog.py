"""The watchdog of pauses: its record, its readings on a Mac, and what it reports."""

import asyncio
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import durable
from crds.meta import Priority
from devices.power import Power
from metal_agent import lifecycle
from metal_agent.assignments import Assignment
from metal_agent.holds import owner_policy, pause_watchdog
from metal_agent.holds.hold_gate import HoldGate, HostHold
from metal_agent.holds.owner_policy import OwnerPolicy, OwnerSample
from metal_agent.holds.pause_watchdog import PauseRecord, PauseWatchdog, read_owner_sample
from metal_agent.lifecycle import ProcessState
from metal_agent.memory.pressure_policy import DISPLACEMENT_SECONDS, HoldAction
from metal_agent.process_events import Evicted, ProcessEvent
from tests.support import api_objects
from tests.support.api_objects import as_process
from tests.support.background import running
from tests.support.eventually import LIMIT_SECONDS, eventually
from tests.unit.devices.recordings import recorded, stand_in

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ACTIVE, AWAY, UNKNOWN = (OwnerSample(NOON, idle_seconds=seconds) for seconds in (0.0, 3600.0, None))


@dataclass
class Process:
    """A process of the host, whose engine an agent that starts adopts."""

    assignment: Assignment
    state: ProcessState
    events: list[ProcessEvent] = field(default_factory=list)

    def notify(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self.state, _ = lifecycle.step(self.state, event, 0.0)


def process(uid: str, priority: Priority = "normal", phase: lifecycle.Phase = "Ready") -> Process:
    """Return a process that serves, or is in another phase without an engine."""
    spec = as_process(api_objects.process(uid, priority=priority)).spec
    state = ProcessState(phase, exists=phase == "Ready", admitted=True, fetched=True)
    return Process(Assignment(uid, "team", uid, spec), state)


class Pauses:
    """A watchdog of a host, which has these processes, in the time of `clock`."""

    clock = 0.0

    def __init__(self, folder: Path, policy: OwnerPolicy, *processes: Process) -> None:
        self.done: list[HoldAction] = []
        self.sample = UNKNOWN
        self.runners: dict[str, Any] = {process.assignment.uid: process for process in processes}
        self.gate, path = HoldGate(self.runners), folder / "holds.json"
        self.watchdog = PauseWatchdog(
            path, self.runners, self.gate, policy, lambda step, _: self.done.append(step), read=lambda _: self.sample
        )

    async def see(self, sample: OwnerSample) -> list[HoldAction]:
        self.sample = sample
        before = len(self.done)
        await self.watchdog.sample()
        return self.done[before:]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_watchdog, "time", SimpleNamespace(monotonic=lambda: Pauses.clock))
    monkeypatch.setattr(Pauses, "clock", 0.0)
    for source in owner_policy.BEGIN_SECONDS:
        monkeypatch.setitem(owner_policy.BEGIN_SECONDS, source, 0.0)
        monkeypatch.setitem(owner_policy.END_SECONDS, source, 0.0)


async def test_pause_outlives_an_agent_also_while_its_source_is_unknown(tmp_path: Path) -> None:
    policy = OwnerPolicy(idle_minutes=10)
    first = Pauses(tmp_path, policy)
    assert await first.see(ACTIVE) == [HoldAction("pause")]
    assert first.watchdog.find_hold("a")
    next_one = Pauses(tmp_path, policy)
    assert next_one.watchdog.find_hold("a"), "before its first sample"
    assert await next_one.see(UNKNOWN) == []
    (hold,) = next_one.watchdog.list_holds()
    assert hold == HostHold("activity", policy.describe("activity"), "2026-11-23T12:00:00Z")
    assert await next_one.see(AWAY) == [HoldAction("resume")]
    assert (next_one.watchdog.find_hold("a"), next_one.watchdog.list_holds()) == (None, [])


async def test_source_that_the_owner_turned_off_holds_nothing_any_more(tmp_path: Path) -> None:
    await Pauses(tmp_path, OwnerPolicy(idle_minutes=10)).see(ACTIVE)
    without = Pauses(tmp_path, OwnerPolicy())
    assert await without.see(UNKNOWN) == [HoldAction("resume")]
    assert durable.read(tmp_path / "holds.json", PauseRecord) == PauseRecord()


async def test_agent_whose_owner_turned_everything_off_ends_the_pause_of_the_agent_before(tmp_path: Path) -> None:
    await Pauses(tmp_path, OwnerPolicy(idle_minutes=10)).see(ACTIVE)
    without = Pauses(tmp_path, OwnerPolicy())
    async with running(asyncio.wait_for(without.watchdog.run(), LIMIT_SECONDS)):
        await eventually(lambda: without.done == [HoldAction("resume")])


async def pass_time(pauses: Pauses, seconds: float) -> list[HoldAction]:
    """Take samples of an owner who works at the machine until so much time has passed."""
    done, end = [], Pauses.clock + seconds
    while Pauses.clock < end:
        Pauses.clock = min(end, Pauses.clock + owner_policy.SAMPLE_SECONDS)
        done += await pauses.see(ACTIVE)
    return done


async def test_agent_that_dies_between_record_and_eviction_leaves_it_to_the_next(tmp_path: Path) -> None:
    policy, serving = OwnerPolicy(idle_minutes=10), process("a")
    first = Pauses(tmp_path, policy, serving)
    await first.see(ACTIVE)
    assert await pass_time(first, DISPLACEMENT_SECONDS - 1) == []

    def die(*_event: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "notify", die)
        with pytest.raises(KeyboardInterrupt):
            await pass_time(first, 1)
    next_one = Pauses(tmp_path, policy, serving)
    assert "the engine was stopped" in str(next_one.watchdog.find_hold("a")), "before its first sample"
    assert await next_one.see(UNKNOWN) == [HoldAction("evict", "a")]
    (event,) = (evicted for evicted in serving.events if isinstance(evicted, Evicted))
    assert not event.is_urgent, "running requests have as long as those of a process that is removed"
    assert serving.state.evicting


async def test_displacement_goes_on_under_the_next_agent(tmp_path: Path) -> None:
    policy, serving = OwnerPolicy(idle_minutes=10), process("a")
    await Pauses(tmp_path, policy, serving).see(ACTIVE)
    next_one = Pauses(tmp_path, policy, serving)
    target = next_one.watchdog.find_displacement(serving)
    assert target is not None, "before its first sample"
    assert "serves on until its replacement" in target.message
    assert await next_one.see(UNKNOWN) == []
    assert await next_one.see(AWAY) == [HoldAction("cancel", "a"), HoldAction("resume")]
    assert next_one.watchdog.find_displacement(serving) is None


async def test_sleep_of_the_machine_does_not_use_up_the_time_of_a_displacement(tmp_path: Path) -> None:
    pauses = Pauses(tmp_path, OwnerPolicy(idle_minutes=10), process("a"))
    await pauses.see(ACTIVE)
    Pauses.clock += 10 * DISPLACEMENT_SECONDS
    assert await pauses.see(ACTIVE) == []
    assert await pass_time(pauses, DISPLACEMENT_SECONDS) == [HoldAction("evict", "a")]


async def test_pause_holds_what_has_no_engine_and_spares_what_is_critical(tmp_path: Path) -> None:
    phases: tuple[lifecycle.Phase, ...] = ("Fetching", "Failed", "Rejected", "Stopped")
    without_engine = {phase: process(phase, phase=phase) for phase in phases}
    spared, serving = [process("top", "critical"), process("new", "critical", "Fetching")], process("a")
    pauses = Pauses(tmp_path, OwnerPolicy(idle_minutes=10), serving, *spared, *without_engine.values())
    await pauses.see(ACTIVE)
    displaced = {uid for uid, runner in pauses.runners.items() if pauses.gate.displacement_condition(runner)}
    assert displaced == {"a", "Fetching", "Failed"}
    assert [runner.state.hold for runner in spared] == [None, None]
    assert {uid for uid, runner in pauses.runners.items() if runner.state.hold} == {"a", *without_engine}
    late = pauses.runners["late"] = process("late")
    assert pauses.gate.displacement_condition(late) is None, "the next sample decides about it"


async def test_stopped_process_that_is_assigned_no_more_is_forgotten(tmp_path: Path) -> None:
    policy = OwnerPolicy(idle_minutes=10)
    pauses = Pauses(tmp_path, policy, process("a"), process("b"))
    await pauses.see(ACTIVE)
    await pass_time(pauses, DISPLACEMENT_SECONDS)
    pauses.watchdog.retain({"b"})
    await pauses.see(ACTIVE)
    record = durable.read(tmp_path / "holds.json", PauseRecord)
    assert record is not None
    assert (record.evicted, record.displacing) == (("b",), ())


async def test_record_of_a_later_version_with_a_source_of_its_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "holds.json").write_text('{"sources": {"full-moon": "2026-11-23T12:00:00Z"}, "more": 1}')
    assert await Pauses(tmp_path, OwnerPolicy(idle_minutes=10)).see(UNKNOWN) == [HoldAction("resume")]


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
    assert pauses.watchdog.find_hold("a"), "the end of one frees nothing that another holds"
    assert await pauses.see(OwnerSample(NOON, 3600.0, Power("ac", 80))) == [HoldAction("resume")]


def test_sample_of_a_mac_has_only_what_the_owner_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    outputs = {
        "pmset": recorded("pmset_battery.txt"),
        "notifyutil": "com.apple.system.thermalpressurelevel 2\n",
        "ioreg": recorded("ioreg_hid_typed.txt"),
    }
    stand_in(monkeypatch, outputs)
    sample = read_owner_sample(("activity", "battery", "heat"))
    assert (sample.idle_seconds, sample.power, sample.thermal) == (123.456789012, Power("battery", 54), "heavy")
    assert read_owner_sample(("schedule",))[1:] == (None, Power(), None)
    stand_in(monkeypatch, {})
    assert read_owner_sample(("activity", "battery", "heat"))[1:] == (None, Power(), None)
