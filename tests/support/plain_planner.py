"""The plain form of the planner, which decides alike: it looks at each cell for each unit, and remembers nothing."""

from collections.abc import Iterable

from controller.placement.cell_index import CellChoice
from controller.placement.found_place import Means, PlaceTrial
from controller.placement.place_search import PlaceSearch
from controller.placement.planner import Planning, PlanRules, Round
from controller.placement.units import Amounts, Cell, Unit


class PlainSearch(PlaceSearch):
    """A search without an index."""

    def list_roomy(self, unit: Unit, need: Amounts, pool: str) -> Iterable[str]:
        """Return all cells that could ever have room."""
        return self.list_feasible(unit, need, pool)

    def pick_cell(self, unit: Unit, need: Amounts, pool: str, means: Means, trial: PlaceTrial) -> CellChoice | None:
        """Return the best cell of a pool after a look at each."""
        choices = [
            self.evaluate(unit, need, name, means, free=trial.left.get(name, self.left[name]), chosen=trial.victims)
            for name, cell in self.cells.items()
            if cell.pool == pool
            and not cell.closed
            and cell.id not in unit.avoid
            and not unit.refuse(cell)
            and all(amount <= cell.total.get(name, amount if "/" not in name else 0) for name, amount in need.items())
            and not self.is_closed_to(unit, cell.id)
        ]
        return min(
            (choice for choice in choices if choice is not None),
            key=lambda choice: self.sort_key(unit, choice),
            default=None,
        )


class PlainPlanning(Planning):
    """A planning that looks for a place for each unit, also if one like it found none."""

    def build_search(self, cells: Iterable[Cell]) -> PlaceSearch:
        """Return the plain search."""
        return PlainSearch(cells, self._candidates, self._limits)

    def is_hopeless(self, unit: Unit, shape: int) -> bool:
        """Return whether a unit is like one that found no place, after a search for one."""
        hopeless = super().is_hopeless(unit, shape)
        place = self._search.find_place(unit, "evict") if hopeless else None
        # What an owner leaves of the room of another one, units that borrow may use: some of them only a round later.
        evicted = {candidate.uid for candidate in self._candidates.list_evicted()}
        is_left = place is not None and any(victim.uid in evicted for victim in place.victims)
        assert place is None or is_left, f"there is a place for {unit.key}"
        return hopeless


def plan_plainly(cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> Round:
    """Decide one round."""
    return PlainPlanning(cells, units, rules, now).run()
