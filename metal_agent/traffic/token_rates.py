"""The tokens per second of each service of a host: the mean of a minute of what its proxy counts.

The agent reads the state of the proxy every few seconds anyway. The counts have the tokens of streams that are still
running, so a long answer counts while it is generated.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.proxy.config import ProxyState

MINUTE_SECONDS: Final = 60.0
"""Time over which tokens are counted."""
STALE_SECONDS: Final = 60.0
"""Time without a state of the proxy after which the rates are unknown."""


class _Count(NamedTuple):
    at: float
    tokens: int


class TokenRates:
    """The counts of the last minute, by service as `<namespace>/<service>`."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[_Count]] = {}
        self.on_read: Callable[[float], None] = lambda _now: None
        """Called with the time after each try to read the state of the proxy."""

    def note_state(self, state: ProxyState, now: float) -> None:
        """Take the counts of a state of the proxy, read at `now` of a monotonic clock."""
        known, self._counts = self._counts, {}
        for service in state.services:
            counts = known.get(service.name, deque[_Count]())
            if counts and service.stats.tokens_out < counts[-1].tokens:
                # Another proxy counts from 0.
                counts.clear()
            counts.append(_Count(now, service.stats.tokens_out))
            while len(counts) > 1 and counts[1].at <= now - MINUTE_SECONDS:
                counts.popleft()
            self._counts[service.name] = counts
        self.on_read(now)

    def find_rate(self, service: str, now: float) -> float | None:
        """Return the tokens per second of a service; None: it was read less than twice, or not for a while."""
        counts = self._counts.get(service)
        if not counts or now - counts[-1].at > STALE_SECONDS or counts[-1].at <= counts[0].at:
            return None
        return (counts[-1].tokens - counts[0].tokens) / (counts[-1].at - counts[0].at)
