"""The search for cells: what is left of each in a round, which units may not use it, and the best for a unit."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from controller.placement.cell_index import CellChoice, CellIndex
from controller.placement.found_place import FoundPlace, HeadOfLine, Means, PlaceTrial, need_key, order_parts
from controller.placement.limit_victims import LimitVictims
from controller.placement.pool_limits import PoolLimits, is_borrowed
from controller.placement.preemption import Candidates, claim_room, find_victims
from controller.placement.score import CellScore, count_unit_points, rate_cell, score_cell
from controller.placement.units import Amounts, Cell, Unit, add_by_cell, add_room, fits, subtract_amounts
from kube.resources import ObjectKey

_MEANS: Final[Mapping[Means, tuple[Means, ...]]] = {
    "free": ("free",),
    "evict": ("free", "evict"),
    "wait": ("free", "evict", "wait"),
}


class PlaceSearch:
    """The cells in one round: what is left of each, and who may use it. Room and open cells only become fewer.

    Cells are found by indexes. Units of equal needs share these, since nearly all cells are the same to them.
    """

    def __init__(self, cells: Iterable[Cell], candidates: Candidates, limits: PoolLimits) -> None:
        """Take the cells as they are at the begin of a round, and sort them by pool, class and weights."""
        # What is left in this round.
        self.cells = {cell.id: cell for cell in cells}
        self.left: dict[str, Amounts] = {  # by `Cell.id`: what is free, with 0 for what `cell.free` lacks
            name: {**dict.fromkeys(cell.total, 0), **cell.free} for name, cell in self.cells.items()
        }
        self.closed: dict[str, HeadOfLine] = {}
        """Cells for which a blocked unit waits: units of its priority or a higher one may not pass."""
        self.exhausted: set[str] = set()
        """Pools for which units wait that this round does not consider: nothing may pass them."""
        self._promised: dict[str, dict[str, tuple[Amounts, tuple[Unit, ...]]]] = {}
        """By cell and `uid`: room promised to units of the pool's own share, with the victims that end for it. A
        borrowing unit may not take it."""
        self._candidates, self._limits = candidates, limits
        self._limit_victims = LimitVictims(candidates, limits)

        # The cells by what they are: this stays as it is.
        self._by_pool: dict[str, dict[str, Cell]] = {}  # cells by pool, then by `Cell.id`
        self._classes: dict[str, dict[str, set[str]]] = {}
        """By pool and device class, the cells: to a unit, all cells of one class have the same speed."""
        self._with_weights: dict[str, set[str]] = {}  # cells by the identity of weights that they have
        for name, cell in self.cells.items():
            self._by_pool.setdefault(cell.pool, {})[name] = cell
            self._classes.setdefault(cell.pool, {}).setdefault(cell.device_class, set()).add(name)
            for weights in cell.weights:
                self._with_weights.setdefault(weights, set()).add(name)
        self._replicas_on: dict[ObjectKey, dict[str, int]] = {}
        """Replicas of each service by cell: they are spread."""

        # Answers that are kept, since many units have the same rules and need.
        self._changed_cells: list[str] = []  # a log, in which each index reads on
        self._admitting: dict[tuple[object, ...], dict[str, Cell]] = {}  # by rules and pool: cells that the rules allow
        self._feasible: dict[tuple[object, ...], dict[str, Cell]] = {}  # with the need: those with enough in all
        self._open: dict[tuple[object, ...], dict[str, Cell]] = {}  # of these, those that take new units
        self._roomy: dict[tuple[object, ...], list[str]] = {}
        """Feasible and open cells on which the need still fitted at the last look."""
        self._indexes: dict[tuple[object, ...], CellIndex] = {}  # by the key of `_find_index`

    def count_replica(self, service: ObjectKey, cells: Iterable[str]) -> None:
        """Count a replica of a service on its cells."""
        counts = self._replicas_on.setdefault(service, {})
        for cell in cells:
            counts[cell] = counts.get(cell, 0) + 1

    def list_feasible(self, unit: Unit, need: Amounts, pool: str) -> Mapping[str, Cell]:
        """Return the cells of a pool that could ever run a need of a unit if nothing else ran, by `Cell.id`.

        The answer is kept for all units with the same rules about cells (`identity`) and the same need.
        """
        key = (unit.identity, need_key(need), pool)
        feasible = self._feasible.get(key)
        if feasible is None:
            feasible = self._feasible[key] = {
                name: cell for name, cell in self._list_admitting(unit, pool).items() if fits(need, cell.total)
            }
        return feasible

    def list_all_feasible(self, unit: Unit) -> dict[str, Cell]:
        """Return the cells that could ever run a part of a unit, in each of its pools that could run all parts."""
        return {
            name: cell
            for pool in unit.pools
            if self.could_ever_run(unit, pool)
            for need in unit.parts
            for name, cell in self.list_feasible(unit, need, pool).items()
        }

    def _list_admitting(self, unit: Unit, pool: str) -> Mapping[str, Cell]:
        """Return the cells of a pool whose rules a unit meets."""
        key = (unit.identity, pool)
        admitting = self._admitting.get(key)
        if admitting is None:
            admitting = self._admitting[key] = {
                name: cell for name, cell in self._by_pool.get(pool, {}).items() if not unit.refuse(cell)
            }
        return admitting

    def list_roomy(self, unit: Unit, need: Amounts, pool: str) -> Iterable[str]:
        """Return the open cells of a pool that have room for a need of a unit, by `Cell.id`."""
        key = (unit.identity, need_key(need), pool)
        names: Iterable[str] | None = self._roomy.get(key)
        if names is None:
            names = self._list_open(unit, need, pool)
        # Room only becomes less: what does not fit now does not fit later in this round, whatever the priority.
        roomy = self._roomy[key] = [name for name in names if fits(need, self.left[name])]
        return roomy

    def _list_open(self, unit: Unit, need: Amounts, pool: str) -> Mapping[str, Cell]:
        """Return the feasible cells of a pool that are not closed, by `Cell.id`."""
        key = (unit.identity, need_key(need), pool)
        open_cells = self._open.get(key)
        if open_cells is None:
            feasible = self.list_feasible(unit, need, pool)
            open_cells = self._open[key] = {name: cell for name, cell in feasible.items() if not cell.closed}
        return open_cells

    def is_closed_to(self, unit: Unit, cell: str) -> bool:
        """Return whether a unit may not pass one ahead of it that waits for a cell."""
        closure = self.closed.get(cell)
        return closure is not None and closure.holds_back(unit)

    def promise(self, unit: Unit, cells: Sequence[str], victims: Sequence[Unit]) -> None:
        """Protect the cells promised to a unit from units that borrow there, until the unit is considered."""
        for name, need in add_by_cell(unit.parts, cells).items():
            if name in self.cells and not is_borrowed(unit, self.cells[name].pool):
                self._promised.setdefault(name, {})[unit.uid] = need, tuple(victims)

    def end_promise(self, unit: Unit, cells: Iterable[str]) -> None:
        """End the promise of cells to a unit, since it gets them now."""
        for name in cells:
            self._promised.get(name, {}).pop(unit.uid, None)

    def is_promised(
        self, unit: Unit, need: Amounts, cell: str, free: Amounts, chosen: Container[str] = frozenset()
    ) -> bool:
        """Return whether a unit that borrows another pool's cell would take room promised to units at home there.

        Of each promise, only what its victims will not free counts: the rest comes from them.

        Args:
            unit: the unit.
            need: what it would take.
            cell: the cell.
            free: what is left of the cell.
            chosen: `uid` of victims whose room is in `free` already, so that they give nothing more.
        """
        if not self._promised.get(cell) or not is_borrowed(unit, self.cells[cell].pool):
            return False

        # Take what is promised to others off the free room, and see whether the need still fits.
        for kept, victims in self._promised[cell].values():  # room promised, and the victims that end for it
            lacking = kept  # what victims do not free must stay in the free room
            for victim in victims:
                if victim.uid not in chosen:
                    lacking = subtract_amounts(lacking, self._candidates.freed_by(victim.uid, cell))
            free = subtract_amounts(free, {name: max(0, amount) for name, amount in lacking.items()})
        return not fits(need, free)

    def may_become_free(self, unit: Unit, name: str) -> bool:
        """Return whether a part of a unit fits on a cell once all other units there have ended."""
        cell = self.cells[name]
        return not cell.lasting or any(fits(part, subtract_amounts(cell.total, cell.lasting)) for part in unit.parts)

    def _leave_promised(self, unit: Unit, cell: str, free: Amounts) -> Amounts:
        """Return the free amounts; for a unit that borrows on the cell, without the room promised to others there."""
        if is_borrowed(unit, self.cells[cell].pool):
            for kept, _ in self._promised.get(cell, {}).values():  # room promised to units at home
                free = subtract_amounts(free, kept)
        return free

    def has_room_for(self, needs: Mapping[str, Amounts]) -> bool:
        """Return whether each cell has what is needed of it."""
        return all(fits(need, self.left[cell]) for cell, need in needs.items())

    def take(self, needs: Mapping[str, Amounts]) -> None:
        """Take what is needed of each cell."""
        for cell, need in needs.items():
            self.left[cell] = subtract_amounts(self.left[cell], need)
            self._changed_cells.append(cell)

    def subtract_unpinned(self, unit: Unit, pool: str) -> None:
        """Subtract an admitted unit without a cell from each cell with room in the pool: the scheduler may pick any."""
        for part in unit.parts:
            for name in self.list_feasible(unit, part, pool):
                if self.has_room_for({name: part}):
                    self.take({name: part})

    def hold(self, unit: Unit, cells: Sequence[str], victims: Sequence[Unit]) -> bool:
        """Take the cells for a nominated unit: first the room that its victims free, then what is left of the cells.

        Each victim's room that is taken is promised to the unit, so that no other unit counts on it. Returns False,
        without any change, if both together are too little.
        """
        claims: dict[str, dict[str, Amounts]] = {victim.uid: {} for victim in victims}  # what each gives, by cell
        needs = add_by_cell(unit.parts, cells)  # by cell; what victims give is taken off below
        # 1. Divide the needs among the victims and the free room, without any change so far.
        for cell, need in needs.items():
            # A cell that shrank has less than nothing left: the victims' room must make up for that first.
            if not fits(need, self.room_with(cell, victims)):
                return False
            # Each victim gives what it can of what is still needed.
            for victim in victims:
                claim = claim_room(needs[cell], self._candidates.freed_by(victim.uid, cell))
                if any(claim.values()):
                    claims[victim.uid][cell] = claim
                    needs[cell] = subtract_amounts(needs[cell], claim)

        # 2. Take the rest of the free room, and promise the victims' room to the unit.
        self.take(needs)
        self.end_promise(unit, cells)
        for victim in victims:
            is_replaced = victim.uid in unit.replaces
            self._changed_cells += self._candidates.promise(victim, claims[victim.uid], is_replaced=is_replaced)
        return True

    def room_with(self, cell: str, victims: Iterable[Unit]) -> Amounts:
        """Return what is left of a cell once victims have ended."""
        left = self.left[cell]
        for victim in victims:
            left = add_room(left, self._candidates.freed_by(victim.uid, cell))
        return left

    def find_place(self, unit: Unit, means: Means) -> FoundPlace | None:
        """Return the place for a unit in the first of its pools that has one; None if none has.

        Args:
            unit: the unit.
            means: free: only room that is left; evict: also room of units that end or may be evicted now; wait: also of
                those that may be evicted later. Only the last two may also evict units to get within a pool's limits.
        """
        for pool in unit.pools:
            if pool in self.exhausted:
                continue
            place: FoundPlace | None = None
            if self._limits.find_refusal(unit, pool) is None:  # no limit of the pool keeps the unit out
                place = self._place_parts(unit, pool, means, PlaceTrial())  # an empty trial: no part has a cell yet
            elif means != "free":  # units that count against the limit must end
                place = self._place_within_limits(unit, pool, means)
            if place is not None:
                return place
        return None

    def _place_within_limits(self, unit: Unit, pool: str, means: Means) -> FoundPlace | None:
        """Return the place for a unit after evicting units that count against the pool's limits.

        These have to end in any case, so their own cells are tried first, and no other unit has to end. If even several
        of them on one cell do not make room, further victims are found by `means`.
        """
        is_patient = means == "wait"
        first = self._limit_victims.find_first(unit, pool, is_patient=is_patient)  # they free enough of the limits
        if first is None:
            return None

        # 1. The units that free enough of the limits, without needless ones.
        least = self._spare_victims(unit, pool, (), first)
        if (place := self._place_once_ended(unit, pool, "free", least)) is not None:
            return place

        # 2. With more users of the limits, several may be on one cell: then no other unit has to end.
        more = self._limit_victims.add_further(unit, pool, least, is_patient=is_patient)
        place = self._place_once_ended(unit, pool, "free", more)
        # 3. The units of step 1, and by `means` others on the cell as well.
        return place if place is not None else self._place_once_ended(unit, pool, means, least)

    def _place_once_ended(self, unit: Unit, pool: str, means: Means, victims: Iterable[Unit]) -> FoundPlace | None:
        """Return the place for a unit in a pool if these victims, and those that the place itself needs, end."""
        trial = PlaceTrial()
        self._end_in_trial(trial, victims)
        return self._place_parts(unit, pool, means, trial)

    def could_ever_run(self, unit: Unit, pool: str) -> bool:
        """Return whether all parts of a unit would fit into a pool at once if nothing else ran there."""
        left: dict[str, Amounts] = {}
        for number in order_parts(unit):
            need = unit.parts[number]
            for name, cell in self.list_feasible(unit, need, pool).items():
                if fits(need, free := left.get(name, cell.total)):
                    left[name] = subtract_amounts(free, need)
                    break
            else:
                return False
        return True

    def _place_parts(self, unit: Unit, pool: str, means: Means, trial: PlaceTrial) -> FoundPlace | None:
        """Return cells for all parts of a unit, placed from the largest part on; None if one part has no cell.

        The parts of a gang are placed one after the other; `trial` has what those before have taken and whom they
        evict.
        """
        cells = [""] * len(unit.parts)
        scores: dict[int, CellScore] = {}  # by the index of the part
        for number in order_parts(unit):
            need = unit.parts[number]
            # In this order of `_MEANS`, as far as `means` goes: free, others end now (evict), others end later (wait).
            picked = (self.pick_cell(unit, need, pool, mean, trial) for mean in _MEANS[means])
            choice = next((cell_choice for cell_choice in picked if cell_choice is not None), None)
            if choice is None:
                return None

            cell = self.cells[choice.cell_id]
            cells[number], scores[number] = cell.id, self.score(unit, cell.id, number, trial)
            if len(unit.parts) == 1 and not trial.victims:  # `find_victims` has spared needless ones
                wait_seconds = choice.cost[0] if choice.cost else 0.0  # `Victims.cost` begins with the seconds
                return FoundPlace(tuple(cells), choice.victims, (scores[0],), wait_seconds)
            # To the parts that follow, the victims' room is free, and the room of this part is not.
            self._end_in_trial(trial, choice.victims)
            trial.left[cell.id] = subtract_amounts(trial.left.get(cell.id, self.left[cell.id]), need)

        victims = self._spare_victims(unit, pool, cells, trial.victims.values())
        wait_seconds = self._candidates.find_wait(victims)
        return FoundPlace(tuple(cells), victims, tuple(scores[index] for index in range(len(cells))), wait_seconds)

    def _end_in_trial(self, trial: PlaceTrial, victims: Iterable[Unit]) -> None:
        """Add victims to a trial, with what all their parts free."""
        for victim in victims:
            trial.victims[victim.uid] = victim
            # The other parts of a victim free room elsewhere.
            for place, room in self._candidates.list_rooms(victim.uid).items():
                if place in self.cells:
                    trial.left[place] = add_room(trial.left.get(place, self.left[place]), room)

    def _spare_victims(self, unit: Unit, pool: str, cells: Sequence[str], victims: Iterable[Unit]) -> tuple[Unit, ...]:
        """Return the victims without those that are needless: cells and limits have enough without them.

        They were picked one by one, and a later one may have made an earlier one needless.
        """
        kept = {victim.uid: victim for victim in victims}
        # By cell: what the unit needs, and what is left once all victims have ended.
        needs = add_by_cell(unit.parts, cells)
        left = {cell: self.room_with(cell, kept.values()) for cell in needs}
        # By limit: what would still lack then; 0 or less: enough is free. Without entries, no limit is exceeded.
        lacking = dict(self._limits.list_lacking(unit, pool) or {})
        for key in lacking:
            lacking[key] -= sum(self._limits.freed_by(uid, key) for uid in kept)

        # Spare one victim after the other if all is well without it.
        for victim in sorted(kept.values(), key=lambda candidate: self._candidates.spare_order(unit, pool, candidate)):
            freed_by = self._candidates.freed_by
            left_without = {cell: subtract_amounts(left[cell], freed_by(victim.uid, cell)) for cell in needs}
            lacking_without = {key: lack + self._limits.freed_by(victim.uid, key) for key, lack in lacking.items()}
            ending = kept.keys() - {victim.uid}
            has_room = all(
                fits(need, left_without[cell]) and not self.is_promised(unit, need, cell, left_without[cell], ending)
                for cell, need in needs.items()
            )
            if has_room and max(lacking_without.values(), default=0) <= 0:  # neither cells nor limits need this victim
                del kept[victim.uid]
                left, lacking = left_without, lacking_without
        return tuple(kept.values())

    def pick_cell(self, unit: Unit, need: Amounts, pool: str, means: Means, trial: PlaceTrial) -> CellChoice | None:
        """Return the best cell of a pool for one part of a unit, across device classes; None if none has room.

        Most cells are the same to all units of equal needs, so an index of each class has its best. `own_cells` are the
        others, about which this unit differs: they are evaluated one by one.
        """
        # They differ by what earlier parts took, by refusals, by replicas of the service, or by weights there.
        own_cells = {
            *trial.left,
            *unit.refused_by,
            *self._replicas_on.get(unit.service, ()),
            *self._with_weights.get(unit.weights, ()),
        }

        # The best cell of each class; the least key is the best of all.
        best, best_key = None, None
        for device_class in self._classes.get(pool, ()):
            if unit.speeds.refuse(device_class):  # a reason; empty: the service accepts the class
                continue
            index = self._find_index(unit, need, pool, device_class, means)
            choice = self._pick_of_class(unit, need, index, means, trial=trial, own_cells=own_cells)
            if choice is not None and (best_key is None or self.sort_key(unit, choice) < best_key):
                best, best_key = choice, self.sort_key(unit, choice)
        return best

    def _pick_of_class(
        self, unit: Unit, need: Amounts, index: CellIndex, means: Means, *, trial: PlaceTrial, own_cells: set[str]
    ) -> CellChoice | None:
        """Return the best cell of one device class: the best of the index, or one of the unit's `own_cells`."""
        # 1. The best of all other cells, apart from those that are to be skipped or are closed.
        best = index.find_best(own_cells | unit.avoid, lambda cell: self.is_closed_to(unit, cell))
        best_key = None if best is None else self.sort_key(unit, best)

        # 2. Compare the unit's own cells with it, one by one.
        for name in own_cells:
            cell = index.cells.get(name)
            if cell is None or name in unit.avoid or self.is_closed_to(unit, name):
                continue
            left_in_trial = trial.left.get(name)
            if left_in_trial is None:  # no other part of the unit has changed it
                choice = index.find_choice(name)
            else:
                choice = self.evaluate(unit, need, name, means, free=left_in_trial, chosen=trial.victims)
            if choice is not None and (best_key is None or self.sort_key(unit, choice) < best_key):
                best, best_key = choice, self.sort_key(unit, choice)
        return best

    def sort_key(self, unit: Unit, choice: CellChoice) -> tuple[object, ...]:
        """Return the sort key of a cell for a unit: the cost, then as in `CellScore`; the best has the least."""
        name = choice.cell_id
        return (
            choice.cost,
            name in unit.refused_by,
            self._replicas_on.get(unit.service, {}).get(name, 0),
            -choice.points - count_unit_points(unit, self.cells[name]),  # for all units; for this one
            choice.leftover,
            choice.negated_bandwidth,  # the most bandwidth first
            name,
        )

    def evaluate(
        self, unit: Unit, need: Amounts, name: str, means: Means, *, free: Amounts, chosen: Mapping[str, Unit]
    ) -> CellChoice | None:
        """Return a cell as a choice for a part of a unit, or None if it does not fit there by these means.

        `free` is what is left of the cell, with the room of the `chosen` victims of other parts. Means are as in
        `find_place`.
        """
        cell = self.cells[name]
        if means == "free":
            if not fits(need, free) or self.is_promised(unit, need, name, free, chosen):
                return None
            return rate_cell((), need, cell, free)  # an empty cost: no unit is evicted

        # Have other units end, if that makes enough room.
        is_patient = means == "wait"
        if is_patient and not self._candidates.has_young_victims(unit.rank, name):  # to wait would gain nothing
            return None
        room = self._leave_promised(unit, name, free)
        found = find_victims(unit, need, cell, room, self._candidates, chosen=chosen, is_patient=is_patient)
        if found is None:
            return None
        return rate_cell(found.cost, need, cell, free, found.victims)

    def _find_bound(self, unit: Unit, need: Amounts, name: str, cell: Cell, means: Means) -> CellChoice | None:
        """Return a quick estimate, at least as good as a cell's real choice; None if the need certainly cannot fit."""
        free = self.left[name]
        if means == "free":
            cost: tuple[float, ...] | None = () if fits(need, free) else None  # (): no unit is evicted
        else:
            cost = self._candidates.find_bound(unit, need, cell, free, is_patient=means == "wait")
        if cost is None:
            return None
        return rate_cell(cost, need, cell, free)

    def list_device_classes(self, pool: str) -> Iterable[str]:
        """Return the device classes of a pool."""
        return self._classes.get(pool, ())

    def find_free(self, unit: Unit, pool: str, device_class: str, skipped: Iterable[str]) -> CellChoice | None:
        """Return the best cell of a class that is free for a unit of one part, apart from some."""
        index = self._find_index(unit, unit.parts[0], pool, device_class, "free")
        return index.find_best({*skipped, *unit.avoid}, lambda cell: self.is_closed_to(unit, cell))

    def score(self, unit: Unit, name: str, number: int = 0, trial: PlaceTrial | None = None) -> CellScore:
        """Return the score of a cell for one part of a unit."""
        cell = self.cells[name]
        free = trial.left.get(name, self.left[name]) if trial is not None else self.left[name]
        siblings = self._replicas_on.get(unit.service, {}).get(name, 0)
        return score_cell(unit, unit.parts[number], cell, free, siblings)

    def _list_likely(
        self, unit: Unit, need: Amounts, pool: str, cells: Mapping[str, Cell], means: Means
    ) -> Sequence[str]:
        """Return those of the cells on which a need may fit by these means, and that are not closed to the unit."""
        if means == "free":
            names = self.list_roomy(unit, need, pool)
        else:
            names = self._candidates.list_cells(young=means == "wait")  # cells with units that may end (young: later)
        return [name for name in names if name in cells and not self.is_closed_to(unit, name)]

    def _find_index(self, unit: Unit, need: Amounts, pool: str, device_class: str, means: Means) -> CellIndex:
        """Return the index of a pool's cells of one device class, shared by all units to which these are alike."""
        is_home = unit.pools[0] == pool
        # Not `unit.identity`: whether a unit refuses other classes makes no difference on this one.
        kind = unit.requirement.identity  # equal for units that the same cells admit
        key = (kind, need_key(need), pool, device_class, means, unit.rank, unit.is_protected, is_home)
        index = self._indexes.get(key)
        if index is None:
            members = self._classes[pool][device_class]
            cells = {name: cell for name, cell in self._list_open(unit, need, pool).items() if name in members}
            # Both functions look at what is left when they are called; units of the same key get the same answers.
            index = self._indexes[key] = CellIndex(
                cells,
                self._changed_cells,
                lambda name, cell: self._find_bound(unit, need, name, cell, means),  # a quick bound
                lambda name, _: self.evaluate(unit, need, name, means, free=self.left[name], chosen={}),
                self._list_likely(unit, need, pool, cells, means),
            )
        index.refresh()  # cells may have changed since the last look
        return index
