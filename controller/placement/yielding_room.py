"""The room that benchmarks give up: which unit waits for it, and what is left of it in a round.

A benchmark ends within seconds once anything waits for its accelerator. So a unit that finds no free place waits for
that rather than for the end of others. One that finds a place on a slower device class does too: it would stay there.
"""

from typing import Final

from controller.placement.place_search import FoundPlace, PlaceSearch
from controller.placement.pool_limits import PoolLimits
from controller.placement.score import find_speed_step
from controller.placement.units import Amounts, Unit, add_room, fits, subtract_amounts

_MOST_PARTS: Final = 1
"""A gang waits until all of its pods find a free place: a benchmark gives way to it, too, but keeps no room for it."""


class YieldingRoom:
    """The room of benchmarks in one round; `search` has what is free."""

    def __init__(self, search: PlaceSearch, limits: PoolLimits) -> None:
        self._search, self._limits = search, limits
        self._left: dict[str, Amounts] = {name: cell.yielding for name, cell in search.cells.items() if cell.yielding}
        """By `Cell.id`, what benchmarks hold there and no unit waits for yet."""

    def find_better(self, unit: Unit, free: FoundPlace | None) -> str:
        """Return the `Cell.id` of a cell that is worth the end of a benchmark; empty if none is.

        Args:
            unit: the unit.
            free: the best place of those that are free; None: no place is.
        """
        if not self._left or len(unit.parts) > _MOST_PARTS:
            return ""
        free_cell = free.cells[0] if free is not None else ""
        free_pool = self._search.cells[free_cell].pool if free_cell else ""
        for pool in unit.pools:
            best = min(self._list_cells(unit, pool), key=lambda name: (self._rank(unit, name), name), default="")
            if pool == free_pool:
                return best if best and self._rank(unit, best) < self._rank(unit, free_cell) else ""
            if best:
                return best
        return ""

    def take(self, cell: str, need: Amounts) -> None:
        """Keep what is needed of a cell for a unit: first what a benchmark holds, then what is free."""
        held = self._left[cell]
        taken = {name: min(amount, held.get(name, 0)) for name, amount in need.items()}
        self._left[cell] = subtract_amounts(held, taken)
        self._search.take({cell: subtract_amounts(need, taken)})

    def list_left(self) -> dict[str, Amounts]:
        """Return what is left of the room of benchmarks, by `Cell.id`."""
        return dict(self._left)

    def _list_cells(self, unit: Unit, pool: str) -> list[str]:
        """Return the cells of a pool that have room for a unit once a benchmark has ended, and not before."""
        if pool in self._search.exhausted or self._limits.find_refusal(unit, pool) is not None:
            return []
        return [name for name in self._left if self._search.cells[name].pool == pool and self._has_room(unit, name)]

    def _has_room(self, unit: Unit, name: str) -> bool:
        cell, need, left = self._search.cells[name], unit.parts[0], self._search.left[name]
        room = add_room(left, self._left[name])
        return (
            not cell.closed
            and name not in unit.avoid
            and not unit.refuse(cell)
            and not fits(need, left)
            and fits(need, room)
            and fits(need, cell.total)
            and not self._search.is_closed_to(unit, name)
            and not self._search.is_promised(unit, need, name, room)
        )

    def _rank(self, unit: Unit, name: str) -> tuple[bool, int, int]:
        """Return the sort key of a cell by what outlasts the wait for it: the best has the least."""
        score = self._search.score(unit, name)
        return score.was_refused, score.siblings, -find_speed_step(unit, self._search.cells[name])
