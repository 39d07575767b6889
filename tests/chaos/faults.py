"""What is broken, when and where: a schedule that a seed decides, and which failed requests it explains.

An agent that dies explains none: what it started serves on. An engine's or a proxy's death explains what was asked
around that moment; a cut link and a power failure explain what was asked meanwhile.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["agent", "proxy", "engine", "link", "power"]

WEIGHTS: Final[dict[Kind, int]] = {"agent": 4, "proxy": 3, "engine": 4, "link": 2, "power": 1}
PAUSE_SECONDS: Final = (1.0, 6.0)
LONGEST_SECONDS: Final[dict[Kind, float]] = {"agent": 5.0, "proxy": 0.0, "engine": 0.0, "link": 50.0, "power": 8.0}
"""How long each lasts at most. An agent comes back as under launchd; a link may be cut for longer than a Lease."""
NOTICE_SECONDS: Final = 5.0
"""For an endpoint to be withdrawn, and for clients to hear of it, on a machine that is busy."""
RETURN_SECONDS: Final = 15.0
"""For an agent that was away to see what happened meanwhile."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is to break, `at` seconds after the start."""

    at: float
    kind: Kind
    host: int
    seconds: float
    pick: int
    """Which of several engines, counted around."""


@dataclass(frozen=True, slots=True)
class Breakage:
    """What a fault has done: from `start` to `end`, of one clock."""

    kind: Kind
    address: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed."""

    address: str
    start: float
    end: float
    text: str
    plausible: bool
    """It is such as a break brings about: no answer, or one that says that there is none."""


def schedule(seed: int, seconds: float, hosts: int) -> list[Fault]:
    """Decide all that happens, in order."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    at, faults = 0.0, list[Fault]()
    while True:
        at += chance.uniform(*PAUSE_SECONDS)
        if at >= seconds:
            return faults
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        duration = chance.uniform(0.2, 1) * LONGEST_SECONDS[kind]
        faults.append(Fault(at, kind, chance.randrange(hosts), duration, chance.randrange(1000)))


def unexplained(failures: Iterable[Failure], breakages: Iterable[Breakage]) -> list[Failure]:
    """Return the failures that no breakage accounts for."""
    happened = list(breakages)
    away = [each for each in happened if each.kind not in {"proxy", "engine"}]

    def noticed(breakage: Breakage) -> float:
        """When clients can be expected to know: later where nobody was there to tell them."""
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
