"""The decision which process of a host is measured, and when: only while the host has nothing else to do.

A process is measured once. One that fails is tried again after a back-off, three times in all, and a measurement that
gave way to a request is no try. The GPU is shared, so a request to any process of the host counts.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from crds.metalprocess import MetalProcessSpec
from devices.pressure import PressureLevel
from kube.backoff import EXACT, backoff_seconds
from metal_agent.lifecycle import ProcessState

IDLE_SECONDS: Final = 30.0
"""Time without a request, and since the process became Ready, after which it is measured."""
MOST_TRIES: Final = 3
MOST_SECONDS: Final = 180.0
"""The longest measurement; one that takes longer has failed."""
LONGEST_LOAD_SECONDS: Final = 86_400.0
_FIRST_PAUSE_SECONDS: Final = 60.0
_LAST_PAUSE_SECONDS: Final = 3600.0


def is_calm(level: PressureLevel | None, *, is_held: bool, is_loading: bool) -> bool:
    """Decide whether an engine may be measured, as far as its host is concerned.

    Args:
        level: the memory pressure; None if the system reports none.
        is_held: True while any source holds the engines of the host.
        is_loading: True while an engine loads, or waits to load.
    """
    return level in {None, "normal"} and not is_held and not is_loading


def is_measurable_spec(spec: MetalProcessSpec) -> bool:
    """Decide whether the speed of a process is that of its model: it generates text, and has no companions."""
    return spec.mode == "chat" and not spec.further_artifacts


def is_measurable_engine(state: ProcessState) -> bool:
    """Decide whether an engine can be measured: it is sound, and not a daemon, whose requests are unseen."""
    return state.phase == "Ready" and state.pid is not None and state.suspicion is None and state.hold is None


def is_stopped(state: ProcessState) -> bool:
    """Decide whether an engine ends, or has ended, on request, and not because of a measurement."""
    return state.phase in {"Stopping", "Stopped"} or state.hold is not None


def find_wait(uid: str, ready_seconds: float, idle: Mapping[str, float | None]) -> float | None:
    """Return the seconds until the host has been idle for long enough; None if `idle` lacks the process.

    Args:
        uid: the process that is to be measured.
        ready_seconds: the time since it became Ready.
        idle: the time without a request of each process, by uid; None if it never had one.
    """
    if uid not in idle:
        return None
    # The host is idle since the last request of any process, and not since before this one became Ready.
    idle_seconds = min([ready_seconds, *(seconds for seconds in idle.values() if seconds is not None)])
    return max(0.0, IDLE_SECONDS - idle_seconds)


def pick_process(ready_seconds: Mapping[str, float], idle: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return the process that can be measured first, by uid, and the seconds until then; None if there is none.

    Args:
        ready_seconds: the time since each process that waits to be measured became Ready, by uid.
        idle: as for `find_wait`.
    """
    waits = ((find_wait(uid, seconds, idle), uid) for uid, seconds in ready_seconds.items())
    known_waits = [(wait_seconds, uid) for wait_seconds, uid in waits if wait_seconds is not None]
    if not known_waits:
        return None
    wait_seconds, uid = min(known_waits)
    return uid, wait_seconds


def find_load_seconds(started_at: str, ready_at: str | None) -> float | None:
    """Return the seconds from the start of an engine to its first token; None if unknown or not plausible.

    Args:
        started_at: RFC 3339.
        ready_at: RFC 3339; None if the engine has not answered yet.
    """
    if ready_at is None:
        return None
    seconds = (datetime.fromisoformat(ready_at) - datetime.fromisoformat(started_at)).total_seconds()
    return seconds if 0 <= seconds <= LONGEST_LOAD_SECONDS else None


def pause_seconds(failures: int) -> float:
    """Return the seconds before the next try after this many failures, or interruptions, in a row."""
    return backoff_seconds(failures, first=_FIRST_PAUSE_SECONDS, most=_LAST_PAUSE_SECONDS, jitter=EXACT)
