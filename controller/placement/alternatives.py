"""Alternatives to a unit's cells: the best free cell of each device class, or why that class has none.

One cell of a class stands for all of them, so that the answer is short, and costs little however many cells there are.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from controller.placement.cell_index import CellChoice
from controller.placement.place_search import PlaceSearch
from controller.placement.score import CellScore
from controller.placement.units import Unit

MOST_ALTERNATIVES: Final = 3
NO_ROOM: Final = "NoRoom"


class Alternative(NamedTuple):
    """The best free cell of one device class, or why that class has none."""

    device_class: str
    cell: str = ""
    """`Cell.id` of the best cell of the class; empty if none is free."""
    score: CellScore | None = None
    refusal: str = ""
    """Why it is no place, as one CamelCase word; empty if it is one."""


def list_alternatives(search: PlaceSearch, unit: Unit, cells: Sequence[str]) -> tuple[Alternative, ...]:
    """Return the places that a unit might have had instead: one for each device class, for the status of its service.

    First the classes with a free cell besides the unit's own, the best first; then by name those without, each with the
    reason. The unit's own class is left out if it has no other free cell. At most MOST_ALTERNATIVES, and none for a
    gang.

    Args:
        search: the room before the unit takes the cells.
        unit: the unit.
        cells: `Cell.id` of the cells (nodes or hosts) that it gets.
    """
    if len(unit.parts) != 1:
        return ()

    # 1. Find the best free cell of each class. A class may be in several pools, full in one and free in another: then
    #    it is in both of these. `refusals` has one word by class: the service refuses it, or it is full.
    best_by_class: dict[str, CellChoice] = {}
    refusals: dict[str, str] = {}
    for pool in unit.pools:
        for device_class in search.list_device_classes(pool):
            refusal = unit.speeds.refuse(device_class)
            choice = None if refusal else search.find_free(unit, pool, device_class, cells)
            best = best_by_class.get(device_class)
            if choice is None:
                refusals[device_class] = refusal or NO_ROOM
            elif best is None or search.sort_key(unit, choice) < search.sort_key(unit, best):
                best_by_class[device_class] = choice

    # 2. Classes with a free cell come first, the best of them first.
    best_first = sorted(best_by_class.values(), key=lambda choice: search.sort_key(unit, choice))
    free = [
        Alternative(search.cells[choice.cell_id].device_class, choice.cell_id, search.score(unit, choice.cell_id))
        for choice in best_first
    ]

    # 3. The others follow by name. A class that is free in any pool is not listed as refused, nor is the unit's own.
    own_class = search.cells[cells[0]].device_class
    refused = [
        Alternative(device_class, refusal=refusal)
        for device_class, refusal in sorted(refusals.items())
        if device_class not in best_by_class and device_class != own_class
    ]
    return tuple(free + refused)[:MOST_ALTERNATIVES]
