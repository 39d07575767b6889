"""The gate: a process is held as long as any source holds it, whatever the order of holds, ends and evictions is."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crds.metalprocess import LastExit
from metal_agent import lifecycle
from metal_agent.assignments import UNREADABLE, Assignment
from metal_agent.holds.hold_gate import HoldGate, HostHold
from metal_agent.lifecycle import ProcessState
from metal_agent.process_events import (
    Admitted,
    BackoffElapsed,
    Evicted,
    Exited,
    Fetched,
    Held,
    ProcessEvent,
    Released,
    Spawned,
)

UIDS = ("a", "b")
EVERY = "every process"


@dataclass
class Source:
    """A source that holds the host, or single processes."""

    name: str
    holding: set[str] = field(default_factory=set)

    def find_hold(self, uid: str) -> Held | None:
        return Held(self.name, f"for {self.name}") if self.holding & {uid, EVERY} else None

    def find_displacement(self, process: Any) -> Held | None:
        return self.find_hold(process.assignment.uid) if process.state.awaits_release else None

    def list_holds(self) -> list[HostHold]:
        return [HostHold(self.name, "", "2026-11-23T12:00:00Z")] if EVERY in self.holding else []


@dataclass
class Runner:
    """A process that goes through its real lifecycle."""

    assignment: Assignment
    state: ProcessState
    events: list[ProcessEvent] = field(default_factory=list)
    spawns: int = 0

    def notify(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self.state, actions = lifecycle.step(self.state, event, 0.0)
        if lifecycle.Spawn() in actions:
            self.spawns += 1
            self.state, _ = lifecycle.step(self.state, Spawned(7), 0.0)


class Host:
    """A gate with two sources and two processes."""

    def __init__(self) -> None:
        self.runners: dict[str, Runner] = {}
        self.gate = HoldGate(self.runners)
        self.sources = [Source("Pressure"), Source("Paused")]
        for source in self.sources:
            self.gate.add(source)
        for uid in UIDS:
            self.start(uid)

    def start(self, uid: str) -> None:
        state, _ = lifecycle.start_lifecycle(self.gate.admit_runner(uid))
        self.runners[uid] = Runner(Assignment(uid, "team", f"chat-{uid}", UNREADABLE), state)

    def held_by(self, uid: str) -> list[Held]:
        return [held for source in self.sources if (held := source.find_hold(uid))]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "release", "evict", "start", "admit", "exit", "remove"]),
        st.sampled_from([0, 1]),
        st.sampled_from([*UIDS, EVERY]),
    ),
    max_size=60,
)


@given(STEPS)
def test_process_is_held_if_and_only_if_a_source_holds_it(steps: list[tuple[str, int, str]]) -> None:
    host = Host()
    for step, number, scope in steps:
        source, uid = host.sources[number], scope if scope in UIDS else "a"
        runner = host.runners.get(uid)
        spawns = {key: process.spawns for key, process in host.runners.items()}
        match step:
            case "hold":
                source.holding.add(scope)
            case "release":
                source.holding.discard(scope)
            case "evict":
                source.holding.add(uid)
                host.gate.evict(uid, Evicted(source.name, f"for {source.name}"))
            case "start":
                host.start(uid)
            case "admit" if runner:
                runner.notify(Admitted())
                runner.notify(Fetched())
            case "exit" if runner:
                runner.notify(Exited(LastExit(code=1)))
                runner.notify(BackoffElapsed())
            case "remove":
                host.runners.pop(uid, None)
        if step in {"hold", "release", "evict"}:
            host.gate.refresh()
        for key, process in host.runners.items():
            holds = host.held_by(key)
            assert process.state.hold == (holds[0] if holds else None), "the first source tells why"
            assert not process.state.awaits_release or holds, "what waits is released when nothing holds it"
            assert process.spawns <= spawns.get(key, 0) or not holds, "no engine is started while a source holds it"


def test_end_of_one_hold_frees_nothing_that_another_holds() -> None:
    host = Host()
    pressure, paused = host.sources
    for source in (pressure, paused):
        source.holding.add(EVERY)
        host.gate.refresh()
    assert [hold.source for hold in host.gate.list_holds()] == ["Pressure", "Paused"]
    pressure.holding.clear()
    host.gate.refresh()
    assert host.runners["a"].events == [Held("Pressure", "for Pressure"), Held("Paused", "for Paused")]
    paused.holding.clear()
    host.gate.refresh()
    assert host.runners["a"].events[2:] == [Released()]
    assert host.gate.list_holds() == []


def test_process_is_told_only_what_changes() -> None:
    host = Host()
    host.sources[0].holding.add("a")
    for _ in range(3):
        host.gate.refresh()
    assert (len(host.runners["a"].events), host.runners["b"].events) == (1, [])


def test_condition_of_a_process_that_waits_names_the_source_that_holds_it() -> None:
    host = Host()
    runner = host.runners["a"]
    for source in host.sources:
        source.holding.add("a")
    host.gate.refresh()
    for event in (Admitted(), Fetched()):
        runner.notify(event)
    assert runner.state.awaits_release
    for name in ("Pressure", "Paused"):
        condition = host.gate.displacement_condition(runner)
        assert condition is not None
        assert (condition["type"], condition["reason"]) == ("DisruptionTarget", name)
        host.sources[0].holding.clear()
    host.sources[1].holding.clear()
    assert host.gate.displacement_condition(runner) is None
