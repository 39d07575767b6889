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
    """The cells on which a need fits now, best first.

    The heap has a key for each cell: first its bound, which is cheap to compute and never worse than the cell, then the
    key of its evaluated choice. Keys of cells that have changed stay in the heap and are recognised as outdated.
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        changed_cells: list[str],
        bound: Callable[[str, Cell], CellChoice | None],
        evaluate: Callable[[str, Cell], CellChoice | None],
        likely: Iterable[str],
    ) -> None:
        """Compute a bound for each cell on which the need may fit, and put these into the heap.

        Args:
            cells: the cells that could run the need, by `Cell.id`.
            changed_cells: the shared log of cells that have changed, by `Cell.id`; it grows, and `refresh` reads on in
                it.
            bound: returns a choice that is at least as good as that of the cell, or None if there is certainly none.
            evaluate: returns the choice of a cell, or None if the need does not fit there now.
            likely: the cells of `cells` on which the need may fit; the others get a bound only once they change.
        """
        self.cells = cells
        self._bound, self._evaluate = bound, evaluate
        # `_seen_changes`: the number of entries of the log that `refresh` has taken in.
        self._changed_cells, self._seen_changes = changed_cells, len(changed_cells)

        # A key is a `CellChoice.key`: the better the cell, the less. By `Cell.id` there are:
        # 1. The choices that are evaluated already; None: the need does not fit there.
        self._choices: dict[str, CellChoice | None] = {}
        # 2. The best conceivable key of each cell; a cell that certainly does not do has none.
        self._bounds = {name: choice.key for name in likely if (choice := bound(name, cells[name])) is not None}

        # Keys of cells, the least first: of each its bound or its real key. A key ends with the id of the cell.
        self._heap: list[_Key] = list(self._bounds.values())
        heapq.heapify(self._heap)

    def refresh(self) -> None:
        """Forget what is known of the cells that have changed since the last call, and put new bounds into the heap."""
        for name in dict.fromkeys(self._changed_cells[self._seen_changes :]):
            cell = self.cells.get(name)
            if cell is None:
                continue  # a cell of another index, or one that is closed or could not run the need

            self._choices.pop(name, None)
            choice = self._bound(name, cell)
            if choice is None:
                self._bounds.pop(name, None)
            else:
                self._bounds[name] = choice.key
                heapq.heappush(self._heap, choice.key)
        self._seen_changes = len(self._changed_cells)

    def find_choice(self, name: str) -> CellChoice | None:
        """Return the choice of one cell, or None if the need does not fit there now."""
        if name not in self._bounds:
            return None
        if name not in self._choices:
            self._choices[name] = self._evaluate(name, self.cells[name])
        return self._choices[name]

    def find_best(self, skipped: Container[str], is_closed: Callable[[str], bool]) -> CellChoice | None:
        """Return the best cell (node or host) that is not skipped or closed; None if the need fits on none of these.

        The least key of the heap is taken until it is that of an evaluated choice: no other cell is better then, since
        each bound is at least as good as its cell. A bound is replaced by the key of the evaluated choice; an outdated
        key is dropped.

        Args:
            skipped: cells that this unit may not have; they stay in the heap for others.
            is_closed: returns whether a cell is closed to all units of this need for the rest of the round; such a cell
                leaves the heap for good.
        """
        put_back: list[_Key] = []
        best: CellChoice | None = None
        while self._heap and best is None:
            # 1. Take the cell with the least key.
            key = heapq.heappop(self._heap)
            name = str(key[-1])  # `CellChoice.key` ends with the id of the cell
            if is_closed(name):
                continue
            if name in skipped:
                put_back.append(key)
                continue

            # 2. Evaluate the cell.
            is_present_bound = self._bounds.get(name) == key  # else it is the key of a choice, or outdated
            choice = self.find_choice(name)
            if choice is None:
                continue

            # 3. It is the best if this is its real key. A bound is replaced by the real key; any other key is outdated.
            if choice.key == key:
                put_back.append(key)
                best = choice
            elif is_present_bound:
                heapq.heappush(self._heap, choice.key)

        for key in put_back:
            heapq.heappush(self._heap, key)
        return best
