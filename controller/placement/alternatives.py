"""Alternatives to a unit's cells: the best free cell of each device class, or why that class has none.

One cell of a class stands for all of them, so that the answer is short, and costs little however many cells there are.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

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
    """Return, besides the cells that a unit gets, the best free cell of each device class, or why a class has none.

    Free cells come first, the best of them first; there are MOST_ALTERNATIVES at most, and none for a gang.

    Args:
        search: the room before the unit takes the cells.
        unit: the unit.
        cells: `Cell.id` of what it gets.
    """
    if len(unit.parts) != 1:
        return ()
    own_class = search.cells[cells[0]].device_class
    free, refused = [], dict[str, Alternative]()
    for pool in unit.pools:
        for device_class in search.list_device_classes(pool):
            refusal = unit.speeds.refuse(device_class)
            choice = None if refusal else search.find_free(unit, pool, device_class, cells)
            if choice is not None:
                score = search.score(unit, choice.cell_id)
                free.append((search.sort_key(unit, choice), Alternative(device_class, choice.cell_id, score)))
            elif device_class != own_class:
                refused[device_class] = Alternative(device_class, refusal=refusal or NO_ROOM)
    free.sort(key=lambda entry: entry[0])
    free_classes = {alternative.device_class for _, alternative in free}
    others = [alternative for name, alternative in sorted(refused.items()) if name not in free_classes]
    return tuple([alternative for _, alternative in free] + others)[:MOST_ALTERNATIVES]
