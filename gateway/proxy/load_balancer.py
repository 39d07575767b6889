"""Pick the backend for a request, and count the requests that each backend is answering.

Requests are counted by backend uid, apart from the configuration: a stream goes on after its backend has left the
configuration, and an agent that wants to stop that backend still needs the count.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from gateway.proxy.config import Backend
from gateway.proxy.token_lanes import ALONE, UNKNOWN


class InFlight:
    """The number of requests in flight, by backend uid; `on_end` is called with the uid when one has ended."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end  # its slot is free: a request that waits may get it
        self._counts: dict[str, int] = {}
        """The requests in flight by backend, those of an older proxy included; a backend without any has no entry."""
        self._idle_events: dict[str, asyncio.Event] = {}
        """By backend: set when its last request ends, for those that wait for it to become idle."""
        self._next_begin: asyncio.Event | None = None
        """Set with the next request to any backend; None: nothing waits for that."""
        self._last_ended_at: dict[str, float] = {}
        """By backend: the time at which its last request ended."""
        self._counts_elsewhere: Counter[str] = Counter()
        """The part of the counts that are of an older proxy, as `count_elsewhere` got them last."""
        self._reserved: Counter[str] = Counter()  # the tokens that running requests may use, by backend

    def counts(self) -> Mapping[str, int]:
        """Return the number of requests in flight by backend, without backends that have none."""
        return self._counts

    def find_reservation(self, backend: Backend, demand: int) -> int | None:
        """Return the tokens to reserve for a request, UNKNOWN in the long lane, 0 without lanes; None: it must wait."""
        if backend.shared_tokens is None:
            return 0
        # Of the requests of an older proxy, one may be in the long lane, and several may fill both lanes.
        used = self._reserved[backend.uid] + (0, UNKNOWN, ALONE)[min(self._counts_elsewhere[backend.uid], 2)]
        if used < ALONE and used % UNKNOWN + demand <= backend.shared_tokens:
            return demand
        is_long_lane_free = used < UNKNOWN if demand < ALONE else not used
        return max(demand, UNKNOWN) if is_long_lane_free else None

    def begin(self, uid: str, reserved: int = 0) -> None:
        """Count one more request to `uid`, and the tokens that it reserves."""
        if reserved:
            self._reserved[uid] += reserved
        if uid not in self._counts:
            self._counts[uid] = 0
        self._counts[uid] += 1
        if self._next_begin is not None:
            self._next_begin.set()
            self._next_begin = None

    def end(self, uid: str, reserved: int = 0) -> None:
        """Count one request to `uid` less, and the tokens that it has reserved."""
        if reserved:
            self._reserved[uid] -= reserved
        self._counts[uid] -= 1
        if self._counts[uid] == 0:
            del self._counts[uid], self._reserved[uid]
            self._last_ended_at[uid] = time.monotonic()
            if uid in self._idle_events:
                self._idle_events.pop(uid).set()
        self._on_end(uid)  # gives the free slot to a request that waits

    def count_elsewhere(self, counts: Mapping[str, int]) -> None:
        """Count the requests that another proxy has in flight to the same backends as if they were of this one.

        `counts` replaces those of the call before: the difference begins or ends as many requests.
        """
        before, self._counts_elsewhere = self._counts_elsewhere, Counter(counts)  # `end` admits by the new ones
        for uid in {*before, *counts}:
            # One of the two ranges is empty, because its difference is not positive.
            for _ in range(counts.get(uid, 0) - before[uid]):
                self.begin(uid)
            for _ in range(before[uid] - counts.get(uid, 0)):
                self.end(uid)

    def idle_seconds(self, uid: str) -> float | None:
        """Return the seconds since the last request to `uid` ended: 0 while one is in flight, None if none ever was."""
        if uid in self._counts:
            return 0.0
        last_ended_at = self._last_ended_at.get(uid)
        return None if last_ended_at is None else time.monotonic() - last_ended_at

    def forget_others(self, uids: Collection[str]) -> None:
        """Forget when the last request of each backend ended, except for the backends in `uids`."""
        self._last_ended_at = {uid: ended for uid, ended in self._last_ended_at.items() if uid in uids}

    async def wait_idle(self, uid: str) -> None:
        """Wait until `uid` has no request in flight; return at once if it never had one."""
        if uid in self._counts:
            await self._idle_events.setdefault(uid, asyncio.Event()).wait()

    async def wait_busy(self) -> None:
        """Wait until any backend gets a request; return at once if one is in flight."""
        if not self._counts:
            self._next_begin = self._next_begin or asyncio.Event()
            await self._next_begin.wait()


def pick_backend(
    backends: Iterable[Backend], in_flight: Mapping[str, int], tried: Collection[str] = (), *, only_free: bool = False
) -> Backend | None:
    """Return the backend with the fewest requests in flight, the first of equals; None if no backend is eligible.

    A backend that is draining, asleep or in `tried` is not eligible; with `only_free`, it has to have a free slot.
    """
    picked = None
    fewest = math.inf
    for backend in backends:
        if backend.draining or backend.asleep or backend.uid in tried:
            continue

        # A backend without a stated concurrency always has a free slot.
        requests = in_flight.get(backend.uid, 0)
        if only_free and backend.concurrency and requests >= backend.concurrency:
            continue

        if requests < fewest:
            picked, fewest = backend, requests
    return picked
