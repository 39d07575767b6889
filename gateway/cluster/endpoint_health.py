"""The endpoints that are passed over, because they accept no connection, until one request finds them there again.

This gateway's own failures count before the API server hears of a dead host: a new connection that is refused or comes
to nothing in time, or a machine that acknowledges nothing any more. One is enough. What an engine answers is none: with
429 and 503 it works.
"""

from typing import Final

FIRST_EJECTION_SECONDS: Final = 2.0
LONGEST_EJECTION_SECONDS: Final = 30.0


class EndpointHealth:
    """The ejection of one endpoint. Times are of the monotonic clock, in seconds."""

    __slots__ = ("_ejected_at", "_ejection_seconds", "ejected_until")

    def __init__(self) -> None:
        self.ejected_until = 0.0
        """The time from which on one request may try the endpoint; 0: it is not ejected."""
        self._ejected_at = 0.0
        self._ejection_seconds = 0.0  # the length of the ejection; 0: there is none

    def begin_attempt(self, now: float) -> None:
        """Note that a request goes to the endpoint; others pass an ejected one over until this request's outcome.

        If there is none, as from a client that hangs up, the next request may try after the same time again.
        """
        if self._ejection_seconds:
            self.ejected_until = now + self._ejection_seconds

    def note_success(self) -> None:
        """End the ejection: the endpoint has begun to answer."""
        self.ejected_until = self._ejection_seconds = 0.0

    def note_unreachable(self, now: float) -> None:
        """Eject the endpoint or, after an ejection, for twice as long as before."""
        if self._ejection_seconds and now < self._ejected_at + self._ejection_seconds:
            return  # of a request that began before the ejection, or while all endpoints were ejected
        longer = max(FIRST_EJECTION_SECONDS, 2 * self._ejection_seconds)
        self._ejection_seconds = min(longer, LONGEST_EJECTION_SECONDS)
        self._ejected_at = now
        self.ejected_until = now + self._ejection_seconds
