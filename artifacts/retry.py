"""Patience of a download: its time-outs, its number of attempts, their repetition, and its connections at once."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from artifacts.errors import ArtifactError, Reason
from crds.size import size_text
from kube.backoff import BELOW, backoff_seconds

T = TypeVar("T")

_WORTH_ANOTHER_TRY: frozenset[Reason] = frozenset({"SourceUnreachable", "SourceChanged", "ChecksumMismatch"})


@dataclasses.dataclass(frozen=True)
class Patience:
    """Bounds on waiting.

    Attributes:
        connect_seconds: limit for a connection, including name resolution and TLS.
        silence_seconds: limit between two bytes of an answer.
        least_bytes_per_second: speed below which an answer counts as silent, over `silence_seconds`.
        attempts: number of requests in a row that may fail without progress.
        first_pause_seconds: pause after the first failure; it doubles with each up to `longest_pause_seconds`.
        connections: most that are open at once to one origin; hubs limit the speed of each.
        progress_bytes: bytes beyond the furthest position so far that count as progress and reset the failure count.

    """

    connect_seconds: float = 30.0
    silence_seconds: float = 60.0
    least_bytes_per_second: int = 16 << 10
    attempts: int = 5
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0
    connections: int = 8
    progress_bytes: int = 1 << 20


DEFAULT_PATIENCE = Patience()
SHORT_PATIENCE = Patience(connect_seconds=3.0, silence_seconds=10.0, attempts=1)
"""Patience with a server that can be done without: nobody offline waits long for weights that are stored."""


class Backoff:
    """Counter of failures in a row, up to the limits of `patience`.

    Only a new furthest position counts as progress, so that no server can keep a download running for ever.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._failures = 0
        self._furthest = 0

    def pause_or_raise(self, error: ArtifactError, position: int = 0) -> float:
        """Return the seconds to wait before the next attempt, or raise `error` again if there must be none.

        Args:
            error: failure of the attempt.
            position: how far this attempt got, in bytes from the start of the file.

        Raises:
            ArtifactError: `error` itself, when it is permanent, ends the last attempt that `patience` allows, or comes
                from a server that asks for a longer pause.

        """
        # Count the failures of this series. Enough progress beyond `_furthest`, the position of the best attempt so
        # far, begins a new series.
        if position >= self._furthest + self._patience.progress_bytes:
            self._furthest = position
            self._failures = 0
        self._failures += 1

        # Give up: no attempt helps, this was the last one, or the server asks for too long a pause.
        if not error.retryable or error.reason not in _WORTH_ANOTHER_TRY or self._failures >= self._patience.attempts:
            raise error
        if error.retry_after_seconds > self._patience.longest_pause_seconds:
            raise error

        # Doubled with each failure, then shortened at random by up to a half (BELOW).
        pause_seconds = backoff_seconds(
            self._failures,
            first=self._patience.first_pause_seconds,
            most=self._patience.longest_pause_seconds,
            jitter=BELOW,
        )
        return max(pause_seconds, error.retry_after_seconds)


class Connections:
    """The connections of a download, for all of its files: how many are open, and the least speed of all together."""

    def __init__(self, patience: Patience, source: str) -> None:
        self.patience, self._source = patience, source
        self.limit = patience.connections
        self._open = 0
        self._freed = asyncio.Event()
        self._since, self._bytes, self._idle_since = 0.0, 0, 0.0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Wait until one more may be open; halve the limit when the origin answers that it is overloaded."""
        while self._open >= self.limit:
            self._freed.clear()
            await self._freed.wait()
        if not self._open and self._since:  # time without a connection counts for nobody
            self._since += time.monotonic() - self._idle_since
        self._open += 1
        limit = self.limit
        try:
            yield
        except ArtifactError as error:
            if error.is_overload and self._open > 1:  # answers to requests of the same limit lower it once
                self.limit = min(self.limit, max(1, limit // 2))
            if self._open == 1:  # this failure counts by itself
                self._since, self._bytes = 0.0, 0
            raise
        finally:
            self._open -= 1
            self._idle_since = time.monotonic()
            self._freed.set()

    async def wait_for_others(self) -> bool:
        """Wait until one of the open connections is closed; return False if none is open."""
        if not self._open:
            return False
        self._freed.clear()
        await self._freed.wait()
        return True

    def count_bytes(self, number: int) -> None:
        """Count bytes that have arrived. Raises ArtifactError if they came too slowly over `silence_seconds`."""
        # _bytes: those that have come since the time _since, when the period began; the first with the first bytes.
        self._since = self._since or time.monotonic()
        self._bytes += number
        seconds = time.monotonic() - self._since
        if seconds < self.patience.silence_seconds:
            return
        least = self.patience.least_bytes_per_second
        if self._bytes < least * seconds:
            raise ArtifactError(
                "SourceUnreachable",
                f"{self._source}: the server sent {size_text(self._bytes)} in {seconds:.0f} s, less than "
                f"{size_text(least)} per second",
                retryable=True,
            )
        self._since, self._bytes = time.monotonic(), 0


async def retry_read(read: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Return the result of `read`, which is repeated after failures that may pass, as often as `patience` allows.

    Raises:
        ArtifactError: that of the last attempt.
    """
    backoff = Backoff(patience)
    while True:
        try:
            return await read()
        except ArtifactError as error:
            pause = backoff.pause_or_raise(error)
        await asyncio.sleep(pause)
