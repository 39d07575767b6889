"""Who is worked for and who waits: requests get the free places of a service, and a bounded line forms behind them.

The line is here and not in the engine, so that a client that hangs up leaves it at once, that it has an end, and that
whoever is refused is told when to come back.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Generic, TypeVar

_LONGEST_RETRY_SECONDS = 60
_NEWEST_WEIGHT = 0.2

P = TypeVar("P")


class RefusedError(Exception):
    """No turn for this request: `status` 429 when the line is full, 503 when nobody would serve it."""

    def __init__(self, status: HTTPStatus, retry_seconds: int) -> None:
        super().__init__(status.phrase)
        self.status = status
        self.retry_seconds = retry_seconds


class Turns(Generic[P]):
    """The requests of one service that have a place, and those that wait for one; first come, first served.

    Args:
        take: takes a free place; None when there is none.
        give: gives back what nobody came for.
        longest: how many may wait.
    """

    def __init__(self, take: Callable[[], P | None], give: Callable[[P], None], longest: int) -> None:
        self.longest = longest
        self.working = 0
        self._take = take
        self._give = give
        self._waiting: deque[asyncio.Future[P]] = deque()
        self._mean_seconds = 0.0

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def begin(self) -> P:
        """Return a place, sooner or later, which the caller gives back before it calls `end`. Raises RefusedError."""
        if not self._waiting and (place := self._take()) is not None:
            self.working += 1
            return place
        if len(self._waiting) >= self.longest:
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, self._retry_seconds())
        turn: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:  # called up in the very moment in which it left
                self._give(turn.result())
                self.working -= 1
                self.call_up()
            raise

    def end(self, seconds: float) -> None:
        """Count a turn that took `seconds` as over, and give what is free to those who wait."""
        self.working -= 1
        weight = _NEWEST_WEIGHT if self._mean_seconds else 1
        self._mean_seconds += weight * (seconds - self._mean_seconds)
        self.call_up()

    def call_up(self) -> None:
        """Give what is free now to those who wait."""
        while self._waiting:
            if self._waiting[0].done():  # hung up in this very moment
                self._waiting.popleft()
            elif (place := self._take()) is not None:
                self.working += 1
                self._waiting.popleft().set_result(place)
            else:
                return

    def dismiss(self) -> None:
        """Refuse all who wait: nobody is left who would serve them."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, 1))

    def _retry_seconds(self) -> int:
        """Estimate when one of those at work will have ended, from how long they took lately."""
        seconds = math.ceil(self._mean_seconds / max(1, self.working))
        return max(1, min(seconds, _LONGEST_RETRY_SECONDS))
