"""The pace of the rounds: what happens together is decided together, and rounds that decide nothing take little time.

A round looks at all units, and most changes in a full cluster let nobody in. So each round that decides nothing has to
be made up for by a rest. A change that makes room, or a unit that is new, does not wait for that unless many such
rounds came before it.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from controller.placement.units import Cell, Unit
from controller.placement.wake_rules import RoomWatch

ROUND_SECONDS: Final = 0.1
"""Least time between the begin of two rounds."""
IDLE_SHARE: Final = 50.0
"""Rest for a round without a decision, as a multiple of its duration: such rounds take at most a fiftieth of a core in
the long run, whatever changes meanwhile."""
LONGEST_PAUSE_SECONDS: Final = 5.0
"""Longest time between two rounds while anything changes."""
MOST_OWED_SECONDS: Final = 20.0
"""The most rest that is made up for."""
NO_CREDIT: Final = 0.0
UNIT_CREDIT_SECONDS: Final = 5.0
"""Rest that may still be owed when units have come or changed: one may have room, or have another one evicted."""
ROOM_CREDIT_SECONDS: Final = 15.0
"""The same when a cell has got room for one: units that come for nothing do not delay those that are given room."""


class RoundPacer:
    """Tells when the next round may begin; all times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._began_at = self._ended_at = -math.inf
        self._rested_at = -math.inf
        """When all rest that rounds without a decision owe is made up for."""

    def note_round(self, began_at: float, ended_at: float, *, has_decided: bool) -> None:
        """Take a round that has ended."""
        self._began_at, self._ended_at = began_at, ended_at
        if not has_decided:
            rest = max(0.0, self._rested_at - ended_at) + (ended_at - began_at) * IDLE_SHARE
            self._rested_at = ended_at + min(rest, MOST_OWED_SECONDS)

    def find_begin(self, credit_seconds: float) -> float:
        """Return when the next round may begin, if so much rest may still be owed then."""
        rested_at = min(self._rested_at - credit_seconds, self._ended_at + LONGEST_PAUSE_SECONDS)
        return max(rested_at, self._began_at + ROUND_SECONDS)


class RoundTrigger:
    """Waits for the next round of a leader; all methods run in the event loop.

    Args:
        list_cells: returns all cells.
    """

    def __init__(self, list_cells: Callable[[], Sequence[Cell]]) -> None:
        self._list_cells = list_cells
        self._changed = asyncio.Event()
        self._credit_seconds: float | None = None
        """Rest that may still be owed when the next round begins; None: none is due."""
        self._watch, self._pacer = RoomWatch(), RoundPacer()
        self._began_at = -math.inf

    def restart(self) -> None:
        """Forget the earlier rounds, and plan one: another replica may have led since."""
        self._watch, self._pacer = RoomWatch(), RoundPacer()
        self.make_due(UNIT_CREDIT_SECONDS)

    def make_due(self, credit_seconds: float) -> None:
        """Plan a round, before which so much rest may still be owed."""
        self._raise_credit(credit_seconds)
        self._changed.set()

    def _raise_credit(self, credit_seconds: float) -> None:
        self._credit_seconds = max(credit_seconds, self._credit_seconds or NO_CREDIT)

    def note_cells(self) -> None:
        """Look at the cells soon: one of them may have changed."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait for a change that is planned, and until it may be; then the round begins."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._find_begin()):
                    await self._changed.wait()
            self._changed.clear()
            if self._watch.take_cells(self._list_cells()):
                self._raise_credit(ROOM_CREDIT_SECONDS)
            begin_at, now = self._find_begin(), loop.time()
            if begin_at is not None and begin_at <= now:
                self._credit_seconds, self._began_at = None, now
                return
            await asyncio.sleep(ROUND_SECONDS if begin_at is None else min(ROUND_SECONDS, begin_at - now))

    def note_round(self, waiting: Iterable[Unit], *, has_decided: bool) -> None:
        """Take the end of the round, and the units that wait after it."""
        self._watch.expect(waiting)
        self._pacer.note_round(self._began_at, asyncio.get_running_loop().time(), has_decided=has_decided)

    def _find_begin(self) -> float | None:
        """Return when the next round may begin; None: none is due."""
        return None if self._credit_seconds is None else self._pacer.find_begin(self._credit_seconds)
