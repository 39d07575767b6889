"""The watch over the speed of replicas: which are slow at every check for some time.

It costs nothing where nothing is slow: the readings of the traffic are compared with what is expected. A service of
which a replica is slow is read every 30 seconds until ten readings say so, or one does not.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from controller.placement.replacement import ReplacementRules, SlowReplica
from controller.services.endpoints import Endpoint
from crds.rate import is_notable_change
from kube.resources import ObjectKey

CHECKS: Final = 10
"""Readings in a row, all of them slow, after which the speed has fallen."""
FORGET_SECONDS: Final = 600.0
"""Time without a reading after which a slow one says nothing any more."""


class SlowStreak(NamedTuple):
    """Slow readings of a replica in a row."""

    checks: int
    read_at: float
    """When it was read last, in seconds."""
    observed: float
    """The speed as it is shown, in tokens/s."""

    @property
    def is_sustained(self) -> bool:
        """Return whether all checks found the replica slow."""
        return self.checks >= CHECKS


def go_on_slow(
    streak: SlowStreak | None, speed: float | None, expected: float, threshold: float, now: float
) -> SlowStreak | None:
    """Return the slow readings of a replica after another one; None: it is not slow.

    Args:
        streak: the slow readings before.
        speed: the speed in tokens/s; None: unknown, which says nothing.
        expected: the speed that is expected.
        threshold: the share of it that is missing at the least.
        now: the time.
    """
    if speed is None:
        return streak if streak is not None and now - streak.read_at < FORGET_SECONDS else None
    if not _is_slow(speed, expected, threshold):
        return None
    if streak is None:
        return SlowStreak(1, now, speed)
    shown = speed if is_notable_change(streak.observed, speed) else streak.observed
    return SlowStreak(streak.checks + 1, now, shown)


def _is_slow(speed: float, expected: float, threshold: float) -> bool:
    return speed <= (1 - threshold) * expected


class WatchedSpeeds(NamedTuple):
    """The result of the watch for a service."""

    slow: tuple[SlowReplica, ...] = ()
    healthy: tuple[str, ...] = ()
    """`Cell.id` of the places at which the speed was as expected at the last reading."""
    is_new: bool = False
    """This leader has not read the service yet."""


class _WatchedService(msgspec.Struct):
    expected: Mapping[Endpoint, float]
    streaks: dict[Endpoint, SlowStreak] = {}
    healthy: set[Endpoint] = set()
    is_new: bool = True


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

    def follow(self, key: ObjectKey, expected: Mapping[Endpoint, float]) -> WatchedSpeeds:
        """Return the result for a service, and compare its replicas with these speeds from now on."""
        if not expected:
            self.forget(key)
            return WatchedSpeeds()
        service = self._services.setdefault(key, _WatchedService(expected))
        for each in [*service.streaks.keys(), *service.healthy]:
            now = expected.get(each)
            if now == service.expected.get(each):
                continue
            service.healthy.discard(each)
            # Each benchmark of another model corrects what is expected: what is slow by that, too, stays so.
            streak = service.streaks.get(each)
            if streak is not None and (now is None or not _is_slow(streak.observed, now, self.rules.degrade_threshold)):
                del service.streaks[each]
        service.expected = expected
        return _summarize(service)

    def take(self, key: ObjectKey, speeds: Mapping[Endpoint, float], now: float) -> float | None:
        """Take a reading of a service; return the time after which it is to be read again, None: as always."""
        service = self._services.get(key)
        if service is None:
            return None
        before = _summarize(service)
        service.is_new = False
        for endpoint, expected in service.expected.items():
            speed = speeds.get(endpoint)
            streak = go_on_slow(service.streaks.get(endpoint), speed, expected, self.rules.degrade_threshold, now)
            if streak is not None:
                service.streaks[endpoint] = streak
            else:
                service.streaks.pop(endpoint, None)
            if streak is not None:
                service.healthy.discard(endpoint)
            elif speed is not None:
                service.healthy.add(endpoint)
        if _summarize(service) != before:
            self._on_change(key)
        is_open = any(not each.is_sustained for each in service.streaks.values())
        return self.rules.check_seconds if is_open else None

    def forget(self, key: ObjectKey) -> None:
        """Watch a service no more."""
        self._services.pop(key, None)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self._services.clear()


def _summarize(service: _WatchedService) -> WatchedSpeeds:
    slow = [
        SlowReplica(f"node/{endpoint.node}", streak.observed, service.expected[endpoint], endpoint.address)
        for endpoint, streak in service.streaks.items()
        if streak.is_sustained
    ]
    return WatchedSpeeds(
        tuple(sorted(slow)),
        tuple(sorted(f"node/{each.node}" for each in service.healthy)),
        service.is_new,
    )
