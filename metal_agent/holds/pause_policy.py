"""Decide the actions of a host whose owner needs it, as a pure function of state, processes and time.

While a source of the owner's policy holds, no engine is started, and each process that runs is displaced: it serves
until its replacement on another host answers. One that finds no other place within the time that a displacement by
memory pressure has is evicted, drained first. Processes of priority critical stay, unless the owner pauses them too.
When no source holds any more, all return.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from metal_agent.memory.pressure_policy import (
    DISPLACEMENT_SECONDS,
    CancelDisplacement,
    Displace,
    Evict,
    EvictionCandidate,
)


@dataclass(frozen=True, slots=True)
class Pause:
    """Start no engine until Resume, and displace what runs."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Start engines again, also those that were evicted."""


PauseAction = Pause | Resume | Displace | CancelDisplacement | Evict


@dataclass(frozen=True, slots=True)
class PauseState:
    """Decisions so far."""

    is_paused: bool = False
    displacing: dict[str, float] = field(default_factory=dict)
    """Seconds for which each process has been displaced, by uid."""
    evicted: frozenset[str] = frozenset()
    """Uids of processes that were stopped, and start again after the pause."""


def step_pause(
    state: PauseState,
    candidates: Sequence[EvictionCandidate],
    seconds: float,
    *,
    is_held: bool,
    pauses_critical: bool = False,
) -> tuple[PauseState, tuple[PauseAction, ...]]:
    """Decide the actions that follow from one sample.

    Args:
        state: the decisions so far.
        candidates: the processes of this host.
        seconds: the time since the last sample.
        is_held: whether any source of the owner's policy holds.
        pauses_critical: whether processes of priority critical are paused too.
    """
    if not is_held:
        if not state.is_paused:
            return state, ()
        return PauseState(), (*(CancelDisplacement(uid) for uid in sorted(state.displacing)), Resume())
    actions: list[PauseAction] = [] if state.is_paused else [Pause()]
    running = [
        candidate
        for candidate in candidates
        if candidate.is_running and (pauses_critical or not candidate.is_protected)
    ]
    displacing: dict[str, float] = {}
    evicted = set(state.evicted)
    for candidate in running:
        so_far = state.displacing.get(candidate.uid)
        # An engine that loads answers no request; one that was evicted already was about to end when its agent ended.
        if (
            candidate.uid in evicted
            or candidate.stage == "loading"
            or (so_far or 0.0) + seconds >= DISPLACEMENT_SECONDS
        ):
            evicted.add(candidate.uid)
            actions.append(Evict(candidate.uid))
            continue
        displacing[candidate.uid] = 0.0 if so_far is None else so_far + seconds
        if so_far is None:
            actions.append(Displace(candidate.uid))
    return replace(state, is_paused=True, displacing=displacing, evicted=frozenset(evicted)), tuple(actions)
