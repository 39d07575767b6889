"""The costs of cells, as administrators state them in the annotation inference.pomona.dev/cost of a Node or MetalHost.

They may be of any unit, such as the price of an hour or watts: only their ratio to the highest one counts.
"""

import re
from collections.abc import Mapping
from typing import Final

from crds.meta import COST

_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def read_cost(annotations: Mapping[str, str]) -> float | None:
    """Return the cost that annotations state; None if they state none, or it is no decimal number."""
    return read_number(annotations.get(COST, ""))


def read_number(text: str) -> float | None:
    """Return a decimal number from 0; None for anything else."""
    return float(text) if _NUMBER.fullmatch(text) else None


class CellCosts:
    """The costs of all cells."""

    def __init__(self) -> None:
        """Start without any cost."""
        self._costs: dict[str, float] = {}  # by `Cell.id`
        self._highest = 0.0  # of all cells; 0 if none states a cost

    def put(self, cell: str, cost: float | None) -> bool:
        """Note the cost of a cell, None if it states none; return whether the highest cost of all cells has changed.

        Costs are shown as a share of the highest one, so then the costs of all cells have to be computed anew.
        """
        # 1. Note the cost of the cell.
        last = self._costs.pop(cell, None)
        if cost is not None:
            self._costs[cell] = cost
        if last == cost:
            return False

        # 2. Find the highest cost.
        previous_highest = self._highest
        if last == previous_highest:
            # The cell had the highest cost: all are searched for the next one.
            self._highest = max(self._costs.values(), default=0.0)
        elif cost is not None:
            self._highest = max(previous_highest, cost)
        return self._highest != previous_highest

    def remove(self, cell: str) -> bool:
        """Forget a cell that is gone; return whether the highest cost of all cells has changed."""
        return self.put(cell, None)

    def find_permille(self, cell: str) -> int | None:
        """Return the cost of a cell in thousandths of the highest one; None if none is stated, or all are 0."""
        cost = self._costs.get(cell)
        return round(1000 * cost / self._highest) if cost is not None and self._highest else None
