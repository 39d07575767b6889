"""Decide the actions of a host that is short of memory, as a pure function of state, sample and time.

The machine belongs to its owner, whose programs count as much as ours: models give way to any cause of pressure.
First no engine is started any more. Then the least important process is displaced: it continues to serve until its
replacement on another host answers, so no request fails. A process that found no other host is evicted, but only under
critical pressure and one at a time: the level is sampled again before the next. Processes of priority critical go last,
and only under critical pressure: a Mac that is over-committed panics, and then serves nothing at all. When the level
has been normal for a while, evicted processes return one after the other, the last one first. An unknown level (None)
changes nothing.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from crds.meta import PRIORITY_RANK, Priority
from devices.pressure import PressureLevel

SAMPLE_SECONDS: Final = 1.0
_LONGEST_STEP_SECONDS: Final = 5.0
"""The most time that counts between two samples: a busy machine samples late, and one that slept took no sample."""
WARN_SECONDS: Final = 5.0
"""Seconds of warn or worse in a row until no engine is started: while Metal computes, moments of warn are normal."""
CRITICAL_SECONDS: Final = 2.0
"""Seconds of critical in a row until it counts: longer than a spike, much shorter than the time until a Mac hangs."""
DISPLACE_AFTER_SECONDS: Final = 30.0
"""Seconds of warn in a row until a process is displaced; the cause is often over by then."""
DISPLACEMENT_SECONDS: Final = 1800.0
"""Time for a displacement below critical; after it the next process is displaced, which may fit elsewhere.

Large weights may take as long to be fetched and loaded on the other host; requests are answered meanwhile.
"""
CRITICAL_DISPLACEMENT_SECONDS: Final = 15.0
"""The same while the pressure is critical; after it the process is evicted, with or without a replacement."""
SETTLE_SECONDS: Final = 15.0
"""Pause between the end of one engine and the choice of the next: memory and level follow the end with a delay."""
ENDING_SECONDS: Final = 300.0
"""Longest wait for an ending engine: many times the duration of an eviction, and half the default of a drain.

A process that waits in the kernel, as for a GPU that hangs, ignores every signal, and may stay until the next boot.
"""
CALM_SECONDS: Final = 60.0
"""Seconds of normal in a row until the pressure is over."""
MAX_CALM_SECONDS: Final = 960.0
RELAPSE_SECONDS: Final = 600.0
"""Pressure that comes back so soon after its end, or after a return, doubles the calm needed each time."""
RETURN_SECONDS: Final = 60.0
"""Least time between two returns: each engine must have shown how much memory it takes."""

MemoryStage = Literal["absent", "loading", "serving", "draining", "ending"]


class EvictionCandidate(msgspec.Struct, frozen=True):
    """A process of this host at the time of a sample."""

    uid: str
    priority: Priority
    stage: MemoryStage
    """absent: it has no engine. draining: its engine is stopped once its answers have ended, which may take minutes.
    ending: its engine is being stopped."""
    memory_bytes: int
    idle_seconds: float | None = None
    """Seconds since its last request; None if unknown, which counts as busy."""
    has_protection: bool = False
    """True if its service protects it from eviction, whatever its priority."""

    @property
    def is_running(self) -> bool:
        """True if it uses memory that it would not free by itself."""
        return self.stage in {"loading", "serving"}

    @property
    def is_protected(self) -> bool:
        """True if it goes last, and only under critical pressure."""
        return self.has_protection or self.priority == "critical"


ActionKind = Literal["hold", "displace", "cancel", "evict", "hasten", "release", "return", "pause", "resume"]
"""The kind of a step that a hold takes. Those against memory pressure are values of the label `step` of the metric
pomona_agent_pressure_steps_total; these names are API.

hold: start no engine until `release`. displace: request a replacement of the process on another host; it continues to
serve meanwhile. cancel: the process is no longer displaced, and stays. evict: stop the engine of the process, drained
first, and hold it until `return`. hasten: stop the engine of the process now, which drains since it is removed or
moves. release: start engines again, except those of evicted processes. return: start the engine of the evicted process
again. pause: start no engine until `resume`, and displace what runs. resume: start engines again, also evicted ones.
"""
PRESSURE_STEPS: Final[tuple[ActionKind, ...]] = ("hold", "displace", "cancel", "evict", "hasten", "release", "return")


class HoldAction(msgspec.Struct, frozen=True):
    """One step of a hold; `uid` is the process, or empty if the step is about the whole host."""

    kind: ActionKind
    uid: str = ""


class PressureState(msgspec.Struct, frozen=True):
    """Samples and decisions so far. Seconds count sampled time only; None if the last sample had another level."""

    is_under_pressure: bool = False
    """The host starts no engine: the condition MemoryPressure."""
    displacing: str | None = None
    """Uid of the process that is being displaced."""
    evicted: tuple[str, ...] = ()
    """Uids of evicted processes, in the order of their eviction."""
    needed_calm_seconds: float = CALM_SECONDS
    """Seconds of normal until the present pressure is over."""
    found_no_host: frozenset[str] = frozenset()
    """Processes that were displaced during this pressure and found no other host in time."""
    sampled_at: float | None = None
    """Time of the last sample, of a monotonic clock."""
    warn_seconds: float | None = None
    """Seconds of warn or worse in a row."""
    critical_seconds: float | None = None
    normal_seconds: float | None = None
    displacing_seconds: float = 0.0
    since_ending_seconds: float = math.inf
    """Seconds since an engine was last seen ending, unless it has been ending for too long."""
    ending_seconds: float = 0.0
    """Seconds in a row with an ending engine."""
    since_return_seconds: float = math.inf
    """Seconds since an evicted process last returned."""
    since_over_seconds: float = math.inf
    """Seconds since the last pressure ended."""

    @property
    def is_critical(self) -> bool:
        """True if the pressure has been critical for longer than a spike."""
        return self.critical_seconds is not None and self.critical_seconds >= CRITICAL_SECONDS


PressureStep = tuple[PressureState, tuple[HoldAction, ...]]


def step(
    state: PressureState, level: PressureLevel | None, candidates: Sequence[EvictionCandidate], now: float
) -> PressureStep:
    """Decide the actions that follow from one sample of memory and processes at time `now`.

    Return the next state and the actions. Without pressure: hold all starts if it begins, or let an evicted process
    return. Under pressure: end it after enough calm, else displace or evict a process. An unknown level (None) changes
    nothing.
    """
    gap = 0.0 if state.sampled_at is None else max(0.0, now - state.sampled_at)
    state = replace(state, sampled_at=now)
    if level is None:
        return state, ()
    # A machine that slept took no sample: a long gap counts as a few seconds.
    state = _advance_clocks(state, level, min(gap, _LONGEST_STEP_SECONDS), candidates)

    if not state.is_under_pressure:
        # Pressure begins once the level has been bad for some seconds.
        return _begin_pressure(state) if _must_hold(state) else _return_evicted(state, candidates)

    # normal_seconds: for how long the level has been normal; None: it is not
    is_calm = state.normal_seconds is not None and state.normal_seconds >= state.needed_calm_seconds
    if is_calm:
        return _end_pressure(state)
    return _relieve(state, candidates)


def _advance_clocks(
    state: PressureState, level: PressureLevel, seconds: float, candidates: Sequence[EvictionCandidate]
) -> PressureState:
    """Advance every clock of the state by the `seconds` since the last sample, or stop it.

    * warn, critical, normal: the time that the level has been so (warn: or worse); None while it is not.
    * ending: the time that an engine has been draining or ending, without a break.
    * since_ending: the time since that was over; it stands at 0 meanwhile. One that does not end in
      `ENDING_SECONDS` no longer counts, so that it cannot keep the host from acting.
    * displacing, since_return, since_over: these always run; they are set to 0 elsewhere, when a displacement begins,
      an evicted process returns, or the pressure ends.
    """

    def advance(before: float | None, *, goes_on: bool) -> float | None:
        """Return the next value of a clock: 0 when it starts, None while it stands still."""
        if not goes_on:
            return None
        return 0.0 if before is None else before + seconds

    is_ending = any(candidate.stage in {"draining", "ending"} for candidate in candidates)
    ending_seconds = state.ending_seconds + seconds if is_ending else 0.0
    is_stuck = ending_seconds > ENDING_SECONDS

    return replace(
        state,
        warn_seconds=advance(state.warn_seconds, goes_on=level != "normal"),
        critical_seconds=advance(state.critical_seconds, goes_on=level == "critical"),
        normal_seconds=advance(state.normal_seconds, goes_on=level == "normal"),
        displacing_seconds=state.displacing_seconds + seconds,
        since_ending_seconds=0.0 if is_ending and not is_stuck else state.since_ending_seconds + seconds,
        ending_seconds=ending_seconds,
        since_return_seconds=state.since_return_seconds + seconds,
        since_over_seconds=state.since_over_seconds + seconds,
    )


def _displacement_key(candidate: EvictionCandidate) -> tuple[bool, int, float, int, str]:
    """Return the sort key of a candidate; the candidate with the greatest key is displaced first.

    Unprotected candidates come first, then those of the least priority, idle for longest, and with the most memory.
    """
    # An engine that loads answers no request, so it counts as idle; an unknown time counts as busy.
    idle_seconds = math.inf if candidate.stage == "loading" else (candidate.idle_seconds or 0.0)
    rank = PRIORITY_RANK[candidate.priority]
    return not candidate.is_protected, rank, idle_seconds, candidate.memory_bytes, candidate.uid


def _must_hold(state: PressureState) -> bool:
    """Decide whether the pressure has lasted long enough for the host to start no engine any more."""
    return state.is_critical or (state.warn_seconds is not None and state.warn_seconds >= WARN_SECONDS)


def _begin_pressure(state: PressureState) -> PressureStep:
    """Hold the host. Pressure soon after the last one, or after a return, needs twice the calm to end."""
    is_relapse = min(state.since_over_seconds, state.since_return_seconds) < RELAPSE_SECONDS
    needed_calm = min(MAX_CALM_SECONDS, 2 * state.needed_calm_seconds) if is_relapse else CALM_SECONDS
    return replace(state, is_under_pressure=True, needed_calm_seconds=needed_calm), (HoldAction("hold"),)


def _end_pressure(state: PressureState) -> PressureStep:
    """Release the host, and cancel a displacement."""
    canceled = (HoldAction("cancel", state.displacing),) if state.displacing else ()
    over = replace(state, is_under_pressure=False, displacing=None, found_no_host=frozenset(), since_over_seconds=0.0)
    return over, (*canceled, HoldAction("release"))


def _relieve(state: PressureState, candidates: Sequence[EvictionCandidate]) -> PressureStep:
    """Decide the next action against the pressure: the first of these that applies.

    1. Evict the process whose eviction an earlier agent recorded and did not carry out.
    2. Under critical pressure, stop a draining engine now (hasten), unless another one is just ending.
    3. Wait while the level is normal, or for `SETTLE_SECONDS` after the end of an engine.
    4. Follow up the displacement that has begun, else begin one.

    An evicted process is stopped. A displaced one serves on, until its replacement on another host answers.
    """
    running = {candidate.uid: candidate for candidate in candidates if candidate.is_running}
    if state.displacing is not None and state.displacing not in running:
        # The process runs elsewhere now, or ended by itself.
        state = replace(state, displacing=None)

    unfinished = next((uid for uid in state.evicted if uid in running), None)
    if unfinished is not None:  # step 1
        # An earlier agent recorded this eviction, and ended before it evicted the process.
        return state, (HoldAction("evict", unfinished),)

    draining = [candidate for candidate in candidates if candidate.stage == "draining"]
    is_ending = any(candidate.stage == "ending" for candidate in candidates)
    # One that does not end in ENDING_SECONDS is not waited for any more.
    must_await_end = is_ending and state.ending_seconds <= ENDING_SECONDS
    if state.is_critical and draining and not must_await_end:  # step 2
        # A draining process is about to end anyway, so its loss matters less than that of any other.
        return state, (HoldAction("hasten", max(draining, key=_displacement_key).uid),)

    # normal_seconds: for how long the level has been normal; None: it is not
    is_normal = state.normal_seconds is not None
    has_settled = state.since_ending_seconds >= SETTLE_SECONDS  # memory and level follow the end of an engine late
    if is_normal or not has_settled:  # step 3
        return state, ()

    if state.displacing is not None:  # step 4: it asks for a replacement on another host
        return _follow_up_displacement(state, running[state.displacing])
    return _pick_for_displacement(state, list(running.values()))


def _follow_up_displacement(state: PressureState, candidate: EvictionCandidate) -> PressureStep:
    """Evict the process being displaced if pressure is critical, and it still loads or its time is up.

    Below critical, give up when no host took it in `DISPLACEMENT_SECONDS`; otherwise wait.
    """
    uid, seconds = candidate.uid, state.displacing_seconds
    if state.is_critical and (candidate.stage == "loading" or seconds >= CRITICAL_DISPLACEMENT_SECONDS):
        return replace(state, displacing=None, evicted=(*state.evicted, uid)), (HoldAction("evict", uid),)
    if state.critical_seconds is None and seconds >= DISPLACEMENT_SECONDS:
        return replace(state, displacing=None, found_no_host=state.found_no_host | {uid}), (HoldAction("cancel", uid),)
    return state, ()


def _pick_for_displacement(state: PressureState, running: Sequence[EvictionCandidate]) -> PressureStep:
    """Displace the process whose loss matters least, if the pressure is critical or has lasted long enough.

    Below critical pressure, protected processes stay, and so do those that found no other host before.
    """
    if state.is_critical:
        eligible = running
    elif state.warn_seconds is not None and state.warn_seconds >= DISPLACE_AFTER_SECONDS:
        unprotected = [candidate for candidate in running if not candidate.is_protected]  # nor of priority critical
        eligible = [candidate for candidate in unprotected if candidate.uid not in state.found_no_host]
    else:
        return state, ()
    if not eligible:
        return state, ()

    # The greatest key: unprotected first, then the least priority, the longest idle, the most memory.
    uid = max(eligible, key=_displacement_key).uid
    return replace(state, displacing=uid, displacing_seconds=0.0), (HoldAction("displace", uid),)


def _return_evicted(state: PressureState, candidates: Sequence[EvictionCandidate]) -> PressureStep:
    """Start the process again that was evicted last, if the host is calm and no engine loads or ends.

    One at a time, with a pause between two: each engine must have shown how much memory it takes. A process whose
    evicted engine has not ended yet (`absent`: it has none) does not return.
    """
    stages = {candidate.uid: candidate.stage for candidate in candidates}  # by uid: absent, loading, ...
    returning = next((uid for uid in reversed(state.evicted) if stages.get(uid) == "absent"), None)
    is_calm = state.normal_seconds is not None and state.since_return_seconds >= RETURN_SECONDS
    is_ending = state.since_ending_seconds == 0  # the clock stands at 0 while an engine ends
    is_busy = "loading" in stages.values() or is_ending
    if returning is None or not is_calm or is_busy:
        return state, ()
    evicted = tuple(uid for uid in state.evicted if uid != returning)
    return replace(state, evicted=evicted, since_return_seconds=0.0), (HoldAction("return", returning),)
