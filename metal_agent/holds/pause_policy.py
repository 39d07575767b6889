"""Decide the actions of a host whose owner needs it, as a pure function of state, processes and time.

While a source of the owner's policy holds, no engine is started, and each process that runs is displaced: it serves
until its replacement on another host answers. One that finds no other place within the time that a displacement by
memory pressure has is evicted, drained first. Processes of priority critical stay, unless the owner pauses them too.
When no source holds any more, all return.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from metal_agent.memory.pressure_policy import DISPLACEMENT_SECONDS, EvictionCandidate, HoldAction


class PauseState(msgspec.Struct, frozen=True):
    """Decisions so far."""

    is_paused: bool = False
    displacing: dict[str, float] = {}
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
) -> tuple[PauseState, tuple[HoldAction, ...]]:
    """Return the next state and the actions that follow from one sample.

    In a pause no engine is started, and each running process is displaced: it serves until its replacement on another
    host answers. It is evicted (stopped until the pause ends) if no host takes it in time, if it still loads, or if an
    earlier agent had decided so. At the end of the pause displacements are cancelled, and all processes may start.

    Args:
        state: the decisions so far.
        candidates: the processes of this host.
        seconds: the time since the last sample.
        is_held: whether any source of the owner's policy holds.
        pauses_critical: whether protected processes, as those of priority critical, are paused too.
    """
    if not is_held:  # end the pause, if there is one
        if not state.is_paused:
            return state, ()
        canceled = [HoldAction("cancel", uid) for uid in sorted(state.displacing)]
        return PauseState(), (*canceled, HoldAction("resume"))

    # A pause: displace or evict each process that runs.
    actions: list[HoldAction] = [] if state.is_paused else [HoldAction("pause")]
    displacing: dict[str, float] = {}  # as in `state`: by uid, the seconds so far
    evicted = set(state.evicted)
    for candidate in candidates:
        uid = candidate.uid
        if not candidate.is_running or (candidate.is_protected and not pauses_critical):
            continue  # it keeps no memory, or may stay

        is_new = uid not in state.displacing  # it is displaced from now on
        displaced_seconds = 0.0 if is_new else state.displacing[uid] + seconds
        is_overdue = displaced_seconds >= DISPLACEMENT_SECONDS  # no other host took it
        # An earlier agent recorded the eviction and ended before it; an engine that loads has no request to lose.
        was_evicted_before = uid in evicted
        if was_evicted_before or candidate.stage == "loading" or is_overdue:
            evicted.add(uid)
            actions.append(HoldAction("evict", uid))
            continue

        displacing[uid] = displaced_seconds
        if is_new:
            actions.append(HoldAction("displace", uid))

    return replace(state, is_paused=True, displacing=displacing, evicted=frozenset(evicted)), tuple(actions)
