"""The score of a cell for a unit, with its reasons: of the cells on which a unit fits, the best gets it."""

from typing import NamedTuple

from controller.placement.units import MEMORY, Amounts, Cell, Unit
from crds.size import size_text


class CellScore(NamedTuple):
    """The score of one cell; its parts are in the order in which they decide."""

    was_refused: bool
    """The API server has refused the unit for this cell before."""
    siblings: int
    """Replicas of the same service there: they are spread."""
    lacks_weights: bool | None
    """The weights must be fetched first; None: it is not known where they are."""
    leftover: int
    """Devices that a node has left afterwards, of which fewer are better, so that large units find whole nodes; on a
    host the memory in use, since models on one host share its bandwidth."""
    bandwidth_bytes_per_second: int
    """Memory bandwidth; 0 if it is unknown."""
    is_host: bool = False

    def explain(self) -> str:
        """Return the reasons in words, in the order in which they decide."""
        left = size_text(-self.leftover) if self.is_host else f"{self.leftover} device{'s' * (self.leftover != 1)}"
        parts = [
            "refused there before" if self.was_refused else "",
            f"{self.siblings or 'no'} replica{'s' * (self.siblings > 1)} of the service there",
            "" if self.lacks_weights is None else "weights to fetch" if self.lacks_weights else "weights there",
            f"{left} left",
            f"{self.bandwidth_bytes_per_second / 1e9:.0f} GB/s" if self.bandwidth_bytes_per_second else "",
        ]
        return ", ".join(filter(None, parts))


def score_cell(unit: Unit, need: Amounts, cell: Cell, free: Amounts, siblings: int) -> CellScore:
    """Return the score of a cell on which a part of a unit fits.

    Args:
        unit: the unit.
        need: what the part needs.
        cell: the cell.
        free: what is left of it.
        siblings: replicas of the same service there.
    """
    return CellScore(
        was_refused=cell.id in unit.refused_by,
        siblings=siblings,
        lacks_weights=unit.weights not in cell.weights if unit.weights and cell.weights else None,
        leftover=count_leftover(need, cell, free),
        bandwidth_bytes_per_second=cell.bandwidth_bytes_per_second,
        is_host=cell.kind == "host",
    )


def count_leftover(need: Amounts, cell: Cell, free: Amounts) -> int:
    """Return the leftover of a score."""
    if cell.kind == "host":
        return need.get(MEMORY, 0) - free.get(MEMORY, 0)
    return sum([free.get(name, 0) - amount for name, amount in need.items() if "/" in name])
