"""An index of the cells of one pool and one device class for one kind of need: the best is at hand without a search.

A unit has its own view of a few cells only: those with replicas of its service, with its weights, or that have refused
it. The planner scores these one by one. All others are the same to every unit of the same need, and a heap has them
in order. The cells that changed since the last look are evaluated anew.

A look at the victims of a cell takes long, so the heap begins with a bound for each cell: a key that the cell cannot
fall below. A cell is evaluated when its bound is the least of all. If its key is still the least then, no other is
better.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from controller.placement.units import Cell, Unit


class CellChoice(NamedTuple):
    """A cell on which a need fits, with the units that end for that."""

    cost: tuple[float, ...]
    """Sort key of what is evicted; empty if nothing is."""
    points: int
    """Points that the cell gives to all units of the same need."""
    leftover: int
    negated_bandwidth: int
    """Less is better, as of `leftover`."""
    cell_id: str
    victims: tuple[Unit, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key among cells that are alike to the unit: the best has the least."""
        return self.cost, -self.points, self.leftover, self.negated_bandwidth, self.cell_id


_Key = tuple[object, ...]


class CellIndex:
    """The cells on which a need fits now, best first."""

    def __init__(
        self,
        cells: Mapping[str, Cell],
        changes: list[str],
        bound: Callable[[str, Cell], CellChoice | None],
        evaluate: Callable[[str, Cell], CellChoice | None],
        likely: Iterable[str],
    ) -> None:
        """Find a bound for each cell.

        Args:
            cells: the cells that could run the need, by `Cell.id`.
            changes: the log of changed cells, by `Cell.id`, which grows.
            bound: return a choice that is at least as good as that of the cell, or None if there is certainly none.
            evaluate: return the choice of a cell, or None if the need does not fit there now.
            likely: the cells of which the need may fit on one.
        """
        self.cells = cells
        self._bound, self._evaluate, self._changes, self._seen_changes = bound, evaluate, changes, len(changes)
        self._choices: dict[str, CellChoice | None] = {}
        """By `Cell.id`, the choices that are evaluated already."""
        # The best conceivable key of each cell; a cell that certainly does not do has none.
        self._bounds = {name: choice.key for name in likely if (choice := bound(name, cells[name])) is not None}
        self._heap: list[_Key] = list(self._bounds.values())
        heapq.heapify(self._heap)

    def refresh(self) -> None:
        """Forget the choices of the cells that changed since the last call, and find a new bound for each."""
        for name in dict.fromkeys(self._changes[self._seen_changes :]):
            cell = self.cells.get(name)
            if cell is None:
                continue
            self._choices.pop(name, None)
            choice = self._bound(name, cell)
            if choice is None:
                self._bounds.pop(name, None)
            else:
                self._bounds[name] = choice.key
                heapq.heappush(self._heap, choice.key)
        self._seen_changes = len(self._changes)

    def find_choice(self, name: str) -> CellChoice | None:
        """Return the choice of one cell, or None if the need does not fit there now."""
        if name not in self._bounds:
            return None
        if name not in self._choices:
            self._choices[name] = self._evaluate(name, self.cells[name])
        return self._choices[name]

    def find_best(self, skipped: Container[str], is_closed: Callable[[str], bool]) -> CellChoice | None:
        """Return the best cell that is not skipped; closed ones leave the heap for good, skipped ones only this time.

        The least key of the heap is a bound, or outdated, or that of a choice. In the last case, no cell is better.
        """
        put_back: list[_Key] = []
        best: CellChoice | None = None
        while self._heap and best is None:
            key = heapq.heappop(self._heap)
            name = str(key[-1])  # `CellChoice.key` ends with the id of the cell
            if is_closed(name):
                continue
            if name in skipped:
                put_back.append(key)
                continue
            is_present_bound = self._bounds.get(name) == key
            choice = self.find_choice(name)
            if choice is None:
                continue
            if choice.key == key:
                put_back.append(key)
                best = choice
            elif is_present_bound:
                heapq.heappush(self._heap, choice.key)
        for key in put_back:
            heapq.heappush(self._heap, key)
        return best
