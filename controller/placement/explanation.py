"""The reasons why a unit is on no cell after a round: for one unit by cell, or counted over all cells."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from controller.placement.found_place import need_key
from controller.placement.planner import PlanRules, Round
from controller.placement.pool_limits import LimitRefusal
from controller.placement.refusals import (
    AVOIDED,
    FITS,
    HEAD_OF_LINE,
    INSUFFICIENT,
    NOMINATED,
    OTHER_POOL,
    TOO_SMALL,
    RefusedPlace,
    find_refusal_of,
    largest_part,
)
from controller.placement.units import Cell, Unit, find_shortage

_Kind = tuple[object, ...]
"""All that a verdict on units depends on, apart from the cell: units with the same are of one kind."""
_MOST_KINDS: Final = 32
"""Kinds of units of which the verdicts of all cells are kept from one round to the next."""


class CellRefusal(NamedTuple):
    """The reason why a cell does not run a unit."""

    reason: str
    """One CamelCase word: `find_refusal_of` has its row."""
    resource: str = ""
    """The resource of which the cell has too little."""

    def __str__(self) -> str:
        return f"{self.reason} {self.resource}" if self.resource else self.reason


class CellExplanation(NamedTuple):
    """Why one cell does not run a unit, and what would help."""

    cell: str
    """`Cell.id`."""
    refusal: CellRefusal
    message: str
    """The state, in words."""
    remedy: str
    """The remedy, in words; empty if none is needed."""


def explain(unit: Unit, cells: Iterable[Cell], made: Round, rules: PlanRules) -> list[CellExplanation]:
    """Explain for each cell why a waiting unit is not there, and what would help.

    The reason is one that always holds, such as a label (`find_static_refusal`), or else one of this round, such as a
    pool's limit or too little room.

    Args:
        unit: the unit; of a gang, its largest part is compared.
        cells: the cells (nodes and hosts) of the round.
        made: the round.
        rules: the rules of the round.
    """
    explanations = []
    for cell in cells:
        limit = made.limits.find_refusal(unit, cell.pool)  # None: no limit keeps it out of the pool
        refusal = find_static_refusal(unit, cell) or find_refusal_now(unit, cell.id, made, limit)
        place = RefusedPlace(unit, cell, refusal.resource, limit, made, rules)
        # Each reason has a row in the table `REFUSALS`, which has the words.
        message, remedy = find_refusal_of(refusal.reason).explain(place)
        explanations.append(CellExplanation(cell.id, refusal, message, remedy))
    return explanations


class _Feasible(NamedTuple):
    """The cells of a pool that could run units of one kind."""

    cells: frozenset[str]
    insufficient: Mapping[str, int]
    """Number of those with too little left, by reason."""
    roomy: Sequence[str]
    """Those with enough left."""


class _Verdict(NamedTuple):
    """The verdict of one cell on all units of one kind."""

    refusal: str
    """Why it refuses them in any case; empty if it does not."""
    lacking: str
    """The resource of which it has too little left; empty if it has enough."""


class RefusalCounter:
    """Counts by reason how many cells refuse a unit; units with equal needs share one count."""

    def __init__(self, cells: Iterable[Cell], made: Round) -> None:
        """Count after a round; nothing is counted before the first `count`.

        Units of one kind (`_Kind`: equal needs, rules, pools and cells to avoid) get the same verdict of each cell,
        whatever limits and promises apply to them. A verdict says why the cell always refuses them, or which resource
        is short now.
        """
        self._cells, self._round = {cell.id: cell for cell in cells}, made
        self._verdicts: dict[_Kind, dict[str, _Verdict]] = {}
        """By kind of units, the verdicts of cells by `Cell.id`; the kind that was counted last comes last."""
        self._sorted_cells: dict[_Kind, tuple[Mapping[str, int], Mapping[str, _Feasible]]] = {}
        """By kind of units: how many cells refuse it always, by reason, and the other cells by pool."""
        self._counts: dict[tuple[object, ...], Mapping[str, int]] = {}
        """The answers of `count`, by all that they depend on."""

    def update(self, cells: Iterable[Cell], made: Round) -> None:
        """Count after this round from now on; cells that are as before, with as much left, are not judged again."""
        previous_cells, previous_left = self._cells, self._round.left
        self._cells, self._round = {cell.id: cell for cell in cells}, made

        # `left` is what a round leaves free of each cell. If the cell changed or is gone, that is not compared.
        stale = [
            name
            for name, cell in previous_cells.items()
            if cell is not self._cells.get(name) or made.left[name] != previous_left[name]
        ]
        for verdicts in self._verdicts.values():
            for name in stale:
                verdicts.pop(name, None)
        self._sorted_cells.clear()
        self._counts.clear()

    def count(self, unit: Unit) -> Mapping[str, int]:
        """Return the number of cells by the reason for which they refuse a unit.

        The answer is kept by all that it depends on: the kind of the unit, its promise, rank, protection and number of
        parts, and the limits that refuse it.
        """
        # `identity` is equal for units that the same cells admit.
        kind = (unit.identity, need_key(largest_part(unit)), unit.pools, unit.avoid)
        # What a limit keeps for others depends on the unit's place in the queue.
        limits = tuple(self._round.limits.find_refusal(unit, pool) for pool in unit.pools)
        key = (*kind, unit.nomination, unit.rank, unit.is_protected, limits, len(unit.parts))
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = self._count(unit, kind)
        return counts

    def _count(self, unit: Unit, kind: _Kind) -> Mapping[str, int]:
        """Return the number of cells (nodes and hosts) by the reason for which they refuse a unit.

        For units of one kind, the cells are judged once. Only in a pool where a limit refuses this unit, or where cells
        are promised to it, each cell is looked at for the unit itself.
        """
        if kind not in self._sorted_cells:
            self._sorted_cells[kind] = self._split_cells(unit, kind)
        # Counts of cells that always refuse, by reason; by pool, the cells that could run such a unit.
        refused, pools = self._sorted_cells[kind]

        counts = Counter(refused)
        for pool, feasible in pools.items():
            limit = self._round.limits.find_refusal(unit, pool)
            if limit is not None or (unit.nomination and feasible.cells.intersection(unit.nomination.cells)):
                counts.update(str(find_refusal_now(unit, name, self._round, limit)) for name in feasible.cells)
                continue
            # The same for all units of the kind: too little room. Cells with room may be kept for a unit ahead.
            counts.update(feasible.insufficient)
            counts.update(str(find_refusal_now(unit, name, self._round, None)) for name in feasible.roomy)
        return dict(counts)

    def _split_cells(self, unit: Unit, kind: _Kind) -> tuple[Mapping[str, int], Mapping[str, _Feasible]]:
        """Return how many cells refuse a unit in any case, by reason, and all other cells by pool.

        The others are feasible: each either lacks a resource now (`insufficient`) or has enough left (`roomy`).
        """
        # 1. Count the refusals; of each other cell, note the resource that it lacks, or "" if it lacks none.
        refused: Counter[str] = Counter()
        shortages_by_pool: dict[str, dict[str, str]] = {}
        verdicts = self._judge_cells(unit, kind)
        for name, cell in self._cells.items():
            refusal, lacking = verdicts[name]
            if refusal:
                refused[refusal] += 1
            else:
                shortages_by_pool.setdefault(cell.pool, {})[name] = lacking

        # 2. Sum these up by pool.
        feasible: dict[str, _Feasible] = {}
        for pool, shortages in shortages_by_pool.items():
            counts = Counter(lacking for lacking in shortages.values() if lacking)
            feasible[pool] = _Feasible(
                cells=frozenset(shortages),
                insufficient={str(CellRefusal(INSUFFICIENT, lacking)): count for lacking, count in counts.items()},
                roomy=[name for name, lacking in shortages.items() if not lacking],
            )
        return refused, feasible

    def _judge_cells(self, unit: Unit, kind: _Kind) -> Mapping[str, _Verdict]:
        """Return the verdict of each cell on units of a kind.

        Verdicts are kept while the cell stays the same, for at most _MOST_KINDS kinds: those of the kind that was asked
        for least recently are dropped.
        """
        # The kind that was counted last is put last.
        verdicts = self._verdicts[kind] = self._verdicts.pop(kind, {})
        if len(self._verdicts) > _MOST_KINDS:
            oldest_kind = next(iter(self._verdicts))
            del self._verdicts[oldest_kind]

        # Judge cells that are new or have changed.
        need, left = largest_part(unit), self._round.left
        for name, cell in self._cells.items():
            if name not in verdicts:
                refusal = find_static_refusal(unit, cell)
                if refusal is not None:
                    verdicts[name] = _Verdict(refusal=str(refusal), lacking="")
                else:
                    verdicts[name] = _Verdict(refusal="", lacking=find_shortage(need, left[name]))
        return verdicts


def find_static_refusal(unit: Unit, cell: Cell) -> CellRefusal | None:
    """Return why a cell (node or host) refuses a unit whatever else runs there, or None if it could run it.

    A cell that is closed at the moment, or to be avoided by the unit, refuses it as well.
    """
    if cell.pool not in unit.pools:
        return CellRefusal(OTHER_POOL)
    if reason := unit.refuse(cell):
        return CellRefusal(reason)
    if resource := find_shortage(largest_part(unit), cell.total):
        return CellRefusal(TOO_SMALL, resource)
    if cell.closed:
        return CellRefusal(cell.closed)
    return CellRefusal(AVOIDED) if cell.id in unit.avoid else None


def find_refusal_now(unit: Unit, cell: str, made: Round, limit: LimitRefusal | None) -> CellRefusal:
    """Return why a cell that could run a unit does not do so after a round; FITS if nothing keeps it from there.

    In this order: the cell is promised to the unit (NOMINATED), a limit of its pool, too little room, or a unit ahead
    for which the cell is kept (HEAD_OF_LINE).

    Args:
        unit: the unit.
        cell: `Cell.id`.
        made: the round.
        limit: the limit that keeps the unit out of the pool of the cell; None: none does.
    """
    blockage = made.blocked.get(unit.uid)
    # A unit that the round has blocked has lost its promise (nomination) in it.
    if blockage is None and unit.nomination is not None and cell in unit.nomination.cells:
        return CellRefusal(NOMINATED)

    if limit is not None:
        return CellRefusal(limit.reason)
    if resource := find_shortage(largest_part(unit), made.left[cell]):  # `left`: what the round leaves free
        return CellRefusal(INSUFFICIENT, resource)

    closure = made.closed.get(cell)  # the unit ahead (`head`) for which the cell is kept; None: for none
    if closure is not None and closure.head.uid != unit.uid and closure.holds_back(unit):
        return CellRefusal(HEAD_OF_LINE)
    return CellRefusal(FITS)
