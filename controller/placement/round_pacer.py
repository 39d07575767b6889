"""The pace of the rounds: what happens together is decided together, and rounds that decide nothing take little time.

A round looks at all units, and most changes in a full cluster let nobody in. So each round that decides nothing has to
be made up for by a rest. A change that makes room waits for no rest but that of earlier rounds with new room, and only
if these came too often: the same holds for new units, which wait for the rest of both.
"""

import asyncio
import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from controller.placement.units import Cell, Unit
from controller.placement.wake_rules import RoomWatch

ROUND_SECONDS: Final = 0.1
"""Least time between the begin of two rounds."""
IDLE_SHARE: Final = 100.0
"""Rest for a round without a decision, as a multiple of its processor time: such rounds take at most a hundredth of a
core in the long run, whatever changes meanwhile."""
LONGEST_PAUSE_SECONDS: Final = 10.0
"""Longest time between two rounds while anything changes: the rest of a round over a thousand nodes and services."""
MOST_OWED_SECONDS: Final = 25.0
"""The most rest that is made up for."""


class RoundCause(enum.IntEnum):
    """Cause of a round. A round waits for the rest that rounds of its own and of higher causes owe."""

    END = 0
    """A unit is gone: it lets others in by its room alone, if at all."""
    UNIT = 1
    """A unit has come or changed: it may have room, or have another one evicted."""
    ROOM = 2
    """A cell has got room for a unit."""


CREDIT_SECONDS: Final[Mapping[RoundCause, float]] = MappingProxyType(
    {RoundCause.END: 0.0, RoundCause.UNIT: 5.0, RoundCause.ROOM: 15.0}
)
"""Rest that may still be owed when a round begins."""


class ProcessorMeter:
    """The processor time of the steps of a round, in whatever thread; time in which a step waits does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens within, which awaits nothing."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - started


class RoundPacer:
    """Tells when the next round may begin; all times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._began_at = self._ended_at = -math.inf
        self._rested_at = dict.fromkeys(RoundCause, -math.inf)
        """By cause: when the rest is over that rounds of it, or of a higher one, owe for deciding nothing."""

    def note_round(
        self, cause: RoundCause, began_at: float, ended_at: float, *, spent_seconds: float, has_decided: bool
    ) -> None:
        """Note a round that has ended; one without a decision must be made up for by a rest before the next one.

        The rest is a multiple of its processor time. It delays rounds of its own cause and of less urgent ones, which
        are lower values of RoundCause.

        Args:
            cause: the cause of the round.
            began_at: when it began.
            ended_at: when it ended.
            spent_seconds: processor time that it took.
            has_decided: it decided something, so no rest is due.
        """
        self._began_at, self._ended_at = began_at, ended_at
        if has_decided:
            return

        for round_cause in RoundCause:
            if round_cause <= cause:
                # What is left of earlier rests, and IDLE_SHARE times the processor time of this round.
                rest = max(0.0, self._rested_at[round_cause] - ended_at) + spent_seconds * IDLE_SHARE
                self._rested_at[round_cause] = ended_at + min(rest, MOST_OWED_SECONDS)

    def find_begin(self, cause: RoundCause) -> float:
        """Return when the next round may begin, if this is its cause; part of the rest may be owed by then."""
        rested_at = min(self._rested_at[cause] - CREDIT_SECONDS[cause], self._ended_at + LONGEST_PAUSE_SECONDS)
        return max(rested_at, self._began_at + ROUND_SECONDS)


class RoundTrigger:
    """Waits for the next round of a leader; all methods run in the event loop.

    Args:
        list_cells: returns all cells.
    """

    def __init__(self, list_cells: Callable[[], Sequence[Cell]]) -> None:
        """Start without a round that is due."""
        self._list_cells = list_cells
        self._changed = asyncio.Event()
        """Set when a round is requested, or a cell may have changed: `wait` wakes and looks."""
        self._due: RoundCause | None = None
        """The cause of the next round; None: none is due."""
        # They tell whether a cell has got room for a waiting unit, and when a round may begin.
        self._watch, self._pacer = RoomWatch(), RoundPacer()
        self._current_cause = RoundCause.END
        """The cause of the round that has begun."""
        self._began_at = -math.inf

    def restart(self) -> None:
        """Forget the earlier rounds, and plan one: another replica may have led since."""
        self._watch, self._pacer = RoomWatch(), RoundPacer()
        self.make_due(RoundCause.UNIT)

    def make_due(self, cause: RoundCause) -> None:
        """Request a round for this cause; one that is due for a higher cause stays."""
        self._raise_cause(cause)
        self._changed.set()

    def _raise_cause(self, cause: RoundCause) -> None:
        """Make a round due for this cause, unless one is due for a higher cause."""
        self._due = cause if self._due is None else max(cause, self._due)

    def note_cells(self) -> None:
        """Look at the cells soon: one of them may have changed."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until a round is due and may begin; note that it begins now, and why.

        A round is due because `make_due` has requested it, or because a cell has changed so that it matters to a unit
        that waits.
        """
        loop = asyncio.get_running_loop()
        while True:
            # 1. Sleep until something changes, or a due round may begin. If no round is due, there is no time limit.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._find_begin()):
                    await self._changed.wait()
            self._changed.clear()

            # 2. A round is due if a cell has got room for a waiting unit, or one is gone that it was promised.
            if self._watch.take_cells(self._list_cells()):
                self._raise_cause(RoundCause.ROOM)

            # 3. Begin a round that is due. `begin_at` is None: none is, as what has changed gives no unit room.
            begin_at, now = self._find_begin(), loop.time()
            if self._due is not None and begin_at is not None and begin_at <= now:
                self._current_cause, self._began_at, self._due = self._due, now, None
                return

            # 4. Else sleep a little, so that changes at once are taken together.
            await asyncio.sleep(ROUND_SECONDS if begin_at is None else min(ROUND_SECONDS, begin_at - now))

    def note_round(self, waiting: Iterable[Unit], *, spent_seconds: float, has_decided: bool) -> None:
        """Note the end of the current round, its processor time, and the units that waited in it."""
        self._watch.expect(waiting)
        now = asyncio.get_running_loop().time()
        self._pacer.note_round(
            self._current_cause, self._began_at, now, spent_seconds=spent_seconds, has_decided=has_decided
        )

    def _find_begin(self) -> float | None:
        """Return when the next round may begin; None: none is due."""
        return None if self._due is None else self._pacer.find_begin(self._due)
