"""When a waiting unit probably starts, as a range: pure figures over what was seen of one lane of the queue.

A lane is a pool and the resource that is scarce in it. Room becomes free there at a rate that is measured, relative to
what runs; units of higher priority that arrive take some of it. The need of all units ahead divided by the rest is the
expected wait. By how much real waits differ from it is measured as well, from earlier forecasts, and gives the range:
so whatever the model leaves out, such as the fit of units on cells, is in the range.
"""

import bisect
import math
from collections import deque
from typing import Final, NamedTuple

from controller.placement.units import MEMORY, Unit
from crds.queue_status import NoEstimate

COVERED: Final = 0.9
"""Share of starts for which a range is made: more than the 80 % that are promised, as the past is not the future."""
WIDEST: Final = 3.0
"""The most by which the upper end of a range may be farther away than the lower one."""
MODEL_DEVIATIONS: Final = 1.3
"""Standard deviations in which 80 % of the waits would be if the model were right."""
NARROWEST: Final = 1.5
"""The least by which it is farther away: a narrower range helps nobody."""
LEAST_RELEASES: Final = 5.0
LEAST_REMEMBERED: Final = 0.01
"""Releases that count for less are forgotten: the last one was a day ago."""
LEAST_ERRORS: Final = 50
"""Fewest forecasts whose outcome is known before a range is given."""
MOST_ERRORS: Final = 4000
"""Latest forecasts by which a range is made."""
MEMORY_SECONDS: Final = 4 * 3600.0
"""Time after which what was seen counts e times less."""
LEAST_DRIFT: Final = 0.1
"""Least share of what becomes free that must be left by units of higher priority."""


class Lane(NamedTuple):
    """A pool, and the resource that is scarce in it."""

    pool: str
    resource: str


class Forecast(NamedTuple):
    """The expected wait of a unit, before it is compared with what earlier forecasts were worth."""

    wait_seconds: float
    spread: float
    """Standard deviation of the logarithm of the wait by the model."""


class StartRange(NamedTuple):
    """The range in which a unit starts, in seconds since 1970."""

    earliest: float
    latest: float

    def is_near(self, other: "StartRange", now: float) -> bool:
        """Return whether the other range is so close that replacing this one would tell a reader nothing."""
        pairs = ((self.earliest, other.earliest), (self.latest, other.latest))
        # The farther away a time is, the more it may differ.
        return all(abs(new - old) <= max(_NEAR_SECONDS, _NEAR_SHARE * (old - now)) for old, new in pairs)

    def is_narrow(self, now: float) -> bool:
        """Return whether the range, measured from now, is as narrow as promised."""
        return 0 < self.latest - now <= WIDEST * (self.earliest - now)


_NEAR_SECONDS: Final = 30.0
_NEAR_SHARE: Final = 0.1


def measure_need(unit: Unit) -> tuple[Lane, int]:
    """Return the lane of a unit, which is its home pool with the resource that is scarce, and its need of that.

    Scarce is the device resource that the unit needs, or memory if it needs none.
    """
    totals: dict[str, int] = {}
    for part in unit.parts:
        for name, amount in part.items():
            totals[name] = totals.get(name, 0) + amount
    resource = next((name for name in sorted(totals) if "/" in name and totals[name]), MEMORY)
    return Lane(unit.pools[0] if unit.pools else "", resource), totals.get(resource, 0)


class _Flow:
    """A sum of amounts over time in which older amounts decay."""

    def __init__(self) -> None:
        """Start without any amount."""
        self.count = self.amount = self.squares = 0.0

    def add(self, amount: float) -> None:
        """Add an amount, and its square, by which the variance is known."""
        self.count += 1
        self.amount += amount
        self.squares += amount * amount

    def fade(self, factor: float) -> None:
        """Scale all amounts so far down."""
        self.count *= factor
        self.amount *= factor
        self.squares *= factor


class _Errors:
    """The errors of the latest forecasts, in standard deviations of the model."""

    def __init__(self) -> None:
        """Start without any error."""
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def count(self) -> int:
        return len(self._sorted)

    def add(self, error: float) -> None:
        """Add an error; the oldest goes when there are more than MOST_ERRORS."""
        self._latest.append(error)
        bisect.insort(self._sorted, error)
        if len(self._latest) > MOST_ERRORS:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._latest.popleft()))

    def find_quantile(self, share: float) -> float:
        """Return the error that a further one stays below with probability `share`, interpolated between known ones.

        There must be one. A further error falls into each of the count + 1 gaps between the sorted known errors alike.
        """
        # Position between the sorted errors: 0.0 is the first, `count - 1` the last.
        place = min(max(share * (self.count + 1) - 1, 0.0), self.count - 1.0)
        below = int(place)
        above = min(below + 1, self.count - 1)
        return self._sorted[below] + (place - below) * (self._sorted[above] - self._sorted[below])


class LaneHistory:
    """The past of a lane: releases of room, arrivals by rank of priority, and the outcomes of forecasts."""

    def __init__(self, now: float) -> None:
        """Start without any knowledge at a time in seconds; all sums are of amounts of the lane's scarce resource."""
        self._at = now
        self._seconds = 0.0
        """Time over which the sums were taken; it decays as they do."""
        self._run_seconds = 0.0
        """Integral of the amount that ran."""
        self.running = 0.0
        """The amount that runs now."""
        self._releases = _Flow()
        """Amounts that units released by their end, as decaying sums."""
        self._arrivals: dict[int, _Flow] = {}
        """By rank of the priority: needs of units that arrived."""
        self._errors: dict[int, _Errors] = {}
        """By rank: a unit that may have others evicted starts earlier than its lane alone tells."""

    @property
    def is_blank(self) -> bool:
        """True if nothing runs, and nothing is known by which a start could be estimated."""
        return not self.running and self._releases.count < LEAST_REMEMBERED and not self._errors

    def advance(self, now: float) -> None:
        """Reduce the weight of what was seen until the last call, and add what has run since.

        All sums decay by e in MEMORY_SECONDS. A clock that jumps back changes nothing.
        """
        seconds = max(0.0, now - self._at)
        self._at = now
        factor = math.exp(-seconds / MEMORY_SECONDS)
        # The seconds that passed, each with the weight that it has by now.
        passed = MEMORY_SECONDS * (1 - factor)
        self._seconds = self._seconds * factor + passed
        self._run_seconds = self._run_seconds * factor + self.running * passed
        for flow in (self._releases, *self._arrivals.values()):
            flow.fade(factor)

    def add_release(self, amount: float) -> None:
        """Count a unit that ended by itself."""
        self._releases.add(amount)

    def add_arrival(self, rank: int, amount: float) -> None:
        """Count a unit that came to the queue."""
        self._arrivals.setdefault(rank, _Flow()).add(amount)

    def add_outcome(self, rank: int, forecast: Forecast, wait_seconds: float) -> None:
        """Count by how much the real wait of a unit of a rank differed from its forecast."""
        error = math.log(max(wait_seconds, 1.0) / forecast.wait_seconds) / forecast.spread
        self._errors.setdefault(rank, _Errors()).add(error)

    def forecast_wait(self, rank: int, needed: float) -> Forecast | NoEstimate:
        """Return the expected wait of a unit until `needed` has become free, which includes its own need.

        That is `needed` divided by what becomes free per second, minus what more important units take of it.
        TooFewSeen: too little has ended so far. Overtaken: more important units take nearly all that becomes free.

        Args:
            rank: the rank of the unit's priority; the lower, the more important.
            needed: the need of all units ahead of it, and its own.
        """
        releases = self._releases
        if releases.count < LEAST_RELEASES or self._run_seconds <= 0 or needed <= 0:
            return "TooFewSeen"

        # 1. What becomes free per second, and what more important units take of it per second.
        # Releases are measured per amount and second that it ran, and scaled to the amount that runs now.
        scale = self.running / self._run_seconds
        freed, freed_squares = releases.amount * scale, releases.squares * scale
        # A lower rank is more important.
        higher = [flow for arrival, flow in self._arrivals.items() if arrival < rank]
        taken = sum(flow.amount for flow in higher) / self._seconds
        taken_squares = sum(flow.squares for flow in higher) / self._seconds
        rate = freed - taken
        if rate <= LEAST_DRIFT * freed:
            return "Overtaken"

        # 2. How far the wait may be off: the variance of the sum of random releases and arrivals, and that of the rate,
        # which few releases tell.
        variance = (freed_squares + taken_squares) / (rate * needed) + (freed / rate) ** 2 / releases.count
        return Forecast(max(needed / rate, 1.0), math.sqrt(variance))

    def find_range(self, rank: int, forecast: Forecast, now: float) -> StartRange | NoEstimate:
        """Return the range of time in which a unit starts, by how far earlier forecasts for its rank were off.

        TooFewSeen: too few of them have an outcome. TooFewAhead: the range is too wide to be worth something, as few
        units are ahead whose differences might even out.
        """
        errors = self._errors.get(rank)
        if errors is None or errors.count < LEAST_ERRORS:
            return "TooFewSeen"

        # 1. Errors are in standard deviations (`spread`) of the logarithm of the wait, below 0 for an early start.
        # Few errors may agree by chance, so the range is at least the one that the model expects.
        low = min(errors.find_quantile((1 - COVERED) / 2), -MODEL_DEVIATIONS)
        high = max(errors.find_quantile((1 + COVERED) / 2), MODEL_DEVIATIONS)
        earliest = forecast.wait_seconds * math.exp(low * forecast.spread)
        latest = forecast.wait_seconds * math.exp(high * forecast.spread)

        # 2. A range that is too narrow is widened to NARROWEST, at both ends alike; one that is too wide is not given.
        widened = max(1.0, math.sqrt(NARROWEST * earliest / latest))
        earliest, latest = earliest / widened, latest * widened
        if latest > WIDEST * earliest:
            return "TooFewAhead"
        return StartRange(now + earliest, now + latest)
