"""The answer to the question why a service waits: all cells, those first that are nearest to running its unit."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from controller.placement.actions import Admit, EvictUnit, Nominate
from controller.placement.explanation import CellExplanation, explain
from controller.placement.planner import PlanRules, plan
from controller.placement.refusals import find_refusal_of, largest_part
from controller.placement.units import Amounts, Cell, Unit


class WaitExplanation(NamedTuple):
    """The answer about one unit."""

    admitted: tuple[str, ...] = ()
    """`Cell.id` of the cells that the next round gives it; then it does not wait any longer."""
    victims: tuple[Unit, ...] = ()
    """Units that the next round evicts for it."""
    cells: tuple[CellExplanation, ...] = ()
    """One for each cell, the nearest first."""

    @property
    def best(self) -> CellExplanation | None:
        """The cell where least has to be done; None if nothing has to be, or nothing would help."""
        return next((cell for cell in self.cells if cell.remedy), None)


def explain_unit(
    unit: Unit, cells: Sequence[Cell], units: Iterable[Unit], rules: PlanRules, now: float
) -> WaitExplanation:
    """Plan one round, and explain for each cell why it does not run a unit that waits.

    Args:
        unit: the unit.
        cells: all cells.
        units: all units, also this one.
        rules: the administrator's rules.
        now: the wall clock, in seconds since 1970.
    """
    # 1. Decide about all units as the next round will, and look for what it decides about this one.
    made = plan(cells, units, rules, now)
    admitted = next(
        (action for action in made.actions if isinstance(action, Admit) and action.unit.uid == unit.uid), None
    )
    if admitted is not None:
        return WaitExplanation(admitted.cells)

    nominated = next(
        (action for action in made.actions if isinstance(action, Nominate) and action.unit.uid == unit.uid), None
    )
    if nominated is not None:
        unit = msgspec.structs.replace(unit, nomination=nominated.nomination)
    victims = [
        action.victim for action in made.actions if isinstance(action, EvictUnit) and action.preemptor.uid == unit.uid
    ]

    # 2. Explain each cell, and sort them: the nearest to running the unit first.
    left = {cell.id: made.left[cell.id] for cell in cells}
    explanations = explain(unit, cells, made, rules)
    explanations.sort(
        key=lambda explanation: (*_measure_distance(explanation, unit, left[explanation.cell]), explanation.cell)
    )
    return WaitExplanation((), tuple(victims), tuple(explanations))


def _measure_distance(explanation: CellExplanation, unit: Unit, left: Amounts) -> tuple[int, float, int]:
    """Return a sort key of how far a cell is from running a unit: the nearest cell first.

    It runs the unit next (0); has the room, so that something else stands in the way (1); lacks room (2), the less the
    nearer; or does not count at all (3). Equally near cells are ordered by the effort to end what stands in the way.

    Args:
        explanation: why the cell does not run the unit.
        unit: the unit.
        left: what the round left free on the cell.
    """
    # Of the scarcest resource, the share of the need that is not left; 0 or less: enough is left of each.
    need = largest_part(unit)
    lacking = max(
        (1 - max(0, left.get(name, amount)) / amount for name, amount in need.items() if amount > 0), default=0.0
    )

    refusal = find_refusal_of(explanation.refusal.reason)
    if refusal.meaning == "ready":  # it runs the unit next
        return 0, 0.0, 0
    if refusal.meaning == "elsewhere":  # too small in all, of another pool or kind
        return 3, float(refusal.effort), 0
    return (2 if lacking > 0 else 1), max(0.0, lacking), refusal.effort
