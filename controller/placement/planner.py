"""The planner: one round of the queue, decided by units and cells alone.

It goes through the waiting units by priority, then by the time since when each waits, and admits what fits. A unit for
which there is no room may have units of lower priority evicted, as few as possible; it is nominated for their cell and
holds it until they have ended, also against older units of its priority. A unit for which even that makes no room
closes the cells it could use to all later units of its priority or a higher one, or a large one would wait for ever
behind small ones. Units of lower priority may pass, because they can be evicted as soon as that makes enough room; but
not on the cell where they could be soonest, or each one that passes would begin a new minimum run time. There is no
aging: within a priority, the time in the queue decides.

A unit that a limit of a pool or a quota holds back may have units of lower priority evicted that count against this
limit, if it then gets a cell, too. Else it closes no cell, but the limit to all later units. What a unit that waits for
room needs of a limit is kept for it. A unit that needs more than its limits ever allow closes nothing.

The plan is a pure function of its inputs: two controllers with the same inputs decide alike, and a decision that was
written down in part is taken again in the same way.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.placement.actions import Action, Admit, Blockage, EvictUnit, Nominate, WithdrawNomination
from controller.placement.alternatives import list_alternatives
from controller.placement.found_place import RESERVED, FoundPlace, HeadOfLine, need_key
from controller.placement.place_search import PlaceSearch
from controller.placement.pool_limits import LimitRefusal, PoolLimits, PoolRules, Quotas, find_pool
from controller.placement.preemption import NO_CANDIDATES, Candidates
from controller.placement.score import CellScore
from controller.placement.units import Amounts, Cell, HostRequirement, Nomination, Unit, add_by_cell, fits

CONSIDERED: Final = 256
"""Waiting units of each home pool for which one round looks for a place; the rest are only sorted. A unit like one that
found no place costs nothing, and does not count."""
MIN_RUN_SECONDS: Final = 300.0
"""Time for which an admitted unit is not evicted: loading weights again and again serves nobody."""


class PlanRules(NamedTuple):
    """The administrator's rules."""

    min_run_seconds: float = MIN_RUN_SECONDS
    pools: Mapping[str, PoolRules] = MappingProxyType({})
    quotas: Quotas = MappingProxyType({})


class Round(NamedTuple):
    """The decisions of one round."""

    actions: tuple[Action, ...]
    queue: tuple[Unit, ...]
    """All units that were waiting, in their order."""
    blocked: Mapping[str, Blockage]
    """The reason why a unit was neither admitted nor nominated, by its uid; for those that were considered."""
    left: Mapping[str, Amounts]
    """Amounts left of each cell after the round, by `Cell.id`."""
    again_seconds: float | None = None
    """Time after which units may be evicted that are too young now, so that a blocked one gets a place."""
    closed: Mapping[str, HeadOfLine] = MappingProxyType({})
    """The blocked unit for which a cell is closed to others, by `Cell.id`."""
    limits: PoolLimits = PoolLimits()
    """The use of each limit after the round."""
    candidates: Candidates = NO_CANDIDATES
    """The units that hold room."""


def plan(cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> Round:
    """Decide one round.

    Args:
        cells: all cells.
        units: all units: those that wait, and those that run or end, which may make room.
        rules: the administrator's rules.
        now: the wall clock, in seconds since 1970.
    """
    return Planning(cells, units, rules, now).run()


class _AwaitedCells(NamedTuple):
    """The cells that a blocked unit waits for."""

    feasible: Mapping[str, Cell]  # all that could ever run it, by `Cell.id`
    open: Mapping[str, Cell]  # those of them for which it waits
    pools: frozenset[str]  # the pools of these


class Planning:
    """The state of one round. A unit is at home in the first of its pools, and borrows in the others."""

    def __init__(self, cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> None:
        """Sort the waiting units, and count what all others hold: on cells, in limits, and of elastic pools."""
        # 1. The units that wait, in the order of the queue, and all others, which hold room.
        everything = list(units)
        waiting = (unit for unit in everything if unit.state == "waiting" and not unit.is_superseded)
        self._waiting = sorted(waiting, key=lambda unit: unit.order)
        holding = [unit for unit in everything if unit.state != "waiting"]
        self._holders = {unit.uid: unit for unit in holding}
        self._rules = rules

        # 2. What is counted in this round: possible victims, limits, and the room of cells.
        by_id = {cell.id: cell for cell in cells}
        pools = {unit.uid: find_pool(unit, by_id, rules.pools) for unit in holding}
        self._candidates = Candidates(holding, pools, now, rules.min_run_seconds)
        self._limits = PoolLimits(rules.pools, rules.quotas)
        self._search = self.build_search(by_id.values())
        # Units that may still be admitted without a cell, by pool.
        self._elastic_slots = {name: pool.elastic for name, pool in rules.pools.items() if pool.elastic > 0}

        # 3. Count in these what is promised and what is held.
        for unit in self._waiting:
            if unit.nomination is not None and self._could_ever_start(unit):
                # Borrowers may not take what is promised to a unit at home, until it is decided about.
                self._search.promise(unit, unit.nomination.cells, self._list_remaining_victims(unit.nomination))
        for unit in holding:
            self._search.count_replica(unit.service, unit.cells)
            pool = pools[unit.uid]
            self._limits.add_holder(unit, pool)
            if not unit.cells and pool in self._elastic_slots:  # it waits for a node to be added
                self._elastic_slots[pool] -= 1
                self._search.subtract_unpinned(unit, pool)

        # 4. What the round decides, and what it remembers of units that it has considered.
        self._held_cells: set[str] = set()
        """Cells where this round holds room for nominated units, which is free to the scheduler."""
        self._considered: dict[tuple[str, bool], int] = {}  # units by home pool, and whether limits let them start
        self._shapes: dict[tuple[object, ...], int] = {}  # the number of each shape: see `_shape_of`
        self._blocked_shapes: dict[int, tuple[Blockage, Mapping[str, bool]]] = {}
        """By shape, since nothing gets better in a round: why its units wait, and the pools whose limits are kept for
        them; True: also limits that other namespaces share."""
        self._awaited: dict[tuple[object, ...], _AwaitedCells] = {}  # kept answers of `_list_awaited`
        self._actions: list[Action] = []
        self._blocked: dict[str, Blockage] = {}  # by uid: why the unit waits
        self._again_seconds: float | None = None  # least time until a blocked unit may evict

    def build_search(self, cells: Iterable[Cell]) -> PlaceSearch:
        """Return the search for places among the cells."""
        return PlaceSearch(cells, self._candidates, self._limits)

    def run(self) -> Round:
        """Decide about each waiting unit, by priority and time; of one priority, those with a promise come first."""
        for _rank, alike in itertools.groupby(self._waiting, key=lambda unit: unit.rank):  # sorted by rank already
            units = list(alike)
            settled = self._keep_promises(units)  # uids of units that are decided
            for unit in units:
                if unit.uid in settled:
                    continue
                shape = self._shape_of(unit)
                # A nominated unit is always considered: cells were held for it.
                if unit.nomination is not None or not self._is_left_out(unit, shape):
                    self._decide(unit, shape)

        return Round(
            actions=tuple(self._actions),
            queue=tuple(self._waiting),
            blocked=self._blocked,
            left=self._search.left,
            again_seconds=self._again_seconds,
            closed=self._search.closed,
            limits=self._limits,
            candidates=self._candidates,
        )

    def _keep_promises(self, units: Iterable[Unit]) -> set[str]:
        """Decide first about the nominated units of one priority; return the `uid` of those whose nomination holds.

        What is promised to a unit is not for an older one, which may have joined the queue only after the promise. But
        a free place elsewhere is for the older one first: a nominated unit may move there only if none is ahead.
        """
        settled = set[str]()
        is_none_ahead = True  # no earlier unit of this priority that could start is still to be decided about
        for unit in units:
            if unit.nomination is not None and self._continue_nomination(unit, unit.nomination, may_move=is_none_ahead):
                settled.add(unit.uid)
            elif is_none_ahead and self._could_ever_start(unit):  # all later ones have this one ahead
                is_none_ahead = False
        return settled

    def _could_ever_start(self, unit: Unit) -> bool:
        """Return whether a pool could run a unit if nothing else ran, and no limit of it allows less than it needs."""
        return any(not self._limits.exceeds(unit, pool) and self._could_ever_run(unit, pool) for pool in unit.pools)

    def _could_ever_run(self, unit: Unit, pool: str) -> bool:
        """Return whether a pool could run a unit if nothing else ran there, or may get a node that could."""
        return pool in self._elastic_slots or self._search.could_ever_run(unit, pool)

    def _is_left_out(self, unit: Unit, shape: int) -> bool:
        """Return whether no place is searched for a unit, since this round did so for CONSIDERED others of its pool.

        A unit like one that was blocked costs no search and does not count. When a unit that could start is left out,
        its pools are closed to all later ones. One that limits forbid for good holds up nobody.
        """
        if not unit.replaces and shape in self._blocked_shapes:  # `_decide` blocks it without a search
            return False

        # Units that a limit of each pool forbids for good (`can_start` is False) are counted apart.
        home = unit.pools[0] if unit.pools else ""
        can_start = not all(self._limits.exceeds(unit, pool) for pool in unit.pools)
        self._considered[home, can_start] = self._considered.get((home, can_start), 0) + 1
        if self._considered[home, can_start] <= CONSIDERED:
            return False
        if can_start:  # no later unit may pass it
            self._search.exhausted.update(unit.pools)
        return True

    def _decide(self, unit: Unit, shape: int) -> None:
        """Decide about one unit: the first of these that is possible.

        1. Admit it to cells with room.
        2. Admit it without a cell, for a node that an autoscaler adds.
        3. Nominate it for the room of units that end or are evicted.
        4. Block it, and take back a promise that it has.
        """
        nomination = unit.nomination
        if nomination is None and not unit.replaces and self.is_hopeless(unit, shape):
            self._block(unit, shape)
            return
        place = self._search.find_place(unit, "free")
        if place is not None:
            self._admit(unit, place.cells, place.scores)
        elif pool := self._find_elastic_pool(unit):
            self._admit_unpinned(unit, pool)
        elif (place := self._find_place_of_others(unit)) is not None:
            self._nominate(unit, place)
        else:
            if nomination is not None:
                self._actions.append(WithdrawNomination(unit))
            self._block(unit, shape)

    def _find_place_of_others(self, unit: Unit) -> FoundPlace | None:
        """Return a place that becomes free when other units end; None for a unit that may not evict others."""
        if unit.is_last:
            return None
        return self._place_in_predecessor(unit) or self._search.find_place(unit, "evict")

    def is_hopeless(self, unit: Unit, shape: int) -> bool:  # noqa: ARG002 - the tests' plain form looks at the unit
        """Return whether a unit with the same view of cells and limits was blocked in this round."""
        return shape in self._blocked_shapes

    def _shape_of(self, unit: Unit) -> int:
        """Return a number for the unit's shape: units of one shape get the same answer from cells and limits."""
        namespace = unit.key.namespace if self._limits.by_namespace else ""  # without quotas, it makes no difference
        parts = tuple(map(need_key, unit.parts))
        flags = unit.is_protected, unit.has_other_gate, unit.is_last  # they limit what it may pass, wait for, or evict
        shape = unit.identity, parts, unit.pools, unit.avoid, unit.rank, flags, namespace
        return self._shapes.setdefault(shape, len(self._shapes))

    def _continue_nomination(self, unit: Unit, nomination: Nomination, *, may_move: bool) -> bool:
        """Go on with the promise of cells to a unit; return False if it is void, so that the unit waits like any other.

        The unit is admitted if the room is there, or, if it `may_move`, a better place is free. Else the room is held
        while its victims end, and those that still run are evicted.
        """
        # 1. Void if a cell is gone, or if cells or limits refuse the unit even once its victims have ended.
        cells = [cell for name in nomination.cells if (cell := self._search.cells.get(name)) is not None]
        remaining = self._list_remaining_victims(nomination)
        has_all_cells = len(cells) == len(nomination.cells) == len(unit.parts)
        if not has_all_cells or not self._is_eligible(unit, cells, remaining):
            return False

        # 2. Admit it if the room is there, and the limits allow it beside victims that have not ended: with room for
        # both, what it replaces may never end.
        has_room = self._search.has_room_for(add_by_cell(unit.parts, nomination.cells))
        if has_room and self._is_eligible(unit, cells):
            self._admit(unit, nomination.cells)
            return True

        # 3. Void if there is nothing to wait for: victims that ended left no room, one leaves all of its room to its
        # own successor, or one may not be evicted any more.
        if not remaining or any(self._candidates.is_replaced(victim.uid) for victim in remaining):
            return False
        running = [victim for victim in remaining if not self._ends_anyway(victim, unit)]
        if not all(self._candidates.may_evict(unit, victim) for victim in running):
            return False

        # 4. A better place may have become free meanwhile: what was evicted for this one then serves others.
        if may_move and (place := self._search.find_place(unit, "free")) is not None:
            self._admit(unit, place.cells, place.scores)
            return True

        # 5. Hold the room, and evict the victims that still run: their eviction may have failed before.
        if not self._search.hold(unit, nomination.cells, remaining):
            return False
        self._held_cells.update(nomination.cells)
        self._limits.add(unit, cells[0].pool, remaining)
        self._actions += [EvictUnit(victim, unit) for victim in running]
        return True

    def _ends_anyway(self, victim: Unit, unit: Unit) -> bool:
        """Return whether a victim of a unit ends without an eviction: it ends already, or the unit replaces it."""
        return self._candidates.is_ending(victim) or victim.uid in unit.replaces

    def _list_remaining_victims(self, nomination: Nomination) -> Sequence[Unit]:
        """Return the victims of a nomination that still hold room."""
        return [self._holders[uid] for uid in sorted(nomination.victims) if uid in self._holders]

    def _is_eligible(self, unit: Unit, cells: Iterable[Cell], leaving: Sequence[Unit] = ()) -> bool:
        """Return whether rules and limits let a unit use cells once `leaving` have ended, however full they are."""
        return all(
            cell.pool in unit.pools
            and not cell.closed
            and cell.id not in unit.avoid
            and not unit.refuse(cell)
            and self._limits.find_refusal(unit, cell.pool, leaving) is None
            for cell in cells
        )

    def _admit(self, unit: Unit, cells: tuple[str, ...], scores: tuple[CellScore, ...] = ()) -> None:
        """Decide to give a unit its cells, and count it there and in the limits of their pool."""
        others = list_alternatives(self._search, unit, cells)
        self._search.take(add_by_cell(unit.parts, cells))
        self._search.end_promise(unit, cells)
        self._search.count_replica(unit.service, cells)
        self._limits.add(unit, self._search.cells[cells[0]].pool)
        self._actions.append(Admit(unit, cells, scores, others=others))

    def _admit_unpinned(self, unit: Unit, pool: str) -> None:
        """Decide to admit a unit without cells, so that an autoscaler adds a node to the pool."""
        self._elastic_slots[pool] -= 1
        self._limits.add(unit, pool)
        self._actions.append(Admit(unit, (), node_labels=self._rules.pools[pool].node_labels))

    def _nominate(self, unit: Unit, place: FoundPlace) -> None:
        """Promise a unit the cells of its victims, and evict these; units that it replaces end by their rollout."""
        # These are listed before `hold`, after which they count as evicted.
        running = [victim for victim in place.victims if not self._ends_anyway(victim, unit)]
        if not self._search.hold(unit, place.cells, place.victims):
            raise AssertionError(f"{unit.key} does not fit in the place of its victims on {place.cells}")
        self._held_cells.update(place.cells)
        self._limits.add(unit, self._search.cells[place.cells[0]].pool, place.victims)
        nomination = Nomination(place.cells, frozenset(victim.uid for victim in place.victims))
        if nomination != unit.nomination:
            self._actions.append(Nominate(unit, nomination))
        self._actions += [EvictUnit(victim, unit) for victim in running]

    def _block(self, unit: Unit, shape: int) -> None:
        """Note why a unit waits, and keep for it what it needs of limits.

        Units of one shape have the same reason: only the first is looked at, and closes its cells to later units.
        """
        if shape not in self._blocked_shapes:
            self._blocked_shapes[shape] = self._close_awaited_cells(unit)
        blockage, kept_pools = self._blocked_shapes[shape]  # by pool; True: also what namespaces share
        self._blocked[unit.uid] = blockage
        for pool, is_shared in kept_pools.items():
            self._limits.keep(unit, pool, is_shared=is_shared)

    def _close_awaited_cells(self, unit: Unit) -> tuple[Blockage, Mapping[str, bool]]:
        """Close what a blocked unit waits for to later units; return why it waits, and for which pools limits are kept.

        The latter map to True if limits that other namespaces share are kept as well. `is_shadowed`: it would fit on a
        cell that a unit ahead waits for.
        """
        refusals = {pool: limit for pool in unit.pools if (limit := self._limits.find_refusal(unit, pool)) is not None}
        # 1. Find the cells and the limit for which it waits.
        feasible, waited_for, pools = self._list_awaited(unit, refusals)  # could run it; it waits for; pools of these
        need, left = unit.parts[0], self._search.left
        is_shadowed = any(
            name in waited_for
            and fits(need, left[name])
            and (self._search.is_closed_to(unit, name) or self._search.is_promised(unit, need, name, left[name]))
            for pool in unit.pools
            for name in self._search.list_roomy(unit, need, pool)
        )
        decisive_limit = self._find_limit(unit, feasible, refusals)

        # 2. Close these to later units: limits that it could meet in a pool that could run it, and the cells.
        fitting = [pool for pool, refusal in refusals.items() if feasible and refusal.could_ever_fit]
        held_pools = [pool for pool in fitting if self._could_ever_run(unit, pool)]
        for pool in held_pools:
            self._limits.hold(unit, refusals[pool].key)
        # `place`: where it gets room soonest once minimum run times end; found before the cells are closed.
        place = self._search.find_place(unit, "wait") if feasible and self._candidates.has_young else None
        closure, closed = HeadOfLine(unit.rank, unit), self._search.closed
        for name in waited_for:
            if name not in closed or closed[name].rank < unit.rank:  # a larger rank holds back more units
                closed[name] = closure

        # 3. Reserve that place: no later unit may begin another minimum run time there.
        if place is not None:
            if not self._again_seconds or place.wait_seconds < self._again_seconds:
                self._again_seconds = place.wait_seconds
            # Where room is left, only the limit is waited for, and that is closed already.
            needs = add_by_cell(unit.parts, place.cells)
            reserved = [
                name for name in needs if name in waited_for or not self._search.has_room_for({name: needs[name]})
            ]
            closed.update(dict.fromkeys(reserved, HeadOfLine(RESERVED, unit)))  # RESERVED: no unit may pass

        # 4. State why it waits.
        blockage = Blockage(
            feasible=len(feasible),
            is_shadowed=is_shadowed,
            limits=tuple(refusals.values()),
            limit=decisive_limit,
            exceeds_limits=not self._could_ever_start(unit),
            priority_helps=self._candidates.priority_helps(unit, waited_for, left),
        )
        # Where it lacks room alone (True), all limits are kept for it. Where a limit holds it back (False), only its
        # quota is: other namespaces need not wait because that is used up.
        return blockage, dict.fromkeys(pools, True) | dict.fromkeys(held_pools, False)

    def _list_awaited(self, unit: Unit, refusals: Mapping[str, LimitRefusal]) -> _AwaitedCells:
        """Return the cells for which a unit waits and that it closes to later ones; priority does not matter here."""
        # Units that are alike in all that the answer depends on share it.
        parts = tuple(map(need_key, unit.parts))
        key = unit.identity, parts, unit.pools, unit.avoid, tuple(refusals)
        cells = self._awaited.get(key)
        if cells is None:
            feasible = self._search.list_all_feasible(unit)
            open_cells = {
                name: cell
                for name, cell in feasible.items()
                if not cell.closed
                and name not in unit.avoid
                and cell.pool not in refusals
                # Where it waits for what may never end, it must not make others wait.
                and self._search.may_become_free(unit, name)
            }
            pools = frozenset(cell.pool for cell in open_cells.values())
            cells = self._awaited[key] = _AwaitedCells(feasible, open_cells, pools)
        return cells

    def _find_limit(
        self, unit: Unit, feasible: Mapping[str, Cell], refusals: Mapping[str, LimitRefusal]
    ) -> LimitRefusal | None:
        """Return the limit for which a unit waits, or None if without it there would be no room either.

        A limit counts if it keeps the unit out of all cells that could run it, or out of one with room. What another
        pool does not lend is not waited for, unless it is all cells.
        """
        is_everywhere = all(cell.pool in refusals for cell in feasible.values())  # limits forbid each such cell
        for pool, refusal in refusals.items():
            for name, cell in feasible.items():
                if cell.pool != pool:
                    continue
                if is_everywhere:
                    return refusal
                # Without this limit, the unit might get room on this cell.
                is_awaited = refusal.reason != "Lending" and not cell.closed
                if is_awaited and fits(unit.parts[0], self._search.left[name]):
                    return refusal
        return None

    def _place_in_predecessor(self, unit: Unit) -> FoundPlace | None:
        """Return the place of a unit of an earlier spec that this one replaces, if it fits there once that has ended.

        None also for a gang, and if it needs more than its predecessor frees and a unit ahead waits for that.
        """
        if len(unit.parts) != 1:
            return None
        need = unit.parts[0]
        for uid in sorted(unit.replaces):
            predecessor = self._holders.get(uid)
            if predecessor is None or len(predecessor.cells) != 1 or len(predecessor.parts) != 1:
                continue  # it is gone, or is no single pod or process with a known cell
            # The room of the predecessor is promised to another unit, or rules or limits forbid the cell.
            cell = self._search.cells.get(predecessor.cells[0])
            if cell is None or self._candidates.is_promised(uid) or not self._is_eligible(unit, [cell], [predecessor]):
                continue

            room = self._candidates.freed_by(uid, cell.id)
            lacking = {name: amount - room.get(name, 0) for name, amount in need.items()}
            extra = {name: amount for name, amount in lacking.items() if amount > 0}  # more than the predecessor frees
            has_room = fits(need, self._search.room_with(cell.id, [predecessor]))
            # The room of its predecessor is its own; for more than that, it waits behind those that are ahead of it.
            left = self._search.left[cell.id]
            is_kept = self._search.is_closed_to(unit, cell.id) or self._search.is_promised(unit, extra, cell.id, left)
            if has_room and not (extra and is_kept):
                return FoundPlace((cell.id,), victims=(predecessor,))
        return None

    def _find_elastic_pool(self, unit: Unit) -> str:
        """Return the pool in which a unit may wait for a node that an autoscaler adds; empty if there is none.

        Not for a unit that another gate holds or that replaces a slow replica: no node is added for these. Nor if the
        scheduler could put it into room that is kept for others.
        """
        # No autoscaler adds hosts, and a volume that is bound to nodes is on none that comes.
        requirement = unit.requirement
        if unit.has_other_gate or unit.is_last or isinstance(requirement, HostRequirement):
            return ""
        if requirement.volume_nodes is not None:
            return ""
        for pool in unit.pools:
            has_slot = self._elastic_slots.get(pool, 0) > 0 and pool not in self._search.exhausted
            suits = has_slot and requirement.allows(self._rules.pools[pool].node_labels)  # labels of a node that comes
            if suits and self._limits.find_refusal(unit, pool) is None and not self._may_take_from_others(unit, pool):
                return pool
        return ""

    def _may_take_from_others(self, unit: Unit, pool: str) -> bool:
        """Return whether the scheduler could put a unit without a cell into room that is held or closed for others."""
        closed = [name for name in self._search.closed if self._search.is_closed_to(unit, name)]
        for part in unit.parts:
            cells = self._search.list_feasible(unit, part, pool)
            # `cell.free`, not what is left in this round: the scheduler does not know what the round has given away.
            if any(name in cells and fits(part, cells[name].free) for name in (*self._held_cells, *closed)):
                return True
        return False
