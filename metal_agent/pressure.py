"""Decides what this host does while it is short of memory, as a pure function of state, sample and time.

The machine belongs to its owner, whose programs count as much as ours: whoever causes the pressure, it is models that
give way. In steps: first no engine is started any more; then the least important one is asked to move, which costs no
request where another host has room; only when the pressure is critical is one ended that found no other place, and
then one at a time, with a look at what that helped. The most important ones (priority critical) go last, and only
then: a Mac that is over-committed panics, and serves nothing at all. When memory is back for a while they return, one
after the other, the last one first. What the system does not tell (level None) changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from crds.meta import Priority
from devices.pressure import Level

SAMPLE_SECONDS: Final = 1.0
_LONGEST_STEP_SECONDS: Final = 5.0
"""Counted at most between two samples. A machine in need samples late, and one that slept has seen nothing."""
WARN_SECONDS: Final = 5.0
"""Of warn or worse until nothing is started: while Metal computes, moments of warn are normal."""
CRITICAL_SECONDS: Final = 2.0
"""Of critical until it counts: long enough for a moment, short beside the tens of seconds until a Mac hangs."""
MOVE_SECONDS: Final = 30.0
"""Of warn until one is asked to move; what caused it is often over by then."""
PLACE_SECONDS: Final = 1800.0
"""How long one that is asked to move has for it, below critical; then the next is asked: it may fit elsewhere.

As long as large weights may take to arrive and load there; nobody is without an answer meanwhile.
"""
CRITICAL_PLACE_SECONDS: Final = 15.0
"""The same while the pressure is critical; then it is evicted, place or not."""
SETTLE_SECONDS: Final = 15.0
"""Between the end of one engine and the choice of the next: memory is given back, and the level follows, late."""
ENDING_SECONDS: Final = 300.0
"""How long one that ends is waited for: many times what withdrawal, drain and SIGKILL take (50 s).

A process that waits in the kernel, as for a GPU that hangs, heeds no signal, and may be there until the next boot.
"""
CALM_SECONDS: Final = 60.0
"""Of normal until the pressure is over."""
MOST_CALM_SECONDS: Final = 960.0
RELAPSE_SECONDS: Final = 600.0
"""Pressure that is back so soon after its end, or after a return, takes twice as long to be over each time."""
RETURN_SECONDS: Final = 60.0
"""Between two that return: each must have shown what it takes."""

_RANK: Final[dict[Priority, int]] = {priority: rank for rank, priority in enumerate(get_args(Priority))}
"""The higher, the sooner it goes: the enumeration begins with the most important."""

Stage = Literal["absent", "loading", "serving", "ending"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process of this host, as it is when a sample is taken."""

    uid: str
    priority: Priority
    stage: Stage
    """absent: it has no engine. ending: its engine is on its way out, for whatever reason."""
    memory_bytes: int
    idle_seconds: float | None = None
    """Since its last request; None: not known, which counts as busy."""

    @property
    def runs(self) -> bool:
        """Whether it has memory that it would not give back by itself."""
        return self.stage in {"loading", "serving"}

    @property
    def protected(self) -> bool:
        """Whether it goes last, and only while the pressure is critical."""
        return self.priority == "critical"

    @property
    def expendable(self) -> tuple[bool, int, float, int]:
        """Sorts what is the least loss to the end. One that still loads answers nobody, so it is idle for ever."""
        idle = math.inf if self.stage == "loading" else self.idle_seconds or 0.0
        return not self.protected, _RANK[self.priority], idle, self.memory_bytes


@dataclass(frozen=True, slots=True)
class Hold:
    """Start no engine from now on."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the cluster for another place for this process, which goes on meanwhile."""

    uid: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Call off what Ask began: it stays."""

    uid: str


@dataclass(frozen=True, slots=True)
class Evict:
    """End this process's engine, drained first, and hold it."""

    uid: str


@dataclass(frozen=True, slots=True)
class Release:
    """Engines may be started again, but those of what was evicted."""


@dataclass(frozen=True, slots=True)
class Return:
    """Let this process, which was evicted, start again."""

    uid: str


Action = Hold | Ask | Keep | Evict | Release | Return


@dataclass(frozen=True, slots=True)
class State:
    """What was seen and decided. Seconds count what was seen only; None for a level: it was not the last one seen."""

    pressed: bool = False
    """The host takes on nothing: the condition MemoryPressure."""
    asking: str | None = None
    """Uid of the one that is asked to move."""
    evicted: tuple[str, ...] = ()
    """In the order in which they went."""
    needed_calm_seconds: float = CALM_SECONDS
    """Of normal until the present pressure is over."""
    passed_over: frozenset[str] = frozenset()
    """Those that were asked to move, during this pressure, and could not."""
    sampled_at: float | None = None
    """Of a monotonic clock."""
    warn_seconds: float | None = None
    """In a row, of warn or worse."""
    critical_seconds: float | None = None
    normal_seconds: float | None = None
    asked_seconds: float = 0.0
    quiet_seconds: float = math.inf
    """Since an engine was last seen ending that may still be waited for."""
    ending_seconds: float = 0.0
    """In a row, with an engine that ends."""
    returned_seconds: float = math.inf
    """Since one last returned."""
    over_seconds: float = math.inf
    """Since the last pressure was over."""

    @property
    def is_critical(self) -> bool:
        """Whether the pressure is critical, and is not just a moment of it."""
        return self.critical_seconds is not None and self.critical_seconds >= CRITICAL_SECONDS


Step = tuple[State, tuple[Action, ...]]


def step(state: State, level: Level | None, candidates: Sequence[Candidate], now: float) -> Step:
    """Decide what follows from one sample of this host's memory and processes; a level of None changes nothing."""
    gap = 0.0 if state.sampled_at is None else max(0.0, now - state.sampled_at)
    state = replace(state, sampled_at=now)
    if level is None:
        return state, ()
    state = _count(state, level, min(gap, _LONGEST_STEP_SECONDS), candidates)
    if not state.pressed:
        return _begin(state) if _is_due(state) else _recover(state, candidates)
    if state.normal_seconds is not None and state.normal_seconds >= state.needed_calm_seconds:
        return _end(state)
    return _relieve(state, candidates)


def _count(state: State, level: Level, seconds: float, candidates: Sequence[Candidate]) -> State:
    """Let the time pass since the last sample."""

    def run(before: float | None, *, goes_on: bool) -> float | None:
        if not goes_on:
            return None
        return 0.0 if before is None else before + seconds

    is_ending = any(each.stage == "ending" for each in candidates)
    ending_seconds = state.ending_seconds + seconds if is_ending else 0.0
    is_quiet = not is_ending or ending_seconds > ENDING_SECONDS
    return replace(
        state,
        warn_seconds=run(state.warn_seconds, goes_on=level != "normal"),
        critical_seconds=run(state.critical_seconds, goes_on=level == "critical"),
        normal_seconds=run(state.normal_seconds, goes_on=level == "normal"),
        asked_seconds=state.asked_seconds + seconds,
        quiet_seconds=state.quiet_seconds + seconds if is_quiet else 0.0,
        ending_seconds=ending_seconds,
        returned_seconds=state.returned_seconds + seconds,
        over_seconds=state.over_seconds + seconds,
    )


def _is_due(state: State) -> bool:
    return state.is_critical or (state.warn_seconds is not None and state.warn_seconds >= WARN_SECONDS)


def _begin(state: State) -> Step:
    relapse = min(state.over_seconds, state.returned_seconds) < RELAPSE_SECONDS
    calm = min(MOST_CALM_SECONDS, 2 * state.needed_calm_seconds) if relapse else CALM_SECONDS
    return replace(state, pressed=True, needed_calm_seconds=calm), (Hold(),)


def _end(state: State) -> Step:
    actions: tuple[Action, ...] = (Keep(state.asking), Release()) if state.asking else (Release(),)
    return replace(state, pressed=False, asking=None, passed_over=frozenset(), over_seconds=0.0), actions


def _relieve(state: State, candidates: Sequence[Candidate]) -> Step:
    """Take the next step down the ladder, if it is time for one."""
    running = {each.uid: each for each in candidates if each.runs}
    if state.asking is not None and state.asking not in running:
        # It moved, or ended by itself.
        state = replace(state, asking=None)
    unfinished = next((uid for uid in state.evicted if uid in running), None)
    if unfinished is not None:
        # An agent before this one had begun to evict it.
        return state, (Evict(unfinished),)
    if state.normal_seconds is not None or state.quiet_seconds < SETTLE_SECONDS:
        return state, ()
    if state.asking is not None:
        return _press(state, running[state.asking])
    return _choose(state, list(running.values()))


def _press(state: State, asked: Candidate) -> Step:
    """Decide about the one that is asked to move."""
    if state.is_critical and (asked.stage == "loading" or state.asked_seconds >= CRITICAL_PLACE_SECONDS):
        return replace(state, asking=None, evicted=(*state.evicted, asked.uid)), (Evict(asked.uid),)
    if state.critical_seconds is None and state.asked_seconds >= PLACE_SECONDS:
        return replace(state, asking=None, passed_over=state.passed_over | {asked.uid}), (Keep(asked.uid),)
    return state, ()


def _choose(state: State, running: Sequence[Candidate]) -> Step:
    """Find the one that is the least loss, and ask it to move."""
    if state.is_critical:
        eligible = running
    elif state.warn_seconds is not None and state.warn_seconds >= MOVE_SECONDS:
        eligible = [each for each in running if not each.protected and each.uid not in state.passed_over]
    else:
        return state, ()
    chosen = max(eligible, key=lambda each: (each.expendable, each.uid), default=None)
    if chosen is None:
        return state, ()
    return replace(state, asking=chosen.uid, asked_seconds=0.0), (Ask(chosen.uid),)


def _recover(state: State, candidates: Sequence[Candidate]) -> Step:
    """Bring back what was evicted, the last one first, each after the one before it has loaded."""
    stages = {each.uid: each.stage for each in candidates}
    back = next((uid for uid in reversed(state.evicted) if stages.get(uid) == "absent"), None)
    settled = state.normal_seconds is not None and state.returned_seconds >= RETURN_SECONDS
    is_busy = "loading" in stages.values() or not state.quiet_seconds
    if back is None or not settled or is_busy:
        return state, ()
    evicted = tuple(uid for uid in state.evicted if uid != back)
    return replace(state, evicted=evicted, returned_seconds=0.0), (Return(back),)
