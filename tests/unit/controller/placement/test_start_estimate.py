"""Estimated starts: the rate at which room becomes free, the range from earlier errors, and when none is given."""

import heapq
import random
from collections.abc import Iterable

import msgspec
import pytest

from controller.placement.start_estimate import (
    LEAST_ERRORS,
    MEMORY_SECONDS,
    MOST_ERRORS,
    NARROWEST,
    WIDEST,
    Forecast,
    Lane,
    LaneHistory,
    StartRange,
    measure_need,
)
from controller.placement.start_history import StartEstimator, UnitStart
from controller.placement.units import Unit
from crds.size import GIB
from tests.support.waiting_units import GPU, running_unit, waiting_process, waiting_unit

LANE = Lane("nvidia", GPU)
POOLS = {"node/n1": "nvidia"}


def history(releases: int = 20, *, running: float = 10.0, seconds: float = 100.0) -> LaneHistory:
    """Return a lane of which `running` devices are used, one of which becomes free every `seconds`."""
    lane_history = LaneHistory(0.0)
    lane_history.running = running
    for number in range(1, releases + 1):
        lane_history.advance(number * seconds)
        lane_history.add_release(1.0)
    return lane_history


def add_errors(lane: LaneHistory, low: float, high: float, number: int = LEAST_ERRORS, rank: int = 2) -> None:
    """Add outcomes of which half are `low` times the forecast, and half `high` times."""
    for index in range(number):
        lane.add_outcome(rank, Forecast(100.0, 0.1), 100.0 * (low if index % 2 else high))


def test_lane_is_that_of_the_scarce_resource_in_the_home_pool() -> None:
    pod = waiting_unit("a", parts=({GPU: 2, "memory": 9}, {GPU: 1, "memory": 9}), pools=("nvidia", "amd"))
    assert measure_need(pod) == (LANE, 3)
    assert measure_need(waiting_process("b", 24)) == (Lane("metal", "memory"), 24 * GIB)
    assert measure_need(waiting_unit("c", {GPU: 0, "memory": 7}, pools=())) == (Lane("", "memory"), 7)


def test_wait_is_what_is_needed_by_the_rate_at_which_room_becomes_free() -> None:
    forecast = history().forecast_wait(2, 5.0)
    assert isinstance(forecast, Forecast)
    assert forecast.wait_seconds == pytest.approx(500, rel=0.06)


def test_rate_follows_what_runs_now() -> None:
    lane = history()
    lane.running = 20.0
    forecast = lane.forecast_wait(2, 5.0)
    assert isinstance(forecast, Forecast)
    assert forecast.wait_seconds == pytest.approx(250, rel=0.06)


def test_arrivals_of_higher_priority_alone_lengthen_the_wait() -> None:
    lane = history()
    for _ in range(10):
        lane.add_arrival(1, 1.0)
    longer, same = lane.forecast_wait(2, 5.0), lane.forecast_wait(1, 5.0)
    assert isinstance(longer, Forecast)
    assert isinstance(same, Forecast)
    assert same.wait_seconds == pytest.approx(500, rel=0.06)
    assert longer.wait_seconds == pytest.approx(1000, rel=0.1)
    assert longer.spread > same.spread


def test_spread_is_less_the_more_is_ahead() -> None:
    near, far = history().forecast_wait(2, 1.0), history().forecast_wait(2, 50.0)
    assert isinstance(near, Forecast)
    assert isinstance(far, Forecast)
    assert far.spread < near.spread / 2


@pytest.mark.parametrize(
    ("lane", "reason"), [(history(4), "TooFewSeen"), (LaneHistory(0.0), "TooFewSeen")], ids=["few ends", "nothing"]
)
def test_lane_of_which_little_was_seen_has_no_forecast(lane: LaneHistory, reason: str) -> None:
    assert lane.forecast_wait(2, 5.0) == reason


def test_unit_that_is_overtaken_for_ever_has_no_forecast() -> None:
    lane = history()
    for _ in range(19):
        lane.add_arrival(0, 1.0)
    assert lane.forecast_wait(2, 5.0) == "Overtaken"
    assert isinstance(lane.forecast_wait(0, 5.0), Forecast)


def test_range_is_made_from_the_errors_of_earlier_forecasts() -> None:
    lane = history()
    add_errors(lane, 0.8, 2.0)
    assert lane.find_range(2, Forecast(1_000.0, 0.1), now=50.0) == pytest.approx((850.0, 2_050.0))


def test_range_is_not_narrower_than_helps() -> None:
    lane = history()
    add_errors(lane, 1.0, 1.0)
    start_range = lane.find_range(2, Forecast(1_200.0, 0.1), now=0.0)
    assert isinstance(start_range, StartRange)
    assert start_range.latest / start_range.earliest == pytest.approx(NARROWEST)
    assert start_range.earliest * start_range.latest == pytest.approx(1_200.0**2)


def test_range_that_would_be_too_wide_is_not_given() -> None:
    lane = history()
    add_errors(lane, 0.5, 2.0)
    assert lane.find_range(2, Forecast(1_000.0, 0.1), now=0.0) == "TooFewAhead"


def test_range_is_not_given_before_enough_outcomes_of_the_same_priority_are_known() -> None:
    lane = history()
    add_errors(lane, 0.8, 2.0, number=LEAST_ERRORS - 1)
    add_errors(lane, 0.8, 2.0, rank=1)
    assert lane.find_range(2, Forecast(1_000.0, 0.1), now=0.0) == "TooFewSeen"


def test_old_errors_are_forgotten() -> None:
    lane = history()
    add_errors(lane, 0.1, 10.0)
    add_errors(lane, 0.8, 2.0, number=MOST_ERRORS)
    assert lane.find_range(2, Forecast(1_000.0, 0.1), now=0.0) == pytest.approx((800.0, 2_000.0))


def test_clock_that_jumps_back_passes_no_time() -> None:
    lane = history()
    before = lane.forecast_wait(2, 5.0)
    lane.advance(-50_000.0)
    assert lane.forecast_wait(2, 5.0) == before


def release_rate(observations: Iterable[tuple[list[Unit], set[str]]]) -> object:
    """Return the forecast after observations a minute apart, of which each has units and evicted ones."""
    estimator = StartEstimator()
    now = 0.0
    for units, evicted in observations:
        now += 60.0
        estimator.observe(units, evicted, POOLS, now)
    probe = waiting_unit("probe")
    estimator.observe([probe], set(), POOLS, now)
    return estimator.estimate(probe, LANE, 5.0, now)


def runs(*numbers: int) -> list[Unit]:
    return [running_unit(waiting_unit(f"r{number}"), "node/n1") for number in numbers]


def test_only_units_that_end_by_themselves_make_room() -> None:
    ended: list[tuple[list[Unit], set[str]]] = [(runs(*range(number, 10)), set()) for number in range(8)]
    estimator = StartEstimator()
    for units, evicted in ended:
        estimator.observe(units, evicted, POOLS, 60.0 * (10 - len(units)))
    assert isinstance(estimator._lanes[LANE].forecast_wait(2, 5.0), Forecast)
    assert release_rate((units, {unit.uid for unit in units}) for units, _ in ended) == "TooFewSeen"


def test_predecessor_in_a_rollout_makes_no_room() -> None:
    successor = waiting_unit("new", replaces=frozenset(unit.uid for unit in runs(*range(10))))
    steps = [([*runs(*range(number, 10)), successor], set[str]()) for number in range(8)]
    estimator = StartEstimator()
    for number, (units, evicted) in enumerate(steps):
        estimator.observe(units, evicted, POOLS, 60.0 * number)
    assert estimator._lanes[LANE].forecast_wait(2, 5.0) == "TooFewSeen"


def test_successor_at_an_old_place_is_no_arrival() -> None:
    estimator = StartEstimator()
    estimator.observe(runs(1), set(), POOLS, 1_000.0)
    units = [*runs(1), waiting_unit("old", priority="high", enqueued_at=100.0)]
    estimator.observe(units, set(), POOLS, 1_060.0)
    assert estimator._lanes[LANE]._arrivals == {}
    estimator.observe([*units, waiting_unit("new", priority="high", enqueued_at=1_070.0)], set(), POOLS, 1_120.0)
    assert estimator._lanes[LANE]._arrivals[1].count == pytest.approx(1.0)


def test_first_observation_starts_nothing() -> None:
    starts: list[UnitStart] = []
    StartEstimator(starts.append).observe(runs(1, 2), set(), POOLS, 1_000.0)
    assert starts == []


@pytest.mark.parametrize(
    ("new", "is_near"),
    [((100.0, 300.0), True), ((129.0, 329.0), True), ((100.0, 331.0), False), ((131.0, 300.0), False)],
)
def test_range_that_moved_little_is_not_news(new: tuple[float, float], *, is_near: bool) -> None:
    assert StartRange(100.0, 300.0).is_near(StartRange(*new), now=0.0) is is_near


@pytest.mark.parametrize(("now", "is_narrow"), [(0.0, True), (1.0, False), (100.0, False), (400.0, False)])
def test_range_ages_as_it_is_measured_from_now(now: float, *, is_narrow: bool) -> None:
    assert StartRange(100.0, 300.0).is_narrow(now) is is_narrow


def test_starts_of_half_a_simulated_day_are_in_their_ranges() -> None:
    """A pool of 32 devices, to which slightly more comes than it can run."""
    rng, estimator_starts = random.Random(3), list[UnitStart]()  # noqa: S311 - a day that can be repeated
    estimator = StartEstimator(estimator_starts.append)
    units: dict[str, Unit] = {}
    waiting: list[str] = []
    ends: list[tuple[float, str]] = []
    given: list[tuple[str, StartRange]] = []
    started: dict[str, float] = {}
    arrives_at, now, count = 0.0, 0.0, 0
    while now < 12 * 3600:
        now += 60
        while ends and ends[0][0] <= now:
            del units[heapq.heappop(ends)[1]]
        while arrives_at <= now:
            unit = waiting_unit(f"u{count}", enqueued_at=arrives_at)
            units[unit.uid] = unit
            waiting.append(unit.uid)
            arrives_at, count = arrives_at + rng.expovariate(32 / 1800 * 1.05), count + 1
        while waiting and len(ends) < 32:
            uid = waiting.pop(0)
            units[uid] = msgspec.structs.replace(units[uid], state="running", cells=("node/n1",))
            started[uid] = now
            heapq.heappush(ends, (now + rng.expovariate(1 / 1800), uid))
        estimator.observe(units.values(), set(), POOLS, now)
        for ahead, uid in enumerate(waiting):
            estimate = estimator.estimate(units[uid], LANE, ahead + 1.0, now)
            if isinstance(estimate, StartRange):
                assert estimate.latest - now <= WIDEST * (estimate.earliest - now) * (1 + 1e-9)
                given.append((uid, estimate))
    judged = {(uid, start_range) for uid, start_range in given if uid in started}
    held = sum(start_range.earliest <= started[uid] <= start_range.latest for uid, start_range in judged)
    assert held >= 0.8 * len(judged)
    outcomes = [start.outcome for start in estimator_starts]
    assert outcomes.count("in_range") >= 0.8 * (len(outcomes) - outcomes.count("none"))
    assert outcomes.count("none") < 0.5 * len(outcomes)


def test_lane_in_which_nothing_ever_ran_is_forgotten() -> None:
    estimator = StartEstimator()
    for number in range(20):
        waiting = waiting_unit("a", pools=(f"pool-{number}",))
        estimator.observe([running_unit(waiting_unit("r"), "node/n1"), waiting], (), POOLS, float(number))
        estimator.estimate(waiting, Lane(f"pool-{number}", GPU), 1.0, float(number))
    assert len(estimator._lanes) == 2
    estimator.observe([], (), POOLS, 20.0)
    assert list(estimator._lanes) == [LANE], "a release is known"
    estimator.observe([], (), POOLS, 20.0 + 10 * MEMORY_SECONDS)
    assert not estimator._lanes
