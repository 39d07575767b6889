"""The history from which starts are estimated: what ran, ended, arrived and started while this controller leads.

It is in memory alone. A new leader gives no estimate until it has seen enough: from the ages of what runs it cannot
tell a pool whose units run for an hour from one that was set up an hour ago, and a wrong estimate is worse than none.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from controller.placement.start_estimate import Forecast, Lane, LaneHistory, StartRange, measure_need
from controller.placement.units import Unit
from crds.queue_status import NoEstimate

FRESH_SECONDS: Final = 60.0
"""A unit that has waited for longer when it is first seen is the successor of another one, and no arrival."""
HALF: Final = 0.5
"""A unit is forecast anew, to learn from it, when this share of what was ahead of it is left."""


class UnitStart(NamedTuple):
    """A unit that was admitted after a wait."""

    unit: Unit
    wait_seconds: float
    """Since it has its place in the queue."""
    first_range: StartRange | None
    """The first estimate that was given for it."""
    first_range_at: float
    """When that was."""
    started_at: float

    @property
    def error_ratio(self) -> float | None:
        """Return the real wait since the first estimate, as a multiple of the estimated one; None without an estimate.

        What was estimated is the geometric middle of the range.
        """
        if self.first_range is None:
            return None
        middle = math.sqrt(
            (self.first_range.earliest - self.first_range_at) * (self.first_range.latest - self.first_range_at)
        )
        return max(0.0, self.started_at - self.first_range_at) / middle

    @property
    def outcome(self) -> str:
        """Return whether it started in the range: `in_range`, `early`, `late`, or `none` if no range was given."""
        if self.first_range is None:
            return "none"
        if self.started_at < self.first_range.earliest:
            return "early"
        return "late" if self.started_at > self.first_range.latest else "in_range"


class _Run(NamedTuple):
    lane: Lane
    amount: int


class _Waiting:
    """The forecasts of a waiting unit."""

    def __init__(self) -> None:
        """Start without a forecast or a range."""
        self.forecasts: list[tuple[float, Forecast]] = []
        """Each with the time when it was made."""
        self.needed_at_forecast = 0.0
        """Need of all units ahead of it and of itself at the last of these."""
        self.first_range: StartRange | None = None
        self.first_range_at = 0.0
        self.last_range: StartRange | None = None


class StartEstimator:
    """The estimates of all waiting units, and what they are made of."""

    def __init__(self, on_start: Callable[[UnitStart], None] = lambda _start: None) -> None:
        """Start without any history; `on_start` gets each unit that starts, with its first estimate."""
        self._on_start = on_start
        self._lanes: dict[Lane, LaneHistory] = {}
        self._runs: dict[str, _Run] = {}
        """By uid of each unit with a place: its lane, and the amount that it holds there."""
        self._waiting: dict[str, _Waiting] = {}
        """By uid of each waiting unit: its forecasts."""
        self._displaced: set[str] = set()
        """Units that end for another one, which takes their room."""
        self._seen_at: float | None = None
        """Time of the last observation."""

    def observe(self, units: Iterable[Unit], evicted: Collection[str], pools: Mapping[str, str], now: float) -> None:
        """Note what has come, started and ended since the last observation; report each start.

        What a unit releases by its end counts for later estimates, unless another unit was to get its room
        (`displaced`).

        Args:
            units: all units.
            evicted: `uid` of those that are evicted now.
            pools: the pool of each cell.
            now: the wall clock, in seconds since 1970.
        """
        # 1. Let time pass in each lane.
        for history in self._lanes.values():
            history.advance(now)
        self._displaced.update(evicted)

        # 2. Note the units that wait and those with a place; count arrivals and starts.
        running: dict[Lane, float] = {}  # the amount that runs in each lane
        placed, waiting = set[str](), set[str]()  # uids
        for unit in units:
            uid = unit.uid
            if unit.replaces:  # it takes their room
                self._displaced |= unit.replaces
            if unit.state == "waiting":
                waiting.add(uid)
                if uid not in self._waiting:
                    self._waiting[uid] = _Waiting()
                    self._count_arrival(unit, now)
                continue
            placed.add(uid)
            run = self._runs.get(uid)
            if run is None:  # it was not seen with a place before
                run = self._runs[uid] = _describe_run(unit, pools)
                self._count_start(unit, now)
            running[run.lane] = running.get(run.lane, 0.0) + run.amount

        # 3. Count ends, and forget units that are gone.
        self._count_ends(self._runs.keys() - placed)
        for uid in self._waiting.keys() - waiting:
            del self._waiting[uid]
        self._displaced &= placed  # the ends of the others are counted

        # 4. Note what runs in each lane, and drop lanes without anything: whoever names another pool, or selects other
        # devices, again and again would make one after the other.
        for lane in running.keys() | self._lanes.keys():
            self._get_history(lane, now).running = running.get(lane, 0.0)
        self._lanes = {lane: history for lane, history in self._lanes.items() if not history.is_blank}
        self._seen_at = now

    def estimate(self, unit: Unit, lane: Lane, needed: float, now: float) -> StartRange | NoEstimate:
        """Return the range of time in which a waiting unit probably starts, or why that is not known.

        The last range is repeated while it is still narrow and a new one would be nearly the same: it should not
        flicker. Each time that half of the need ahead is gone, a forecast is kept: its error is learned at the start.

        Args:
            unit: the unit.
            lane: where it waits: a pool and the scarce resource.
            needed: what all units ahead of it in the lane need, and it itself.
            now: the wall clock, in seconds since 1970.
        """
        history = self._get_history(lane, now)
        forecast = history.forecast_wait(unit.rank, needed)
        waiting = self._waiting.get(unit.uid)
        if waiting is None:
            return "TooFewSeen"

        # 1. Forecast the wait. A text is the reason why nothing is known: then the last range is not repeated later.
        if isinstance(forecast, str):
            waiting.last_range = None
            return forecast
        # HALF: a further forecast is kept once half of the need ahead is gone.
        if not waiting.forecasts or needed <= waiting.needed_at_forecast * HALF:
            waiting.forecasts.append((now, forecast))
            waiting.needed_at_forecast = needed

        # 2. Make it a range.
        span = history.find_range(unit.rank, forecast, now)
        if isinstance(span, str):
            waiting.last_range = None
            return span

        # 3. Take the new range, or else repeat the last one.
        last = waiting.last_range
        if last is None or not last.is_narrow(now) or not last.is_near(span, now):
            waiting.last_range = span
            if waiting.first_range is None:
                waiting.first_range, waiting.first_range_at = span, now
        return waiting.last_range or span

    def _get_history(self, lane: Lane, now: float) -> LaneHistory:
        """Return the history of a lane, which begins now if it has none."""
        if lane not in self._lanes:
            self._lanes[lane] = LaneHistory(now)
        return self._lanes[lane]

    def _count_arrival(self, unit: Unit, now: float) -> None:
        """Count a unit that is new in the queue; one with an old place is the successor of another one."""
        if self._seen_at is not None and unit.enqueued_at >= self._seen_at - FRESH_SECONDS:
            lane, amount = measure_need(unit)
            self._get_history(lane, now).add_arrival(unit.rank, amount)

    def _count_start(self, unit: Unit, now: float) -> None:
        """Report a unit that has started, and learn how far its forecasts were off.

        Units of the first observation are not reported: they may have started long ago.
        """
        waited = self._waiting.pop(unit.uid, None)
        # It was never seen waiting: it came and started since the last observation, or before the first one.
        if waited is None:
            self._count_arrival(unit, now)
        if self._seen_at is None:
            return

        # 1. Learn how long it really waited since each of its forecasts.
        lane, _ = measure_need(unit)
        for made_at, forecast in waited.forecasts if waited is not None else ():
            self._get_history(lane, now).add_outcome(unit.rank, forecast, now - made_at)

        # 2. Report it.
        wait_seconds = max(0.0, now - unit.enqueued_at)
        first_range, first_range_at = (waited.first_range, waited.first_range_at) if waited is not None else (None, now)
        self._on_start(UnitStart(unit, wait_seconds, first_range, first_range_at, started_at=now))

    def _count_ends(self, ended: Iterable[str]) -> None:
        """Count what units released by their end; those that ended for another one released nothing."""
        for uid in list(ended):
            run = self._runs.pop(uid)
            if uid not in self._displaced and run.lane in self._lanes:
                self._lanes[run.lane].add_release(run.amount)


def _describe_run(unit: Unit, pools: Mapping[str, str]) -> _Run:
    """Return the lane in which a placed unit runs, by the pool of its first cell, and the amount that it holds."""
    lane, amount = measure_need(unit)
    pool = pools.get(unit.cells[0], lane.pool) if unit.cells else lane.pool
    return _Run(lane._replace(pool=pool), amount)
