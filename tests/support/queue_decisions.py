"""One round of the queue in a test, and its actions in words."""

from collections.abc import Iterable
from typing import Any

import msgspec

from controller.placement.actions import Action, Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.units import Amounts, Cell, Nomination, Unit, add_by_cell, subtract_amounts
from tests.support.queue_units import pod

NOW = 10_000.0
RULES = PlanRules()


def decide(cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules = RULES) -> Round:
    """Plan a round, with what the units hold subtracted from the cells."""
    everything = list(units)
    return plan([subtract_units(cell, everything) for cell in cells], everything, rules, NOW)


def subtract_units(cell: Cell, units: Iterable[Unit]) -> Cell:
    """Return a cell without the room that units hold."""
    free = cell.free
    for unit in units:
        free = subtract_amounts(free, add_by_cell(unit.parts, unit.cells).get(cell.id, {}))
    return msgspec.structs.replace(cell, free=free)


def say(made: Round) -> list[str]:
    """Return the actions of a round in words."""
    return [_say(action) for action in made.actions]


def _say(action: Action) -> str:
    match action:
        case Admit(unit, cells):
            return f"{unit.uid} gets {' '.join(cell.partition('/')[2] for cell in cells) or 'a new node'}"
        case Nominate(unit, nomination):
            names = " ".join(cell.partition("/")[2] for cell in nomination.cells)
            return f"{unit.uid} waits on {names} for {' '.join(sorted(nomination.victims))}"
        case WithdrawNomination(unit):
            return f"{unit.uid} waits for nothing"
        case EvictUnit(victim, preemptor):
            return f"{victim.uid} ends for {preemptor.uid}"


def runs(uid: str, need: int | Amounts, cell: str, **changes: Any) -> Unit:
    """Return a pod that runs on a node and is old enough to be evicted."""
    return pod(uid, need, cells=(f"node/{cell}",), **{"evictable_since": 0.0, **changes})


def nominated(unit: Unit, cell: str, *victims: str) -> Unit:
    """Return a unit that is nominated for a node."""
    return msgspec.structs.replace(unit, nomination=Nomination((f"node/{cell}",), frozenset(victims)))
