"""The watch over the speed of replicas: which of them are slower than their hardware.

It costs nothing but a comparison: the traffic meter reads the counters of pods anyway, and tells each few minutes what
a single request got meanwhile. A replica that answers several requests at once, or none, is not judged.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from controller.placement.replacement import DegradedReplica, ReplacementRules
from controller.services.endpoints import Endpoint
from crds.rate import is_notable_change
from kube.resources import ObjectKey

CHECKS: Final = 10
"""Intervals of a reading: what is slow for a moment is not slow over all of them."""
FORGET_SECONDS: Final = 600.0
"""Time without a further reading after which the last one says nothing any more."""


class SpeedReading(NamedTuple):
    """The speed of a single request on a replica."""

    speed: float
    """In tokens/s, as it is shown."""
    read_at: float


class WatchedSpeeds(NamedTuple):
    """The result of the watch for a service."""

    slow: tuple[DegradedReplica, ...] = ()
    healthy: tuple[str, ...] = ()
    """`Cell.id` of the places at which the speed was as expected at the last reading."""


class _WatchedService(msgspec.Struct):
    expected: Mapping[Endpoint, float]
    readings: dict[Endpoint, SpeedReading] = {}


class SpeedWatch:
    """The watch over all services.

    Args:
        rules: the administrator's rules.
        on_change: called with each service whose result has changed.
    """

    def __init__(self, rules: ReplacementRules, on_change: Callable[[ObjectKey], None]) -> None:
        self.rules = rules
        self._on_change = on_change
        self._services: dict[ObjectKey, _WatchedService] = {}

    @property
    def window_seconds(self) -> float:
        """The time from one reading to the next."""
        return CHECKS * self.rules.check_seconds

    def follow(self, key: ObjectKey, expected: Mapping[Endpoint, float]) -> WatchedSpeeds:
        """Return the slow and healthy replicas of a service, and compare them with these speeds from now on."""
        if not expected:  # nothing to compare with
            self.forget(key)
            return WatchedSpeeds()
        service = self._services.setdefault(key, _WatchedService(expected))
        service.expected = expected
        return self._summarize(service)

    def add_readings(self, key: ObjectKey, speeds: Mapping[Endpoint, float], now: float) -> None:
        """Store new readings of a service, and report it if other replicas are slow or healthy than before.

        A replica without a reading had no request that ran alone; its last reading counts until `FORGET_SECONDS`.
        """
        service = self._services.get(key)
        if service is None:
            return
        before, last = self._summarize(service), service.readings
        service.readings = {pod: reading for pod, reading in last.items() if now - reading.read_at < FORGET_SECONDS}
        for pod, speed in speeds.items():
            # After a small change the last number stays, since each new number is a write of the status.
            is_small_change = pod in last and not is_notable_change(last[pod].speed, speed)
            service.readings[pod] = SpeedReading(speed=last[pod].speed if is_small_change else speed, read_at=now)
        if self._summarize(service) != before:
            self._on_change(key)

    def forget(self, key: ObjectKey) -> None:
        """Watch a service no more."""
        self._services.pop(key, None)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self._services.clear()

    def _summarize(self, service: _WatchedService) -> WatchedSpeeds:
        """Return which pods are slower than expected by more than the threshold, and on which nodes others are not."""
        slow, healthy = [], set[str]()
        for pod, expected in service.expected.items():
            reading = service.readings.get(pod)
            if reading is None:
                continue
            if reading.speed <= (1 - self.rules.degrade_threshold) * expected:
                slow.append(DegradedReplica(f"node/{pod.node}", pod.address, observed=reading.speed, expected=expected))
            else:
                healthy.add(f"node/{pod.node}")
        return WatchedSpeeds(tuple(sorted(slow)), tuple(sorted(healthy)))
