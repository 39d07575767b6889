"""Lets one engine load at a time, by priority: while weights are read, peaks overlap and the disk is shared.

From its start to its first token an engine has the turn. One that takes too long passes it on: its memory is reserved
anyway, so what is at stake is time.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final, NamedTuple

TURN_SECONDS: Final = 300.0
"""For reading 100 GiB at 0.5 GB/s it takes 3.5 minutes; a Mac's own disk is ten times as fast."""


class _Waiting(NamedTuple):
    rank: int
    number: int
    uid: str
    turn: asyncio.Event


class Loads:
    """Who loads, and who waits for it, by uid of the MetalProcess. Needs a running event loop to wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loading: dict[str, float] = {}
        """Since when, of the clock; several where engines were adopted, or a turn was passed on."""
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    def take(self, uid: str) -> bool:
        """Take the turn if nobody has it; whoever has it keeps it."""
        if uid not in self._loading and (self._busy_until() is not None or self._waiting):
            return False
        self.occupy(uid)
        return True

    def occupy(self, uid: str) -> None:
        """Count an engine that loads, whoever else does."""
        self._loading.setdefault(uid, self._clock())

    def leave(self, uid: str) -> None:
        """Give the turn back, if `uid` has it."""
        if self._loading.pop(uid, None) is not None:
            self._pass_on()

    def rename(self, uid: str, successor: str) -> None:
        """Count what loads as `uid`, if it does, as `successor` from now on."""
        if uid in self._loading:
            self._loading[successor] = self._loading.pop(uid)

    async def turn(self, uid: str, rank: int) -> None:
        """Wait for the turn and take it: the lowest rank first, then who came first."""
        waiting = _Waiting(rank, next(self._numbers), uid, asyncio.Event())
        self._waiting.append(waiting)
        try:
            while not waiting.turn.is_set():
                self._pass_on()
                until = self._busy_until()
                try:
                    async with asyncio.timeout(None if until is None else max(0.0, until - self._clock())):
                        await waiting.turn.wait()
                except TimeoutError:
                    continue
        except asyncio.CancelledError:
            self.leave(uid)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _busy_until(self) -> float | None:
        """Return when the last of those that load has had its time; None when that is so."""
        until = max(self._loading.values(), default=0.0) + TURN_SECONDS
        return until if self._loading and until > self._clock() else None

    def _pass_on(self) -> None:
        if self._waiting and self._busy_until() is None:
            chosen = min(self._waiting)
            self._waiting.remove(chosen)
            self.occupy(chosen.uid)
            chosen.turn.set()
