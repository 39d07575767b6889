"""The watch over the speed of replicas, and the speed of single requests by counters."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement.replacement import ReplacementRules
from controller.services.endpoints import Endpoint
from controller.services.speed_watch import CHECKS, FORGET_SECONDS, SlowStreak, SpeedWatch, go_on_slow
from controller.services.stream_speed import STREAM_SERIES, measure_streams
from controller.services.traffic import MetricsSample
from kube.resources import ObjectKey

KEY = ObjectKey("team", "chat")
A, B = Endpoint("10.0.0.1", 8080, node="a"), Endpoint("10.0.0.2", 8080, node="b")
RULES = ReplacementRules()


class Watched:
    """A watch over one service, with its clock."""

    def __init__(self) -> None:
        self.changed: list[ObjectKey] = []
        self.watch = SpeedWatch(RULES, self.changed.append)
        self.now = 0.0

    def take(self, *speeds: float | None) -> float | None:
        """Take a reading of each replica, half a minute after the last one."""
        self.now += 30
        known = {each: speed for each, speed in zip((A, B), speeds, strict=False) if speed is not None}
        return self.watch.take(KEY, known, self.now)


def test_replica_is_slow_only_after_ten_slow_readings_in_a_row() -> None:
    it = Watched()
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}).is_new
    for _ in range(CHECKS - 1):
        assert it.take(60.0, 99.0) == RULES.check_seconds
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}).slow == ()
    assert it.take(60.0, 99.0) is None, "what is known needs no further readings than the usual ones"
    found = it.watch.follow(KEY, {A: 100.0, B: 100.0})
    assert [(each.place, each.observed) for each in found.slow] == [("node/a", 60.0)]
    assert (found.healthy, found.is_new) == (("node/b",), False)
    it.take(80.0, 99.0)
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}).slow == ()
    assert it.changed == [KEY] * 3, "first looked at, slow, and not slow any more"


def test_unknown_speed_is_not_slow() -> None:
    it = Watched()
    it.watch.follow(KEY, {A: 100.0})
    for _ in range(50):
        assert it.take(None) is None
    assert it.watch.follow(KEY, {A: 100.0}).slow == ()


def test_slow_reading_is_forgotten_when_nobody_asks_any_more() -> None:
    it = Watched()
    it.watch.follow(KEY, {A: 100.0})
    for _ in range(CHECKS):
        it.take(10.0)
    it.now += FORGET_SECONDS
    it.take(None)
    assert it.watch.follow(KEY, {A: 100.0}).slow == ()


def test_replica_that_another_expectation_finds_fast_enough_begins_anew() -> None:
    it = Watched()
    it.watch.follow(KEY, {A: 100.0})
    for _ in range(CHECKS):
        it.take(60.0)
    assert it.watch.follow(KEY, {A: 80.0}).slow == ()
    assert it.watch.follow(KEY, {A: 100.0}).slow == ()
    assert it.watch.follow(KEY, {}).slow == ()


def test_replica_stays_slow_while_benchmarks_of_other_models_correct_its_estimate() -> None:
    it = Watched()
    for number in range(CHECKS):
        it.watch.follow(KEY, {A: 100.0 - number})
        it.take(60.0)
    assert [each.expected for each in it.watch.follow(KEY, {A: 90.0}).slow] == [90.0]


@given(st.lists(st.one_of(st.none(), st.floats(0.1, 200)), max_size=40))
def test_slow_is_what_was_slow_at_the_last_ten_known_readings(speeds: Sequence[float | None]) -> None:
    streak: SlowStreak | None = None
    for number, speed in enumerate(speeds):
        streak = go_on_slow(streak, speed, 100.0, 0.3, float(number))
    known = [each for each in speeds if each is not None]
    is_slow = len(known) >= CHECKS and all(each <= 70.0 for each in known[-CHECKS:])
    assert (streak is not None and streak.is_sustained) == is_slow


def measure(before: Sequence[float], after: Sequence[float]) -> float | None:
    first, second = (
        MetricsSample(at, dict(zip(STREAM_SERIES, values, strict=True))) for at, values in ((0, before), (30, after))
    )
    return measure_streams({A: first}, {A: second}).get(A)


@pytest.mark.parametrize(
    ("before", "after", "speed"),
    [
        ((100, 2), (300, 6), 50.0),
        ((100, 2), (131, 6), None),
        ((100, 2), (100, 2), None),
        ((500, 90), (300, 6), 50.0),
    ],
    ids=["alone", "too few", "idle", "restarted"],
)
def test_speed_of_a_single_request_is_known_only_where_it_was_alone(
    before: Sequence[float], after: Sequence[float], speed: float | None
) -> None:
    assert measure(before, after) == speed
