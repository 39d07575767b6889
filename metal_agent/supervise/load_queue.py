"""The load slot of a host: one engine loads at a time, by priority, since memory peaks and the disk are shared.

An engine holds the slot from its start to its first token. After a time limit the next engine gets it too: memory is
reserved for each, so a slow engine costs only time.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final, NamedTuple

SLOT_SECONDS: Final = 300.0
"""To read 100 GiB at 0.5 GB/s takes 3.5 minutes; a Mac's own disk is ten times as fast."""


class _Waiting(NamedTuple):
    rank: int
    arrival: int
    uid: str
    granted: asyncio.Event


class LoadQueue:
    """Engines that load and processes that wait for the slot, by uid of the MetalProcess."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a free slot that nothing waits for."""
        self._clock = clock
        self._load_starts: dict[str, float] = {}
        """Start time of each engine that loads; more than one if engines were adopted, or one exceeded its time."""
        self._waiting: list[_Waiting] = []
        self._arrival_numbers = itertools.count()
        """Numbers by which processes of the same rank get the slot in the order of their arrival."""

    @property
    def is_busy(self) -> bool:
        """True while an engine loads, or a process waits to load."""
        return bool(self._waiting) or self._busy_until() is not None

    def try_acquire(self, uid: str) -> bool:
        """Acquire the slot if it is free and no process waits for it, or if `uid` has it already; return success."""
        if uid not in self._load_starts and self.is_busy:
            return False
        self.occupy(uid)
        return True

    def occupy(self, uid: str) -> None:
        """Record that the engine of `uid` loads, whether or not the slot is free."""
        self._load_starts.setdefault(uid, self._clock())

    def release(self, uid: str) -> None:
        """Release the slot if `uid` has it."""
        if self._load_starts.pop(uid, None) is not None:
            self._grant_next()

    def rename(self, uid: str, successor: str) -> None:
        """Pass the slot to `successor` if `uid` has it."""
        if uid in self._load_starts:
            self._load_starts[successor] = self._load_starts.pop(uid)

    async def acquire(self, uid: str, rank: int) -> None:
        """Wait until `uid` has the slot: the lowest rank is first, then the first that came.

        It is granted when another engine releases it, or when the time limit of that engine is over, which has no
        event. A cancelled wait leaves the queue, and gives back a slot that was granted at this moment.
        """
        waiting = _Waiting(rank=rank, arrival=next(self._arrival_numbers), uid=uid, granted=asyncio.Event())
        self._waiting.append(waiting)
        try:
            while not waiting.granted.is_set():
                self._grant_next()  # if the slot is free: maybe to this one

                busy_until = self._busy_until()
                seconds = None if busy_until is None else max(0.0, busy_until - self._clock())
                try:
                    async with asyncio.timeout(seconds):
                        await waiting.granted.wait()
                except TimeoutError:
                    continue
        except asyncio.CancelledError:
            self.release(uid)  # if it was granted at this moment
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _busy_until(self) -> float | None:
        """Return when the slot is free at the latest; None if it is free now, as after an engine's time limit."""
        if not self._load_starts:
            return None
        # An engine that loads for longer than its time no longer keeps the slot: the latest start counts.
        until = max(self._load_starts.values()) + SLOT_SECONDS
        return until if until > self._clock() else None

    def _grant_next(self) -> None:
        """Give the slot, if it is free, to the first process of those that wait, by rank and arrival, and wake it."""
        if self._waiting and self._busy_until() is None:
            first = min(self._waiting, key=lambda waiting: (waiting.rank, waiting.arrival))
            self._waiting.remove(first)
            self.occupy(first.uid)  # notes the start of its time
            first.granted.set()
