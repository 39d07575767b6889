"""The actions that a round of the queue decides on."""

from typing import NamedTuple

from controller.placement.alternatives import Alternative
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
