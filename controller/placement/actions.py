"""The actions that a round of the queue decides on, and the reason why it decides on none for a unit."""

from typing import NamedTuple

from controller.placement.alternatives import Alternative
from controller.placement.pool_limits import LimitRefusal
from controller.placement.score import CellScore
from controller.placement.units import Nomination, Unit


class Admit(NamedTuple):
    """Give these cells to a unit; none: its pods go unpinned, so that an autoscaler adds a node."""

    unit: Unit
    cells: tuple[str, ...]
    scores: tuple[CellScore, ...] = ()
    node_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the nodes on which an unpinned pod may be: those of the pool to which a node is added."""
    others: tuple[Alternative, ...] = ()
    """The best other places, for those who ask why it is not there."""


class Nominate(NamedTuple):
    """Promise cells to a unit until its victims have ended."""

    unit: Unit
    nomination: Nomination


class WithdrawNomination(NamedTuple):
    """Take the nomination of a unit back: its cell has no room for it any more, or none is needed."""

    unit: Unit


class EvictUnit(NamedTuple):
    """End a unit, which then waits at its old place."""

    victim: Unit
    preemptor: Unit


Action = Admit | Nominate | WithdrawNomination | EvictUnit


class Blockage(NamedTuple):
    """The reason why a unit waits."""

    feasible: int
    """Cells that have enough in all, and whose rules the unit meets; 0: no such hardware exists."""
    is_shadowed: bool
    """A unit ahead of it waits for the only cells on which it would fit."""
    limits: tuple[LimitRefusal, ...] = ()
    """The limits that keep it out of some of its pools."""
    limit: LimitRefusal | None = None
    """That of them for which it waits; None: room would not be there without them either."""
    exceeds_limits: bool = False
    """In each pool that could run it, a limit allows less than it needs."""
    priority_helps: bool = True
    """A higher priority might make room."""

    @property
    def can_start(self) -> bool:
        """Return whether the unit can start without a change of hardware, limits or its needs."""
        return self.feasible > 0 and not self.exceeds_limits
