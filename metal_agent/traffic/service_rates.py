"""The traffic of each service of a host: the mean of a minute of what its proxy counts.

The agent reads the state of the proxy every few seconds anyway. The counts have the tokens of streams that are still
running, so a long answer counts while it is generated; requests count when they end.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.proxy.config import ProxyState, ServiceStats

MINUTE_SECONDS: Final = 60.0
"""Time over which requests and tokens are counted."""
LEAST_SECONDS: Final = 10.0
"""Shortest time by which requests are counted: two that came at once say nothing about a minute."""
STALE_SECONDS: Final = 60.0
"""Time without a state of the proxy after which the rates are unknown."""


class ServiceRate(NamedTuple):
    """The traffic of a service in the last minute."""

    tokens_per_second: float
    requests_per_minute: float = 0.0
    average_seconds: float | None = None
    """Average time from the arrival of a request to its end; None if no request has ended."""


class _Count(NamedTuple):
    at: float
    stats: ServiceStats


class ServiceRates:
    """The counts of the last minute, by service as `<namespace>/<service>`."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[_Count]] = {}
        self.on_read: Callable[[float], None] = lambda _now: None
        """Called with the time after each try to read the state of the proxy."""

    def note_state(self, state: ProxyState, now: float) -> None:
        """Add the counts of the proxy's state at `now` of a monotonic clock, and forget those that are too old.

        A rate is the difference of two counts, a minute apart. So of the counts from before the last minute the latest
        is kept, from which the minute is measured. Counts that fall are those of another proxy, which began at 0.
        """
        previous, self._counts = self._counts, {}
        for service in state.services:
            stats, counts = service.stats, previous.get(service.name, deque[_Count]())
            last = counts[-1].stats if counts else stats
            is_of_other_proxy = stats.tokens_out < last.tokens_out or stats.requests < last.requests
            if is_of_other_proxy:
                counts.clear()

            counts.append(_Count(at=now, stats=stats))
            while len(counts) > 1 and counts[1].at <= now - MINUTE_SECONDS:  # a later one is old enough, too
                counts.popleft()

            self._counts[service.name] = counts
        self.on_read(now)

    def find_rate(self, service: str, now: float) -> ServiceRate | None:
        """Return the traffic of a service; None if it was counted less than twice, or not for a while."""
        counts = self._counts.get(service)  # of the last minute, the oldest first
        if not counts:
            return None
        oldest, latest = counts[0], counts[-1]
        is_stale, is_counted_once = now - latest.at > STALE_SECONDS, latest.at <= oldest.at
        if is_stale or is_counted_once:
            return None
        seconds, requests = latest.at - oldest.at, latest.stats.requests - oldest.stats.requests
        request_seconds = latest.stats.request_seconds - oldest.stats.request_seconds
        return ServiceRate(
            tokens_per_second=(latest.stats.tokens_out - oldest.stats.tokens_out) / seconds,
            requests_per_minute=requests * 60 / max(seconds, LEAST_SECONDS),
            average_seconds=request_seconds / requests if requests else None,
        )
