"""Faults of a chaos run: their schedule, which follows from a seed, and the failed requests that they explain.

The death of an agent explains no failure, because its engines and proxy continue to serve. The death of an engine or a
proxy explains failures around that moment; a cut link and a power failure explain failures while they last.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

Kind = Literal["agent", "proxy", "engine", "link", "power"]

WEIGHTS: Final[dict[Kind, int]] = {"agent": 4, "proxy": 3, "engine": 4, "link": 2, "power": 1}
PAUSE_SECONDS: Final = (1.0, 6.0)
LONGEST_SECONDS: Final[dict[Kind, float]] = {"agent": 5.0, "proxy": 0.0, "engine": 0.0, "link": 50.0, "power": 8.0}
"""Longest duration of each fault. An agent restarts as under launchd; a link may be cut for longer than a Lease."""
ABSENCES: Final = frozenset[Kind]({"agent", "link", "power"})
"""Faults during which the host reports nothing."""
NOTICE_SECONDS: Final = 5.0
"""Time for an endpoint to be withdrawn, and for clients to notice, on a busy machine."""
RETURN_SECONDS: Final = 10.0
"""Time for an agent that is back (has renewed its Lease) to detect the changes during its absence."""


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault to inject `at` seconds after the start."""

    at: float
    kind: Kind
    host: int
    seconds: float
    pick: int
    """Index of the engine to kill, modulo the number of engines."""


@dataclass(frozen=True, slots=True)
class Breakage:
    """A fault that was injected, and lasted from `start` to `end` by the clock of the event loop."""

    kind: Kind
    address: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed."""

    address: str
    start: float
    end: float
    text: str
    plausible: bool
    """True if a fault can cause the failure: no answer, or a 502, 503 or 504."""


def plan_faults(seed: int, seconds: float, hosts: int) -> list[ScheduledFault]:
    """Return the faults of a run, in order."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    at, faults = 0.0, list[ScheduledFault]()
    while True:
        at += chance.uniform(*PAUSE_SECONDS)
        if at >= seconds:
            return faults
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        duration = chance.uniform(0.2, 1) * LONGEST_SECONDS[kind]
        faults.append(ScheduledFault(at, kind, chance.randrange(hosts), duration, chance.randrange(1000)))


def extend_absences(breakages: Iterable[Breakage], renewed_at: Iterable[float]) -> list[Breakage]:
    """Extend each absence until the host has renewed its Lease: only then the agent is back.

    How long an agent takes to start, or to find its link, depends on how busy the machine of this run is.

    Args:
        breakages: of one host; an absence ends when its agent was started or its link restored.
        renewed_at: when the host has renewed its Lease, in order.
    """
    renewals = list(renewed_at)

    def back(each: Breakage) -> float:
        return next((time for time in renewals if time > each.end), math.inf)

    return [replace(each, end=back(each)) if each.kind in ABSENCES else each for each in breakages]


def list_unexplained(failures: Iterable[FailedRequest], breakages: Iterable[Breakage]) -> list[FailedRequest]:
    """Return the failures that no breakage accounts for."""
    happened = list(breakages)
    away = [each for each in happened if each.kind in ABSENCES]

    def noticed(breakage: Breakage) -> float:
        """Return when clients should have noticed: later if no agent was running to withdraw the endpoint."""
        until = breakage.end + NOTICE_SECONDS
        for each in sorted(away, key=lambda each: each.start):
            if each.address == breakage.address and each.start <= until and each.end >= breakage.start:
                until = max(until, each.end + RETURN_SECONDS)
        return until

    windows = [(each.address, each.start, noticed(each)) for each in happened if each.kind != "agent"]
    return [
        failure
        for failure in failures
        if not failure.plausible
        or not any(
            failure.address == address and failure.start <= end and failure.end >= start
            for address, start, end in windows
        )
    ]
