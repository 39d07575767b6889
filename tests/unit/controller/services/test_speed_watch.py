"""The watch over the speed of replicas, and the speed of single requests by counters."""

from collections.abc import Sequence

import pytest

from controller.placement.replacement import DegradedReplica, ReplacementRules
from controller.services.endpoints import Endpoint
from controller.services.speed_watch import FORGET_SECONDS, SpeedWatch, WatchedSpeeds
from controller.services.traffic import STREAM_SERIES, MetricsSample, measure_streams
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

    def take(self, *speeds: float | None) -> None:
        """Take a reading of each replica."""
        self.now += self.watch.window_seconds
        readings = {pod: speed for pod, speed in zip((A, B), speeds, strict=False) if speed is not None}
        self.watch.add_readings(KEY, readings, self.now)


def test_replica_is_slow_by_the_threshold_and_the_service_hears_of_a_change() -> None:
    it = Watched()
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}) == WatchedSpeeds()
    it.take(60.0, 99.0)
    speeds = it.watch.follow(KEY, {A: 100.0, B: 100.0})
    assert speeds == WatchedSpeeds((DegradedReplica("node/a", A.address, 60.0, 100.0),), ("node/b",))
    it.take(63.0, 99.0)
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}) == speeds, "a tenth is no change of what is shown"
    it.take(80.0, 99.0)
    assert it.watch.follow(KEY, {A: 100.0, B: 100.0}).slow == ()
    assert it.changed == [KEY] * 2


def test_reading_says_nothing_any_more_when_nobody_asks() -> None:
    it = Watched()
    it.watch.follow(KEY, {A: 100.0})
    it.take(None)
    assert it.watch.follow(KEY, {A: 100.0}) == WatchedSpeeds()
    it.take(10.0)
    it.take(None)
    assert len(it.watch.follow(KEY, {A: 100.0}).slow) == 1
    it.now += FORGET_SECONDS
    it.take(None)
    assert it.watch.follow(KEY, {A: 100.0}) == WatchedSpeeds()


def test_slow_is_what_is_slow_by_what_is_expected_now() -> None:
    it = Watched()
    it.watch.follow(KEY, {A: 100.0})
    it.take(60.0)
    assert it.watch.follow(KEY, {A: 80.0}).slow == ()
    assert [replica.expected for replica in it.watch.follow(KEY, {A: 90.0}).slow] == [90.0]
    assert it.watch.follow(KEY, {}) == WatchedSpeeds()
    assert it.watch.follow(KEY, {A: 100.0}) == WatchedSpeeds(), "it is forgotten"


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
