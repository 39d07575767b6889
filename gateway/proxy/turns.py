"""Who is worked for and who waits: at most so many requests of a service at once, and a bounded line behind them.

The line is here and not in the engine, so that a client that hangs up leaves it at once, that it has an end, and that
whoever is refused is told when to come back.
"""

import asyncio
import math
from collections import deque
from http import HTTPStatus

_LONGEST_RETRY_SECONDS = 60
_NEWEST_WEIGHT = 0.2


class RefusedError(Exception):
    """No turn for this request: `status` 429 when the line is full, 503 when nobody would serve it."""

    def __init__(self, status: HTTPStatus, retry_seconds: int) -> None:
        super().__init__(status.phrase)
        self.status = status
        self.retry_seconds = retry_seconds


class Turns:
    """The requests of one service that are worked on, and those that wait; first come, first served."""

    def __init__(self, concurrency: int | None, queue: int) -> None:
        self._concurrency = concurrency
        self._queue = queue
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_seconds = 0.0
        self.working = 0

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def limit(self, concurrency: int | None, queue: int) -> None:
        """Hold to other limits from now on; who waits already keeps its place."""
        self._concurrency = concurrency
        self._queue = queue
        self._call_up()

    async def begin(self) -> None:
        """Wait for a turn, which `end` gives back. Raises RefusedError; cancelled, it leaves the line."""
        if self._has_room() and not self._waiting:
            self.working += 1
            return
        if len(self._waiting) >= self._queue:
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, self.retry_seconds())
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():  # called up in the very moment in which it left
                self.end(0)
            raise

    def end(self, seconds: float) -> None:
        """Give a turn back that took `seconds`; 0 says nothing about how long they take."""
        self.working -= 1
        if seconds:
            weight = _NEWEST_WEIGHT if self._mean_seconds else 1
            self._mean_seconds += weight * (seconds - self._mean_seconds)
        self._call_up()

    def dismiss(self) -> None:
        """Refuse all who wait: nobody is left who would serve them."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, 1))

    def retry_seconds(self) -> int:
        """Estimate when one of those at work will have ended, from how long they took lately."""
        seconds = math.ceil(self._mean_seconds / (self._concurrency or 1))
        return max(1, min(seconds, _LONGEST_RETRY_SECONDS))

    def _has_room(self) -> bool:
        return self._concurrency is None or self.working < self._concurrency

    def _call_up(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.done():
                self.working += 1
                turn.set_result(None)
