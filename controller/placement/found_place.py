"""The words of the search for cells: the means by which a unit gets a cell, the place that was found, who is ahead."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from controller.placement.score import CellScore
from controller.placement.units import Amounts, Unit

RESERVED: Final = 1_000
"""Rank below all priorities: a cell that is closed down to it takes no unit at all."""
Means = Literal["free", "evict", "wait"]
"""free: the room that is left; evict: also that of units that end, or may be evicted now; wait: or may be later."""
_Need = tuple[tuple[str, int], ...]


class HeadOfLine(NamedTuple):
    """The blocked unit for which a cell is closed to units that come later in the queue."""

    rank: int
    """Units of this rank, and more important ones, may not pass."""
    head: Unit
    """The unit that waits for the cell."""

    def holds_back(self, unit: Unit) -> bool:
        """Return whether a unit may not pass: it could not be evicted again."""
        return unit.is_protected or unit.is_last or unit.rank <= self.rank


class FoundPlace(NamedTuple):
    """One cell for each part of a unit."""

    cells: tuple[str, ...]
    victims: tuple[Unit, ...] = ()
    scores: tuple[CellScore, ...] = ()
    wait_seconds: float = 0.0
    """Time until all victims may be evicted."""


class PlaceTrial:
    """The room of cells as it would be with the parts of a unit that have been given cells so far."""

    def __init__(self) -> None:
        """Start without any part; what a cell has left is noted once a part changes it."""
        self.left: dict[str, Amounts] = {}
        self.victims: dict[str, Unit] = {}


def need_key(need: Amounts) -> _Need:
    """Return a hashable key of a need: equal for needs with the same positive amounts."""
    return tuple(sorted(item for item in need.items() if item[1] > 0))


def order_parts(unit: Unit) -> Sequence[int]:
    """Return the numbers of the parts of a unit, the part with most devices first, then with most of the rest."""
    if len(unit.parts) == 1:
        return (0,)

    def order(number: int) -> tuple[int, int, int]:
        """Return the sort key of a part: most devices (their names have a slash) first, then most in all."""
        part = unit.parts[number]
        devices = sum(amount for name, amount in part.items() if "/" in name)
        return -devices, -sum(part.values()), number

    return sorted(range(len(unit.parts)), key=order)
