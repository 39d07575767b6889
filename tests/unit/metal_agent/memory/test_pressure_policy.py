"""The steps of the pressure policy in virtual time, over recorded, simulated and arbitrary traces."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from crds.meta import Priority
from devices.pressure import PressureLevel, derived_level
from metal_agent.memory import pressure_policy
from metal_agent.memory.pressure_policy import (
    ActionKind,
    EvictionCandidate,
    HoldAction,
    MemoryStage,
    PressureState,
    step,
)

TRACES = Path(__file__).parent / "traces"
GIB = 2**30
DRAIN_SECONDS = 8
LOAD_SECONDS = 12


@dataclass
class Process:
    """A process of the simulated host, which takes its time to end and to load."""

    uid: str
    priority: Priority = "normal"
    memory_bytes: int = GIB
    idle_seconds: float | None = 0.0
    stage: MemoryStage = "serving"
    held: bool = False
    left_seconds: int = 0
    has_protection: bool = False

    @property
    def runs(self) -> bool:
        return self.stage in {"loading", "serving"}

    def let_pass(self, seconds: int) -> None:
        self.left_seconds -= seconds
        if self.left_seconds > 0:
            return
        if self.stage == "ending":
            self.stage = "absent"
        elif self.stage == "loading":
            self.stage = "serving"
        if self.stage == "absent" and not self.held:
            self.stage, self.left_seconds = "loading", LOAD_SECONDS

    def candidate(self) -> EvictionCandidate:
        return EvictionCandidate(
            *(self.uid, self.priority, self.stage, self.memory_bytes, self.idle_seconds, self.has_protection)
        )


@dataclass
class Machine:
    """A host that performs actions, and fails on actions that must never occur. `actions` are (second, action)."""

    processes: list[Process]
    state: PressureState = field(default_factory=PressureState)
    now: int = 0
    every_seconds: int = 1
    """Interval between two samples."""
    actions: list[tuple[int, HoldAction]] = field(default_factory=list)

    def sample(self, level: PressureLevel | None) -> None:
        for process in self.processes:
            process.let_pass(self.every_seconds)
        candidates = [process.candidate() for process in self.processes]
        before = self.state
        self.state, actions = step(before, level, candidates, float(self.now))
        if level is None:
            assert actions == ()
            assert structs.replace(self.state, sampled_at=before.sampled_at) == before, "unknown changed something"
        for action in actions:
            self.actions.append((self.now, action))
            self._perform(action, before)
        self.now += self.every_seconds

    def play(self, levels: Iterable[PressureLevel | None]) -> "Machine":
        for level in levels:
            self.sample(level)
        return self

    def did(self, *kinds: ActionKind) -> list[str]:
        """Return the actions of these kinds, each as kind and uid."""
        return [_describe(action) for _, action in self.actions if action.kind in kinds]

    @property
    def at(self) -> dict[str, int]:
        """The second of each action's last time."""
        return {_describe(action): second for second, action in self.actions}

    def _perform(self, action: HoldAction, before: PressureState) -> None:
        by_uid = {process.uid: process for process in self.processes}
        match action:
            case HoldAction("hold"):
                for process in self.processes:
                    process.held = True
            case HoldAction("release"):
                assert not before.displacing or f"cancel {before.displacing}" in self.did("cancel")
                for process in self.processes:
                    process.held = process.uid in self.state.evicted
            case HoldAction("evict", uid):
                victim = by_uid[uid]
                assert victim.runs, f"{uid} has nothing to give"
                others = [process for process in self.processes if process is not victim]
                assert not any(other.stage == "ending" for other in others), "two at once"
                if victim.priority == "critical":
                    assert before.critical_seconds is not None
                    assert all(other.priority == "critical" for other in others if other.runs), "others still run"
                victim.stage, victim.held, victim.left_seconds = "ending", True, DRAIN_SECONDS
            case HoldAction("hasten", uid):
                assert by_uid[uid].stage == "draining"
                by_uid[uid].stage, by_uid[uid].left_seconds = "ending", DRAIN_SECONDS
            case HoldAction("return", uid):
                assert not self.state.is_under_pressure
                assert not any(process.stage in {"loading", "ending"} for process in self.processes), "two at once"
                by_uid[uid].held = False


def _describe(action: HoldAction) -> str:
    return f"{action.kind} {action.uid}".strip()


def read_levels(name: str) -> Iterator[PressureLevel | None]:
    for line in _rows(name):
        seconds, level = line.split()
        yield from [None if level == "unknown" else level] * int(seconds)  # type: ignore[misc]  # one of the words


def read_psi(name: str) -> Iterator[PressureLevel | None]:
    (memory,) = (line.split()[2] for line in (TRACES / name).read_text().splitlines() if line.startswith("# Memory:"))
    for line in _rows(name):
        some, full, available = line.split()
        yield derived_level(float(some), float(full), int(available), int(memory))


def _rows(name: str) -> list[str]:
    return [line for line in (TRACES / name).read_text().splitlines() if not line.startswith("#")]


def hosted(*processes: Process) -> Machine:
    return Machine(list(processes) or [Process("low", "low"), Process("normal"), Process("top", "critical")])


def test_every_trace_states_its_content_and_origin() -> None:
    traces = sorted(TRACES.iterdir())
    assert len(traces) >= 5
    for trace in traces:
        text = trace.read_text()
        assert all(f"\n# {word}:" in f"\n{text}" for word in ("What", "Made", "Columns")), trace.name


def test_spikes_of_pressure_change_nothing() -> None:
    assert hosted().play(read_levels("mac-spikes.levels")).actions == []


def test_mostly_unknown_levels_change_nothing() -> None:
    assert hosted().play(read_levels("mac-tool-missing.levels")).actions == []


def test_recorded_thrashing_displaces_then_evicts_the_least_important() -> None:
    levels = list(read_psi("linux-thrashing.psi"))
    assert {"normal", "warn", "critical"} == set(levels), "the recording has the whole range"
    machine = hosted().play(levels)
    first_warn = next(second for second in range(len(levels)) if "normal" not in levels[second : second + 5])
    assert machine.at["hold"] == first_warn + pressure_policy.WARN_SECONDS
    assert machine.did("displace") == ["displace low"]
    # Critical for a quarter of a minute: long enough to evict this process, and no other.
    assert machine.did("evict") == ["evict low"]
    machine.play(["normal"] * 200)
    assert machine.did("release", "return") == ["release", "return low"]
    assert [process.stage for process in machine.processes] == ["serving"] * 3


def test_all_are_evicted_for_the_owner_and_return_in_reverse_order() -> None:
    machine = hosted().play(read_levels("mac-owner-returns.levels"))
    assert machine.did("evict") == ["evict low", "evict normal", "evict top"]
    assert machine.did("return") == ["return top", "return normal", "return low"]
    returned = [second for second, action in machine.actions if action.kind == "return"]
    assert all(later - earlier >= pressure_policy.RETURN_SECONDS for earlier, later in itertools.pairwise(returned))
    assert [process.stage for process in machine.processes] == ["serving"] * 3
    assert machine.state.evicted == ()


def test_relapsing_pressure_delays_the_return_each_time() -> None:
    machine = hosted(Process("a")).play(read_levels("mac-oscillating.levels"))
    released = [second for second, action in machine.actions if action.kind == "release"]
    assert 3 <= len(released) <= 8
    gaps = [later - earlier for earlier, later in itertools.pairwise(released)]
    assert gaps[0] < gaps[1] < gaps[2]
    assert machine.processes[0].stage == "serving"


def test_calm_that_relapses_make_longer_is_bounded_and_short_again_after_a_long_calm() -> None:
    machine = hosted(Process("a"))
    calms = []
    for seconds in (0, *[300] * 6, int(pressure_policy.RELAPSE_SECONDS)):
        machine.play(["normal"] * seconds).play(["warn"] * 10)
        calms.append(machine.state.needed_calm_seconds)
        machine.play(["normal"] * (int(machine.state.needed_calm_seconds) + 1))
        assert not machine.state.is_under_pressure
    assert calms == [60, 120, 240, 480, 960, 960, 960, 60]


def test_two_seconds_of_critical_displace_and_fifteen_more_evict() -> None:
    machine = hosted().play(["normal"] * 5).play(["critical"] * 3)
    assert machine.did("hold", "displace", "evict") == ["hold"]
    machine.play(["critical"])
    assert machine.did("hold", "displace", "evict") == ["hold", "displace low"]
    machine.play(["critical"] * 14)
    assert machine.did("evict") == []
    machine.play(["critical"])
    assert machine.did("evict") == ["evict low"]


def test_warn_displaces_and_never_evicts() -> None:
    machine = hosted(Process("a", idle_seconds=5), Process("b", idle_seconds=9), Process("top", "critical"))
    machine.every_seconds = 5
    machine.play(["warn"] * int(3 * pressure_policy.DISPLACEMENT_SECONDS / 5))
    # Each is displaced in turn, since another may fit elsewhere; the protected one is not displaced.
    assert machine.did("displace", "cancel") == ["displace b", "cancel b", "displace a", "cancel a"]
    assert machine.did("evict") == []


def test_displaced_process_is_not_evicted_and_the_next_waits_for_the_level() -> None:
    machine = hosted().play(["critical"] * 5)
    assert machine.did("displace") == ["displace low"]
    low = machine.processes[0]
    low.stage, low.held, low.left_seconds = "ending", True, DRAIN_SECONDS
    machine.play(["critical"] * (DRAIN_SECONDS - 1 + int(pressure_policy.SETTLE_SECONDS) - 1))
    assert machine.did("displace", "evict") == ["displace low"]
    machine.play(["critical"])
    assert machine.did("displace", "evict") == ["displace low", "displace normal"]


def test_engine_that_drains_is_ended_before_any_other_once_the_pressure_is_critical() -> None:
    """A drain may take minutes, and the memory is needed now."""
    machine = hosted()
    for process in machine.processes[:2]:
        process.stage, process.held, process.left_seconds = "draining", True, 600
    machine.play(["warn"] * 60)
    assert machine.did("hasten", "displace", "evict") == []
    machine.play(["critical"] * 4)
    assert machine.did("hasten", "displace", "evict") == ["hasten low"]
    machine.play(["critical"] * DRAIN_SECONDS)
    assert machine.did("hasten", "displace", "evict") == ["hasten low", "hasten normal"]


def test_engine_that_never_ends_does_not_block_the_others() -> None:
    stuck = Process("stuck", stage="ending", left_seconds=10**6)
    serving, gone = Process("serving"), Process("gone", stage="absent", held=True)
    candidates = [process.candidate() for process in (stuck, serving, gone)]
    state, taken = PressureState(evicted=("stuck", "gone")), list[HoldAction]()
    for now, level in enumerate(["critical"] * 400 + ["normal"] * 200):
        state, actions = step(state, level, candidates, float(now))  # type: ignore[arg-type]  # a PressureLevel
        if now < pressure_policy.ENDING_SECONDS:
            assert actions in ((), (HoldAction("hold"),))
        taken += actions
        if HoldAction("evict", "serving") in actions:
            candidates[1] = structs.replace(candidates[1], stage="absent")
    expected = ["hold", "displace serving", "evict serving", "release", "return serving", "return gone"]
    assert [_describe(action) for action in taken] == expected


def test_loading_engine_is_evicted_at_once() -> None:
    loading = Process("new", stage="loading", left_seconds=1000)
    machine = hosted(Process("old", idle_seconds=1e6), loading).play(["critical"] * 5)
    assert machine.did("evict") == ["evict new"]


def test_end_of_pressure_cancels_the_displacement() -> None:
    machine = hosted().play(["warn"] * 40).play(["normal"] * 61)
    assert machine.did("hold", "displace", "cancel", "release") == ["hold", "displace low", "cancel low", "release"]


@pytest.mark.parametrize(
    ("processes", "chosen"),
    [
        ([Process("a", "high"), Process("b", "batch"), Process("c", "low")], "b"),
        ([Process("a", idle_seconds=60), Process("b", idle_seconds=61), Process("c", idle_seconds=None)], "b"),
        ([Process("a", idle_seconds=None, memory_bytes=9 * GIB), Process("b", idle_seconds=1)], "b"),
        ([Process("a", memory_bytes=9 * GIB), Process("b", memory_bytes=10 * GIB)], "b"),
        ([Process("a", "critical", idle_seconds=1e6), Process("b", "high")], "b"),
        ([Process("a", "batch", has_protection=True), Process("b", "high")], "b"),
        ([Process("a", stage="absent", held=True), Process("b", "critical")], "b"),
    ],
)
def test_lowest_priority_then_longest_idle_then_largest(processes: Sequence[Process], chosen: str) -> None:
    assert hosted(*processes).play(["critical"] * 5).did("displace") == [f"displace {chosen}"]


def test_sleep_counts_neither_as_pressure_nor_as_recovery() -> None:
    machine = hosted().play(["warn"] * 3)
    machine.now += 8 * 3600
    machine.play(["warn"])
    assert machine.did("hold") == ["hold"], "as long as a slow sample, and no longer"
    machine.play(["normal"] * 5)
    machine.now += 8 * 3600
    machine.play(["normal"])
    assert machine.state.is_under_pressure


def test_recorded_eviction_is_finished_by_the_next_agent() -> None:
    before = PressureState(is_under_pressure=True, evicted=("low",), needed_calm_seconds=120.0)
    machine = Machine([Process("low", "low"), Process("top", "critical")], before)
    machine.play(["warn"])
    assert machine.did("evict") == ["evict low"]
    machine.play(["normal"] * 119)
    assert machine.did("release", "return") == []
    machine.play(["normal"] * 60)
    assert machine.did("release", "return") == ["release", "return low"]


LEVELS = st.sampled_from([None, "normal", "warn", "critical"])
SEGMENTS = st.lists(
    st.tuples(st.one_of(st.integers(1, 8), st.integers(1, 100), st.integers(1, 700)), LEVELS), max_size=12
)


@st.composite
def any_processes(draw: st.DrawFn) -> list[Process]:
    count = draw(st.integers(0, 5))
    return [
        Process(
            f"p{number}",
            draw(st.sampled_from(get_args(Priority))),
            draw(st.integers(1, 3)) * GIB,
            draw(st.one_of(st.none(), st.floats(0, 1e6))),
            draw(st.sampled_from(["absent", "loading", "serving", "ending"])),
            left_seconds=draw(st.integers(0, 20)),
        )
        for number in range(count)
    ]


@given(any_processes(), SEGMENTS)
def test_invariants_hold_under_any_trace(
    processes: list[Process], segments: list[tuple[int, PressureLevel | None]]
) -> None:
    """`Machine` fails on two evictions at once, on a protected one before others, and on effects of unknown levels."""
    machine = Machine(processes).play(level for seconds, level in segments for _ in range(seconds))
    for kind in ("hold", "evict"):
        seconds = [second for second, action in machine.actions if action.kind == kind]
        per_process = len(processes) if kind == "evict" else 1
        busiest = max((sum(start <= second < start + 3600 for second in seconds) for start in seconds), default=0)
        assert busiest <= 12 * per_process, "flaps"
    # Calm always ends the pressure, and every process returns.
    longest = pressure_policy.MAX_CALM_SECONDS + (len(processes) + 1) * (
        pressure_policy.RETURN_SECONDS + LOAD_SECONDS + 30
    )
    machine.every_seconds = 5
    machine.play(["normal"] * int(longest / 5))
    assert not machine.state.is_under_pressure
    assert (machine.state.displacing, machine.state.evicted) == (None, ())
    assert all(process.stage == "serving" for process in machine.processes)


@given(st.integers(1, 1500), st.integers(6, 200))
@settings(max_examples=15)
def test_no_period_of_pressure_makes_evictions_flap(calm_seconds: int, pressed_seconds: int) -> None:
    machine = hosted(Process("a"))
    machine.every_seconds = 3
    period = calm_seconds + pressed_seconds
    machine.play("critical" if second % period < pressed_seconds else "normal" for second in range(0, 3600, 3))
    assert len(machine.did("evict")) <= 9
