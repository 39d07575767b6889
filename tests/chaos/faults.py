"""Faults of a chaos run: their schedule, which follows from a seed, and the failed requests that they explain.

The death of an agent explains no failure, because its engines and proxy continue to serve, and neither does an outage
of the API server or a full disk: they only delay the recovery from other faults. The death of an engine or a proxy
explains failures for a second; an engine that answers nothing or only errors, until its agent has ended it; a cut link
and a power failure, until the host's Lease has expired.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

Kind = Literal["agent", "proxy", "engine", "failing", "mute", "link", "power", "disk", "apiserver", "stuck"]

FAULTS: Final[dict[Kind, int]] = {
    "agent": 4,
    "proxy": 3,
    "engine": 4,
    "failing": 2,
    "link": 2,
    "power": 1,
    "disk": 2,
}
"""Faults of a host, with the number of each in a round; rounds follow each other, each in an order of its own."""
PAUSE_SECONDS: Final = (1.0, 6.0)
LONGEST_SECONDS: Final[dict[Kind, float]] = {
    "agent": 5.0,
    "link": 50.0,
    "power": 8.0,
    "disk": 10.0,
    "apiserver": 5.0,
    "stuck": 15.0,
}
"""Longest duration of each fault. An agent restarts as under launchd; a link may be cut for longer than a Lease."""
SILENCE_SECONDS: Final = 100.0
"""Time for an agent to end an engine that answers nobody: three checks with their time-outs."""
OUTAGES: Final[tuple[Kind, ...]] = ("apiserver", "stuck")
"""Faults of the API server, which is killed and started, or answers nobody for a while; they take turns."""
OUTAGE_PAUSE_SECONDS: Final = (25.0, 45.0)
ABSENCES: Final = frozenset[Kind]({"agent", "link", "power", "apiserver", "stuck"})
"""Faults during which the host reports nothing."""
EXCUSES: Final = frozenset[Kind]({"proxy", "engine", "failing", "mute", "link", "power"})
"""Faults that explain a failed request."""
NO_ANSWER: Final = 0
FAILING_STATUS: Final = 500
PLAUSIBLE: Final = frozenset({NO_ANSWER, 502, 503, 504})
"""Statuses of requests that fail when an engine or a proxy is down, or dies during an answer."""
NOTICE_SECONDS: Final = 1.0
"""Time for an endpoint to be withdrawn, and for clients to notice."""
LEASE_SECONDS: Final = 40.0
EXPIRY_SECONDS: Final = LEASE_SECONDS + 10.0
"""Time after which the controller has withdrawn the endpoints of a lost host: its Lease, and a look at it."""
RETURN_SECONDS: Final = 5.0
"""Time for an agent that is back (has renewed its Lease) to detect the changes during its absence."""


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault to inject `at` seconds after the start."""

    at: float
    kind: Kind
    host: int
    """Number of the host; that of an outage means nothing."""
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
    service: str = ""
    """The service whose engine it broke; empty if it broke all services of the host."""


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed."""

    address: str
    looked: float
    """When the client looked which addresses are ready: another one, to which it sent the request first, may hang."""
    start: float
    end: float
    service: str
    text: str
    status: int = NO_ANSWER


def plan_faults(seed: int, seconds: float, hosts: int) -> list[ScheduledFault]:
    """Return the faults of a run, in order; all are over after `seconds`.

    A host has one at a time, except that others may follow while its disk is full. The first one is an engine that
    answers nobody, which takes the longest to be noticed. A new agent begins anew to count such an engine's silent
    checks, so the agent of that host is not killed meanwhile.
    """
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    at, faults, round_ = 0.0, list[ScheduledFault](), list[Kind]()
    free_at = dict.fromkeys(range(hosts), 0.0)
    while (at := at + chance.uniform(*PAUSE_SECONDS)) < seconds:
        round_ = round_ or _draw_round(chance)
        kind: Kind = round_.pop() if faults else "mute"
        silent = faults[0].host if kind == "agent" and at < faults[0].at + SILENCE_SECONDS else None
        free = [host for host, time in free_at.items() if time <= at and host != silent]
        duration = min(chance.uniform(0.2, 1) * LONGEST_SECONDS.get(kind, 0.0), seconds - at)
        if not free:
            round_.append(kind)
            continue
        host = chance.choice(free)
        free_at[host] = at + (duration if kind != "disk" else 0.0)
        faults.append(ScheduledFault(at, kind, host, duration, chance.randrange(1000)))
    return faults


def _draw_round(chance: random.Random) -> list[Kind]:
    """Return the kinds of a round, the last first: one of each before any comes again."""
    kinds = list(FAULTS)
    again = [count - 1 for count in FAULTS.values()]
    return [*chance.sample(kinds, sum(again), counts=again), *chance.sample(kinds, len(kinds))]


def plan_outages(seed: int, seconds: float) -> list[ScheduledFault]:
    """Return the faults of the API server in a run, in order; all are over after `seconds`."""
    chance = random.Random(-seed - 1)  # noqa: S311 - as above
    at, faults = 0.0, list[ScheduledFault]()
    while (at := at + chance.uniform(*OUTAGE_PAUSE_SECONDS)) < seconds:
        kind = OUTAGES[len(faults) % len(OUTAGES)]
        duration = min(chance.uniform(0.2, 1) * LONGEST_SECONDS[kind], seconds - at)
        faults.append(ScheduledFault(at, kind, 0, duration, 0))
    return faults


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

    return [replace(breakage, end=back(breakage)) if breakage.kind in ABSENCES else breakage for breakage in breakages]


def list_unexplained(failures: Iterable[FailedRequest], breakages: Iterable[Breakage]) -> list[FailedRequest]:
    """Return the failures that no breakage accounts for."""
    excuses = _list_excuses(breakages)
    return [failure for failure in failures if not any(excuse.covers(failure) for excuse in excuses)]


def measure_lateness(failures: Iterable[FailedRequest], breakages: Iterable[Breakage]) -> dict[Kind, float]:
    """Return, by kind of fault, the longest time from its end, or its host's return, to a request that it made fail."""
    excuses = _list_excuses(breakages)
    latest = dict[Kind, float]()
    for failure in failures:
        covering = [excuse for excuse in excuses if excuse.covers(failure)]
        if covering:
            cause = max(covering, key=lambda excuse: excuse.over)
            kind = cause.breakage.kind
            latest[kind] = max(latest.get(kind, 0.0), failure.start - cause.over)
    return latest


@dataclass(frozen=True, slots=True)
class _Excuse:
    """The failures that a fault explains: those from its start until a while after it is over."""

    breakage: Breakage
    over: float
    """When the fault had ended, and an agent could withdraw the endpoint."""
    until: float

    def covers(self, failure: FailedRequest) -> bool:
        """Return whether the fault explains the failure: time, address, service and status fit."""
        broken = self.breakage
        if broken.service not in {"", failure.service}:
            return False
        statuses = PLAUSIBLE | {FAILING_STATUS} if broken.kind == "failing" else PLAUSIBLE
        fits = broken.address == failure.address and failure.status in statuses
        return fits and broken.start <= failure.end and failure.looked <= self.until


def _list_excuses(breakages: Iterable[Breakage]) -> list[_Excuse]:
    happened = list(breakages)
    absences = sorted(
        (breakage for breakage in happened if breakage.kind in ABSENCES), key=lambda breakage: breakage.start
    )
    return [_excuse(breakage, absences) for breakage in happened if breakage.kind in EXCUSES]


def _excuse(breakage: Breakage, absences: Iterable[Breakage]) -> _Excuse:
    """Return the excuse of a fault: longer if no agent or no API server was there to withdraw the endpoint."""
    over, until, outage = breakage.end, breakage.end + NOTICE_SECONDS, False
    for absence in absences:
        if absence.address == breakage.address and absence.start <= until and absence.end >= breakage.start:
            over = max(over, absence.end)
            until = max(until, absence.end + RETURN_SECONDS)
            outage = outage or absence.kind in OUTAGES
    # The controller withdraws the endpoints of a lost host, unless it was itself without an API server.
    if breakage.kind in {"link", "power"} and not outage:
        until = min(until, breakage.start + EXPIRY_SECONDS)
    return _Excuse(breakage, over, until)
