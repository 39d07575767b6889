"""The limit of second tries: a tenth of a service's requests, so that its clients do not multiply an outage.

Requests and retries are counted over about a minute, each weighing less with its age. A service with few requests may
still repeat some of them.
"""

import math
from typing import Final

RETRIES_PER_REQUEST: Final = 0.1
FREE_RETRIES: Final = 10.0
"""The retries of a service without other requests: as many as an agent runs tools at once."""
WINDOW_SECONDS: Final = 60.0
AGING_SECONDS: Final = 1.0
"""Requests of so short a time have one age: to compute it for each would cost more than to count it."""


class RetryBudget:
    """The requests and retries of one service in the last minute. Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._retries = 0.0
        self._counted_at = 0.0  # the time to which both numbers have been made smaller

    def note_request(self, now: float) -> None:
        """Count a request, not its retries."""
        if now - self._counted_at >= AGING_SECONDS:
            self._age(now)
        self._requests += 1

    def try_take(self, now: float) -> bool:
        """Count a retry, and return True, if the budget has room for it."""
        self._age(now)
        if self._retries + 1 > FREE_RETRIES + RETRIES_PER_REQUEST * self._requests:
            return False
        self._retries += 1
        return True

    def _age(self, now: float) -> None:
        """Make the counts smaller by their age."""
        left = math.exp((self._counted_at - now) / WINDOW_SECONDS)
        self._requests *= left
        self._retries *= left
        self._counted_at = now
