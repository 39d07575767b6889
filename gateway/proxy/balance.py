"""Which backend answers, and how many requests each one is answering.

Requests are counted by backend uid, apart from the configuration: a stream goes on when its backend has left the
configuration, and whoever wants to stop that backend still has to know.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from gateway.proxy.config import Backend


class InFlight:
    """The requests being answered, by backend uid."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._idle: dict[str, asyncio.Event] = {}

    def counts(self) -> Mapping[str, int]:
        """Return the uids that answer something now, and how many requests each."""
        return self._counts

    @contextmanager
    def request(self, uid: str) -> Iterator[None]:
        """Count one request to `uid` while the context lasts."""
        if uid not in self._counts:
            self._counts[uid] = 0
            self._idle[uid] = asyncio.Event()
        self._counts[uid] += 1
        try:
            yield
        finally:
            self._counts[uid] -= 1
            if self._counts[uid] == 0:
                del self._counts[uid]
                self._idle.pop(uid).set()

    async def wait_idle(self, uid: str) -> None:
        """Return when `uid` answers nothing; at once if it never did."""
        if uid in self._idle:
            await self._idle[uid].wait()


def choose(backends: Iterable[Backend], in_flight: Mapping[str, int], tried: Collection[str]) -> Backend | None:
    """Pick the backend with the fewest requests in flight, the first of equals; none that drains or was tried."""
    open_ones = [backend for backend in backends if not backend.draining and backend.uid not in tried]
    return min(open_ones, key=lambda backend: in_flight.get(backend.uid, 0), default=None)
