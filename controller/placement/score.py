"""The score of a cell for a unit, with its reasons: of the cells on which a unit fits, the best gets it.

A cell to which the API server has refused the unit comes last, and replicas of a service are spread. Then the points
decide, of which the five weights say how much each criterion counts. What the points leave open is decided by what is
left there, by bandwidth, and by name.
"""

from typing import Final, NamedTuple

from controller.placement.cell_index import CellChoice
from controller.placement.units import MEMORY, MOST_STEPS, Amounts, Cell, Unit
from crds.rate import format_rate
from crds.size import size_text

SPEED_POINTS: Final = 60
WEIGHTS_POINTS: Final = 16
PACKING_POINTS: Final = 14
UTILIZATION_POINTS: Final = 5
COST_POINTS: Final = 5
"""The most points that each criterion gives: 100 in all. To have the weights counts more than any packing."""
_UNKNOWN_STEP: Final = 3
"""Step of a class of unknown speed: after all that are at most three times as slow as the fastest."""
_PACKED_BYTES: Final = 64 << 30
"""Free memory of a host that gives half of the points for packing."""


class CellScore(NamedTuple):
    """The score of one cell; its parts are in the order in which they decide."""

    was_refused: bool
    """The API server has refused the unit for this cell before."""
    siblings: int
    """Replicas of the same service there: they are spread."""
    points: int
    """Points of all five criteria, from 0 to 100."""
    tokens_per_second: float | None
    """Speed of the unit there, measured or estimated; None: unknown."""
    lacks_weights: bool | None
    """The weights must be fetched first; None: it is not known where they are."""
    leftover: int
    """Devices that a node has left afterwards, of which fewer are better, so that large units find whole nodes; on a
    host the memory in use, since models on one host share its bandwidth."""
    utilization_percent: int | None
    """Utilization of the devices; None: unknown."""
    cost_permille: int | None
    """Cost, of that of the most expensive cell; None: unknown."""
    bandwidth_bytes_per_second: int
    """Memory bandwidth; 0 if it is unknown."""
    is_host: bool = False

    def explain(self) -> str:
        """Return the reasons in words, in the order in which they decide."""
        # On a host, `leftover` is the free memory, negated; on a node, a number of devices.
        devices = f"{self.leftover} device{'' if self.leftover == 1 else 's'}"
        left = size_text(-self.leftover) if self.is_host else devices

        weights = ""  # it is not known where they are
        if self.lacks_weights is not None:
            weights = "weights to fetch" if self.lacks_weights else "weights there"

        # A reason is empty if it does not hold, or its figure is unknown; the filter leaves these out.
        parts = [
            "refused there before" if self.was_refused else "",
            f"{self.siblings or 'no'} replica{'s' * (self.siblings > 1)} of the service there",
            f"{self.points} points",
            "" if self.tokens_per_second is None else f"{format_rate(self.tokens_per_second)} tokens/s",
            weights,
            f"{left} left",
            "" if self.utilization_percent is None else f"{self.utilization_percent}% used",
            "" if self.cost_permille is None else f"{self.cost_permille / 10:.0f}% of the highest cost",
            f"{self.bandwidth_bytes_per_second / 1e9:.0f} GB/s" if self.bandwidth_bytes_per_second else "",
        ]
        return ", ".join(filter(None, parts))


def score_cell(unit: Unit, need: Amounts, cell: Cell, free: Amounts, siblings: int) -> CellScore:
    """Return the score of a cell on which a part of a unit fits.

    Args:
        unit: the unit.
        need: what the part needs.
        cell: the cell.
        free: what is left of it.
        siblings: replicas of the same service there.
    """
    leftover = count_leftover(need, cell, free)  # devices, or negated free memory
    return CellScore(
        was_refused=cell.id in unit.refused_by,
        siblings=siblings,
        points=count_cell_points(cell, leftover) + count_unit_points(unit, cell),
        tokens_per_second=unit.speeds.tokens_per_second.get(cell.device_class),
        lacks_weights=unit.weights not in cell.weights if unit.weights and cell.weights else None,
        leftover=leftover,
        utilization_percent=cell.utilization_percent,
        cost_permille=cell.cost_permille,
        bandwidth_bytes_per_second=cell.bandwidth_bytes_per_second,
        is_host=cell.kind == "host",
    )


def rate_cell(
    cost: tuple[float, ...], need: Amounts, cell: Cell, free: Amounts, victims: tuple[Unit, ...] = ()
) -> CellChoice:
    """Return a cell as a choice, with what rates it among all cells of its class."""
    leftover = count_leftover(need, cell, free)
    points = count_cell_points(cell, leftover)
    negated_bandwidth = -cell.bandwidth_bytes_per_second
    return CellChoice(cost, points, leftover, negated_bandwidth, cell.id, victims)


def count_leftover(need: Amounts, cell: Cell, free: Amounts) -> int:
    """Return the devices left on a node after the need; on a host, the free memory left, with its sign turned.

    So the least is best: a node with few devices left, and a host with much memory left.
    """
    if cell.kind == "host":
        return need.get(MEMORY, 0) - free.get(MEMORY, 0)
    return sum([free.get(name, 0) - amount for name, amount in need.items() if "/" in name])


def count_cell_points(cell: Cell, leftover: int) -> int:
    """Return the points that a cell gives to each unit with the same need: for packing, utilization and cost."""
    # On a host, `leftover` is the free memory, negated: `_PACKED_BYTES` of it (64 GiB) give half of the points.
    if cell.kind == "host":
        free_bytes = max(0, -leftover)
        packing = PACKING_POINTS * free_bytes // (free_bytes + _PACKED_BYTES)
    else:
        # On a node, `leftover` is the number of devices left: none is best, and one gives half the points.
        packing = PACKING_POINTS // (1 + max(0, leftover))
    # What is unknown counts as unused, and as free of cost.
    idle = UTILIZATION_POINTS * (100 - (cell.utilization_percent or 0)) // 100
    return packing + idle + COST_POINTS * (1000 - (cell.cost_permille or 0)) // 1000


def count_unit_points(unit: Unit, cell: Cell) -> int:
    """Return the points that depend on the unit: for its speed and its weights there."""
    has_weights = bool(unit.weights) and unit.weights in cell.weights
    return SPEED_POINTS * find_speed_step(unit, cell) // MOST_STEPS + (WEIGHTS_POINTS if has_weights else 0)


def find_speed_step(unit: Unit, cell: Cell) -> int:
    """Return the speed of a unit on a cell in tenths of the fastest device class that it accepts."""
    return unit.speeds.steps.get(cell.device_class, _UNKNOWN_STEP)
