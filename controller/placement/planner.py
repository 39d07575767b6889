"""The planner: one round of the queue, decided by units and cells alone.

It goes through the waiting units by priority, then by the time since when each waits, and admits what fits. A unit for
which there is no room may have units of lower priority evicted, as few as possible; it is nominated for their cell and
holds it until they have ended. A unit for which even that makes no room closes the cells it could use to all later units
of its priority or a higher one, or a large one would wait for ever behind small ones. Units of lower priority may pass,
because they can be evicted as soon as that makes enough room.

The plan is a pure function of its inputs: two controllers with the same inputs decide alike, and a decision that was
written down in part is taken again in the same way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.placement.preemption import Candidates, find_victims
from controller.placement.score import CellScore, score_cell
from controller.placement.units import Amounts, Cell, Nomination, Unit, fits, subtract
from kube.resources import ObjectKey

CONSIDERED: Final = 256
"""Waiting units that one round considers; the rest are only sorted."""
MIN_RUN_SECONDS: Final = 300.0
"""Time for which an admitted unit is not evicted: loading weights again and again serves nobody."""


class PlanRules(NamedTuple):
    """The administrator's rules."""

    min_run_seconds: float = MIN_RUN_SECONDS
    elastic: Mapping[str, int] = MappingProxyType({})
    """Pools to which an autoscaler adds nodes, with the number of units that may wait for such a node at once."""


class Admit(NamedTuple):
    """Give these cells to a unit; none: its pods go unpinned, so that an autoscaler adds a node."""

    unit: Unit
    cells: tuple[str, ...]
    scores: tuple[CellScore, ...] = ()


class Nominate(NamedTuple):
    """Promise cells to a unit until its victims have ended."""

    unit: Unit
    nomination: Nomination


class Withdraw(NamedTuple):
    """Take the nomination of a unit back: its cell has no room for it any more, or none is needed."""

    unit: Unit


class Evict(NamedTuple):
    """End a unit, which then waits at its old place."""

    victim: Unit
    preemptor: Unit


Action = Admit | Nominate | Withdraw | Evict


class Round(NamedTuple):
    """The decisions of one round."""

    actions: tuple[Action, ...]
    queue: tuple[Unit, ...]
    """All units that were waiting, in their order."""
    blocked: Mapping[str, "Blockage"]
    """Why a unit was neither admitted nor nominated, by its uid; one that was not considered is not in it."""
    left: Mapping[str, Amounts]
    """What is left of each cell after the round, by `Cell.id`."""
    again_seconds: float | None = None
    """Time after which a unit may be evicted that is too young now."""


class Blockage(NamedTuple):
    """Why a unit waits."""

    feasible: int
    """Cells that have enough in all, and whose rules the unit meets; 0: no such hardware exists."""
    is_shadowed: bool
    """A unit ahead of it waits for the only cells on which it would fit."""


class _Placement(NamedTuple):
    cells: tuple[str, ...]
    victims: tuple[Unit, ...] = ()
    scores: tuple[CellScore, ...] = ()


_Shape = tuple[object, ...]


def plan(cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> Round:
    """Decide one round.

    Args:
        cells: all cells.
        units: all units: those that wait, and those that run or end, which may make room.
        rules: the administrator's rules.
        now: the wall clock, in seconds since 1970.
    """
    return _Planning(cells, units, rules, now).run()


class _Planning:
    """The state of one round: what is left of the cells, and which of them are closed to whom."""

    def __init__(self, cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> None:
        everything = list(units)
        self._cells = {cell.id: cell for cell in cells}
        self._by_pool: dict[str, list[Cell]] = {}
        for cell in self._cells.values():
            self._by_pool.setdefault(cell.pool, []).append(cell)
        self._left: dict[str, Amounts] = {name: cell.free for name, cell in self._cells.items()}
        self._waiting = sorted((unit for unit in everything if unit.state == "waiting"), key=lambda unit: unit.order)
        holding = [unit for unit in everything if unit.state != "waiting"]
        self._holders = {unit.uid: unit for unit in holding}
        self._candidates = Candidates(holding, now, rules.min_run_seconds)
        self._beside: dict[ObjectKey, dict[str, int]] = {}
        """Replicas of each service by cell: they are spread."""
        for unit in holding:
            self._count_beside(unit.service, unit.cells)
        self._closed: dict[str, int] = {}
        """By cell, the lowest rank of a blocked unit that could use it: units of this or a higher one may not pass."""
        self._feasible: dict[_Shape, list[Cell]] = {}
        self._hopeless: set[tuple[_Shape, int, bool]] = set()
        """Units of this shape, rank and protection were blocked in this round, and nothing gets better in a round."""
        self._elastic = dict(rules.elastic)
        self._actions: list[Action] = []
        self._blocked: dict[str, Blockage] = {}

    def run(self) -> Round:
        for unit in _list_considered(self._waiting):
            self._decide(unit)
        return Round(
            tuple(self._actions),
            tuple(self._waiting),
            self._blocked,
            self._left,
            self._candidates.again_seconds,
        )

    def _decide(self, unit: Unit) -> None:
        nomination = unit.nomination
        if nomination is not None and self._continue_nomination(unit, nomination):
            return
        key = (_shape_of(unit), unit.rank, unit.is_protected)
        is_plain = nomination is None and not unit.replaces
        if is_plain and key in self._hopeless:
            self._block(unit, key)
            return
        if (found := self._place(unit)) is not None or (found := self._place_elastic(unit)) is not None:
            self._admit(unit, found)
        elif (found := self._place_in_predecessor(unit) or self._place(unit, evicting=True)) is not None:
            self._nominate(unit, found)
        else:
            if nomination is not None:
                self._actions.append(Withdraw(unit))
            self._block(unit, key)

    def _continue_nomination(self, unit: Unit, nomination: Nomination) -> bool:
        """Admit a nominated unit whose cell is free, or hold the cell while victims end; False: it is void."""
        cells = [self._cells.get(name) for name in nomination.cells]
        if len(cells) != len(unit.parts) or any(cell is None or cell.closed for cell in cells):
            return False
        if not self._is_eligible(unit, [cell for cell in cells if cell is not None]):
            return False
        if self._takes(unit.parts, nomination.cells):
            self._admit(unit, _Placement(nomination.cells))
            return True
        staying = [self._holders[uid] for uid in sorted(nomination.victims) if uid in self._holders]
        if not staying:
            return False
        running = [each for each in staying if each.state == "running" and each.uid not in unit.replaces]
        if not all(self._candidates.may_evict(unit, each) for each in running):
            return False
        # A better place may have become free meanwhile: what was evicted for this one then serves others.
        if (found := self._place(unit)) is not None:
            self._admit(unit, found)
            return True
        if not self._hold(unit, nomination.cells, staying):
            return False
        # The eviction of some may have failed, or the controller may have ended before it.
        self._actions += [Evict(each, unit) for each in running]
        return True

    def _is_eligible(self, unit: Unit, cells: Sequence[Cell]) -> bool:
        """Return whether a unit may still use the cells that it is nominated for."""
        return all(
            cell.pool in unit.pools and cell.id not in unit.avoid and not unit.requirement.refuse(cell)
            for cell in cells
        )

    def _takes(self, parts: Sequence[Amounts], cells: Sequence[str]) -> bool:
        """Return whether cells have what the parts need; more than one part may be on a cell."""
        needs = _add_by_cell(parts, cells)
        return all(fits(need, self._left[cell]) for cell, need in needs.items())

    def _hold(self, unit: Unit, cells: Sequence[str], victims: Iterable[Unit]) -> bool:
        """Keep for a unit what its victims do not give; False if that is not there."""
        needs = _add_by_cell(unit.parts, cells)
        for victim in victims:
            for amounts, cell in zip(victim.parts, victim.cells, strict=False):
                if cell in needs:
                    needs[cell] = {name: max(0, amount - amounts.get(name, 0)) for name, amount in needs[cell].items()}
        if not all(fits(need, self._left[cell]) for cell, need in needs.items()):
            return False
        for cell, need in needs.items():
            self._take(need, cell)
        for victim in victims:
            self._candidates.promise(victim)
        return True

    def _admit(self, unit: Unit, found: _Placement) -> None:
        for need, cell in zip(unit.parts, found.cells, strict=False):
            self._take(need, cell)
        self._count_beside(unit.service, found.cells)
        self._actions.append(Admit(unit, found.cells, found.scores))

    def _nominate(self, unit: Unit, found: _Placement) -> None:
        """Nominate a unit for cells. Its victims make way for it; the rollout ends those that it replaces."""
        if not self._hold(unit, found.cells, found.victims):
            raise AssertionError(f"{unit.key} does not fit in the place of its victims on {found.cells}")
        nomination = Nomination(found.cells, frozenset(victim.uid for victim in found.victims))
        if nomination != unit.nomination:
            self._actions.append(Nominate(unit, nomination))
        self._actions += [
            Evict(victim, unit)
            for victim in found.victims
            if victim.state == "running" and victim.uid not in unit.replaces
        ]

    def _block(self, unit: Unit, key: tuple[_Shape, int, bool]) -> None:
        feasible = self._list_feasible(unit)
        open_cells = [cell for cell in feasible if not cell.closed and cell.id not in unit.avoid]
        is_shadowed = any(
            self._is_closed_to(unit, cell.id) and fits(unit.parts[0], self._left[cell.id]) for cell in open_cells
        )
        self._blocked[unit.uid] = Blockage(len(feasible), is_shadowed)
        if key in self._hopeless:
            return
        self._hopeless.add(key)
        for cell in open_cells:
            self._closed[cell.id] = max(unit.rank, self._closed.get(cell.id, unit.rank))

    def _is_closed_to(self, unit: Unit, cell: str) -> bool:
        """Return whether a unit may not pass one ahead of it that waits for a cell: it could not be evicted again."""
        lowest = self._closed.get(cell)
        return lowest is not None and (unit.is_protected or unit.rank <= lowest)

    def _list_feasible(self, unit: Unit) -> list[Cell]:
        """Return the cells that could ever run a part of a unit, those of the pools that it prefers first."""
        shape = _shape_of(unit)
        found = self._feasible.get(shape)
        if found is None:
            found = self._feasible[shape] = [
                cell
                for pool in unit.pools
                for cell in self._by_pool.get(pool, ())
                if all(fits(part, cell.total) for part in unit.parts) and not unit.requirement.refuse(cell)
            ]
        return found

    def _list_open(self, unit: Unit, pool: str) -> list[Cell]:
        return [
            cell
            for cell in self._list_feasible(unit)
            if cell.pool == pool
            and not cell.closed
            and cell.id not in unit.avoid
            and not self._is_closed_to(unit, cell.id)
        ]

    def _place(self, unit: Unit, *, evicting: bool = False) -> _Placement | None:
        """Return the place for a unit in the first of its pools that has one; `evicting` others, if that is needed."""
        for pool in unit.pools:
            cells = self._list_open(unit, pool)
            if evicting:
                cells = [cell for cell in cells if self._candidates.has_victims(unit, cell.id)]
            found = self._place_parts(unit, cells, evicting=evicting) if cells else None
            if found is not None:
                return found
        return None

    def _place_parts(self, unit: Unit, cells: Sequence[Cell], *, evicting: bool) -> _Placement | None:
        """Place all parts of a unit or none."""
        left: dict[str, Amounts] = {}
        chosen: list[str] = []
        scores: list[CellScore] = []
        victims: dict[str, Unit] = {}
        beside = self._beside.get(unit.service, {})
        for need in unit.parts:
            best: tuple[tuple[object, ...], Cell, CellScore, Sequence[Unit]] | None = None
            for cell in cells:
                free = left.get(cell.id) or self._left[cell.id]
                if fits(need, free):
                    ending: Sequence[Unit] = ()
                    cost: tuple[object, ...] = ()
                elif evicting and (made := find_victims(unit, need, cell, free, self._candidates, victims)) is not None:
                    ending, cost = made.victims, made.cost
                else:
                    continue
                score = score_cell(unit, need, cell, free, beside.get(cell.id, 0))
                key = (bool(ending), *cost, *score.key, cell.id)
                if best is None or key < best[0]:
                    best = (key, cell, score, ending)
            if best is None:
                return None
            _, cell, score, ending = best
            gained = self._left[cell.id] if cell.id not in left else left[cell.id]
            for victim in ending:
                victims[victim.uid] = victim
                gained = _add_amounts(gained, victim, cell.id)
            left[cell.id] = subtract(gained, need)
            chosen.append(cell.id)
            scores.append(score)
        return _Placement(tuple(chosen), tuple(victims.values()), tuple(scores))

    def _place_in_predecessor(self, unit: Unit) -> _Placement | None:
        """Return the place of a unit of an earlier spec that this one replaces, if it would fit there."""
        if len(unit.parts) != 1:
            return None
        need = unit.parts[0]
        for uid in sorted(unit.replaces):
            earlier = self._holders.get(uid)
            if earlier is None or len(earlier.cells) != 1 or self._candidates.is_promised(uid):
                continue
            cell = self._cells.get(earlier.cells[0])
            if cell is None or cell.closed or not self._is_eligible(unit, [cell]):
                continue
            lacking = {name: amount - earlier.parts[0].get(name, 0) for name, amount in need.items()}
            extra = {name: amount for name, amount in lacking.items() if amount > 0}
            # Its own place is its own; beyond that, it waits behind those that are ahead of it.
            if fits(extra, self._left[cell.id]) and not (extra and self._is_closed_to(unit, cell.id)):
                return _Placement((cell.id,), (earlier,))
        return None

    def _place_elastic(self, unit: Unit) -> _Placement | None:
        for pool in unit.pools:
            if self._elastic.get(pool, 0) > 0:
                self._elastic[pool] -= 1
                return _Placement(())
        return None

    def _take(self, need: Amounts, cell: str) -> None:
        self._left[cell] = subtract(self._left[cell], need)

    def _count_beside(self, service: ObjectKey, cells: Iterable[str]) -> None:
        counts = self._beside.setdefault(service, {})
        for cell in cells:
            counts[cell] = counts.get(cell, 0) + 1


def _list_considered(waiting: Sequence[Unit]) -> Iterator[Unit]:
    """Return the first units of the queue, and all that are nominated: cells are held for them."""
    others = 0
    for unit in waiting:
        if unit.nomination is None:
            others += 1
            if others > CONSIDERED:
                continue
        yield unit


def _shape_of(unit: Unit) -> _Shape:
    """Return all that decides about the cells that a unit may use."""
    parts = tuple(tuple(sorted(part.items())) for part in unit.parts)
    return type(unit.requirement), unit.requirement.shape, parts, unit.pools, unit.avoid


def _add_amounts(free: Amounts, victim: Unit, cell: str) -> Amounts:
    """Return what is free on a cell once a unit has ended."""
    freed = _add_by_cell(victim.parts, victim.cells).get(cell, {})
    return {name: amount + freed.get(name, 0) for name, amount in free.items()}


def _add_by_cell(parts: Sequence[Amounts], cells: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the needs of parts by the cell of each."""
    needs: dict[str, dict[str, int]] = {}
    for part, cell in zip(parts, cells, strict=False):
        need = needs.setdefault(cell, {})
        for name, amount in part.items():
            need[name] = need.get(name, 0) + amount
    return needs
