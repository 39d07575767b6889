"""Which backend answers, and how many requests each one is answering.

Requests are counted by backend uid, apart from the configuration: a stream goes on when its backend has left the
configuration, and whoever wants to stop that backend still has to know.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping

from gateway.proxy.config import Backend


class InFlight:
    """The requests being answered, by backend uid."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._idle: dict[str, asyncio.Event] = {}
        self._ended: dict[str, float] = {}

    def counts(self) -> Mapping[str, int]:
        """Return the uids that answer something now, and how many requests each."""
        return self._counts

    def begin(self, uid: str) -> None:
        """Count one more request to `uid`."""
        if uid not in self._counts:
            self._counts[uid] = 0
            self._idle[uid] = asyncio.Event()
        self._counts[uid] += 1

    def end(self, uid: str) -> None:
        """Count one request to `uid` less."""
        self._counts[uid] -= 1
        if self._counts[uid] == 0:
            del self._counts[uid]
            self._ended[uid] = time.monotonic()
            self._idle.pop(uid).set()

    def idle_seconds(self, uid: str) -> float | None:
        """Return how long `uid` has answered nothing: 0 while it does, None when it never did."""
        if uid in self._counts:
            return 0.0
        return time.monotonic() - self._ended[uid] if uid in self._ended else None

    def keep(self, uids: Collection[str]) -> None:
        """Forget when the others ended their last request."""
        self._ended = {uid: ended for uid, ended in self._ended.items() if uid in uids}

    async def wait_idle(self, uid: str) -> None:
        """Return when `uid` answers nothing; at once if it never did."""
        if uid in self._idle:
            await self._idle[uid].wait()


def choose(
    backends: Iterable[Backend], in_flight: Mapping[str, int], tried: Collection[str] = (), *, free: bool = False
) -> Backend | None:
    """Pick the backend with the fewest requests in flight, the first of equals; none that drains or was tried.

    With `free`, none either that has as many requests as it works on at once.
    """
    eligible = [
        backend
        for backend in backends
        if not backend.draining
        and backend.uid not in tried
        and not (free and backend.concurrency and in_flight.get(backend.uid, 0) >= backend.concurrency)
    ]
    return min(eligible, key=lambda backend: in_flight.get(backend.uid, 0), default=None)
