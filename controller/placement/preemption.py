"""Preemption: the fewest and least important units whose end makes room for one that waits.

Only units of a strictly lower priority are evicted, none that is protected, and none before its minimum run time. A
unit that ends already comes first, because it costs nothing; then, for a unit at home in the pool, one that borrows. A
unit that is at home where it runs is evicted for others of the same home only: one that borrows evicts borrowers alone.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from controller.placement.pool_limits import is_borrowed
from controller.placement.units import NOTHING, Amounts, Cell, Unit, subtract_amounts
from crds.meta import PRIORITY_RANK
from crds.size import divide_up
from devices.vendors import CLAIMED

_HIGHEST: Final = min(PRIORITY_RANK, key=PRIORITY_RANK.__getitem__)
_NO_RANK: Final = len(PRIORITY_RANK)
"""Rank below all priorities: no unit is evicted."""


class Victims(NamedTuple):
    """The units that end on one cell for another one."""

    victims: tuple[Unit, ...]
    cost: tuple[float, int, int, int, int]
    """Sort key: seconds until all may be evicted, then whether one is at home in the pool, the importance of the most
    important one that is evicted, their number, and the devices that are freed in vain."""


class _Yield(NamedTuple):
    """The room that the units of a cell could give in all."""

    has_ending: bool
    sums: Mapping[str, int]
    """Sum by resource."""
    largest: Mapping[str, int]
    """Most of a resource that one of them gives."""


class Candidates:
    """The units that hold room, by cell, which of them may be evicted now, and whose room is promised already."""

    def __init__(self, holding: Iterable[Unit], pools: Mapping[str, str], now: float, min_run_seconds: float) -> None:
        """Take the units that hold room.

        Args:
            holding: the units.
            pools: by `Unit.uid`, the pool in which each is.
            now: the wall clock, in seconds since 1970.
            min_run_seconds: the time for which a unit is not evicted after its start.
        """
        self._now, self._min_run_seconds, self._pools = now, min_run_seconds, pools

        # The units, and what the end of each would free.
        self._by_cell: dict[str, list[Unit]] = {}
        """By `Cell.id`, the units that hold room there, in the order in which they should be evicted."""
        self._room: dict[str, dict[str, Amounts]] = {}
        """By `uid`, what a unit frees on each cell and is not promised yet."""
        self._largest_rank: dict[str, int] = {}
        """By cell, the rank of the least important unit that may be evicted; of one that ends, `_NO_RANK`."""

        # What `promise` has promised in this round.
        self._evicted: dict[str, Unit] = {}
        """Units that this round has evicted: they end, and what is left of their room makes room for others."""
        self._replaced: set[str] = set()
        """Units whose whole room is for their successor."""

        # Units that may not be evicted yet.
        self._seconds_left: dict[str, float] = {}
        """By `uid`, the time for which a young unit may not be evicted yet."""
        self._largest_young_rank: dict[str, int] = {}
        """By cell, the rank of the least important unit that may be evicted once it has run for long enough."""

        self._yields: dict[str, dict[tuple[int, bool, bool], _Yield]] = {}
        """By cell, then by rank, borrowing and patience of the preemptor: what all its victims there would free."""
        for unit in holding:
            self._add(unit)
        for units in self._by_cell.values():
            units.sort(key=self.order_victims)

    def _add(self, unit: Unit) -> None:
        """Note what a unit frees on each cell, how important it is, and for how long it may not be evicted yet.

        A unit within its minimum run time is called young.
        """
        # The larger a rank, the less important is the unit. `freed` is empty unless the cell of each part is known.
        # A cell's value below is thus the largest rank there: that of its least important unit.
        room_by_cell = self._room[unit.uid] = unit.freed
        for cell in room_by_cell:
            self._by_cell.setdefault(cell, []).append(unit)
            if unit.state == "ending":  # its room is for any: `_NO_RANK` is above all ranks
                self._largest_rank[cell] = _NO_RANK
            elif not unit.is_protected:
                self._largest_rank[cell] = max(unit.rank, self._largest_rank.get(cell, 0))

        # Without a time, a unit is not bound yet and has loaded nothing: it has no minimum run time.
        if unit.state != "running" or unit.evictable_since is None:
            return
        age_seconds = self._now - unit.evictable_since
        # The clocks of two machines differ a little; one that jumped back must not protect a unit for ever.
        if abs(age_seconds) < self._min_run_seconds:
            self._seconds_left[unit.uid] = self._min_run_seconds - age_seconds
            if not unit.is_protected:
                for cell in room_by_cell:
                    self._largest_young_rank[cell] = max(unit.rank, self._largest_young_rank.get(cell, 0))

    def is_ending(self, unit: Unit) -> bool:
        """Return whether a unit ends anyway."""
        return unit.state == "ending" or unit.uid in self._evicted

    @staticmethod
    def order_victims(unit: Unit) -> tuple[bool, int, float, str]:
        """Return a sort key: the least important first, and of these the one that was admitted last."""
        return unit.state != "ending", -unit.rank, -(unit.evictable_since or 0.0), unit.uid

    def list_evicted(self) -> Iterable[Unit]:
        """Return the units that this round has evicted."""
        return self._evicted.values()

    def is_promised(self, uid: str) -> bool:
        """Return whether a unit ends for another one already."""
        return uid in self._evicted or uid in self._replaced

    def is_replaced(self, uid: str) -> bool:
        """Return whether the whole room of a unit is for its successor."""
        return uid in self._replaced

    @property
    def has_young(self) -> bool:
        """Return whether there is a unit that may be evicted later."""
        return bool(self._largest_young_rank)

    def freed_by(self, uid: str, cell: str) -> Amounts:
        """Return what the end of a unit frees on a cell, apart from what is promised to others already."""
        return NOTHING if uid in self._replaced else self._room[uid].get(cell, NOTHING)

    def list_rooms(self, uid: str) -> Mapping[str, Amounts]:
        """Return what the end of a unit frees and is promised to no other one, by cell."""
        return {} if uid in self._replaced else self._room[uid]

    def promise(self, victim: Unit, claimed: Mapping[str, Amounts], *, is_replaced: bool = False) -> Iterable[str]:
        """Promise part of a victim's room to a waiting unit; a running victim counts as evicted from then on.

        Returns the cells whose free room may change.

        Args:
            victim: the unit that ends.
            claimed: what the waiting unit gets of its room, by cell.
            is_replaced: the waiting unit is its successor in a rollout: the rest of the room is for that as well.
        """
        # What is claimed is no room for others any more.
        room_by_cell = self._room[victim.uid]
        for cell, amounts in claimed.items():
            room_by_cell[cell] = subtract_amounts(room_by_cell[cell], amounts)

        if is_replaced:
            self._replaced.add(victim.uid)
        elif victim.state == "running" and victim.uid not in self._evicted:
            self._evicted[victim.uid] = victim
            for cell in room_by_cell:
                self._largest_rank[cell] = _NO_RANK
                # It comes before all that do not end; the order of the others stays as it is.
                self._by_cell[cell].sort(key=lambda unit: not self.is_ending(unit))

        # The sums that were kept for these cells hold no longer.
        for cell in room_by_cell:
            self._yields.pop(cell, None)
        return room_by_cell

    def find_bound(
        self, preemptor: Unit, need: Amounts, cell: Cell, free: Amounts, *, is_patient: bool
    ) -> tuple[float, int, int, int, int] | None:
        """Return a cost that the victims for a need on a cell cannot be below, without choosing them.

        The sums of all that may end there are kept, so this is fast, unlike `find_victims`. None if even all of them
        together do not make room. The cost has the form of `Victims.cost`; `is_patient` counts also units that may be
        evicted later.
        """
        if not self.has_victims(preemptor.rank, cell.id):
            return None

        # 1. The sums of what all possible victims on the cell free; kept for preemptors that are alike in this key.
        yields = self._yields.setdefault(cell.id, {})
        key = preemptor.rank, is_borrowed(preemptor, cell.pool), is_patient
        yielded = yields.get(key)
        if yielded is None:
            yielded = yields[key] = self._sum_yield(preemptor, cell.id, is_patient=is_patient)

        # 2. If each victim freed as much as the largest one, this many would do: there cannot be fewer.
        fewest_victims = 1
        for name, amount in need.items():
            lacking = amount - free.get(name, amount)  # what the cell does not count never lacks
            if lacking <= 0:
                continue
            if lacking > yielded.sums.get(name, 0):
                return None
            largest = yielded.largest[name]
            fewest_victims = max(fewest_victims, divide_up(lacking, largest))

        # 3. As `Victims.cost`, with the least that is possible: no wait, none at home, no device freed in vain.
        # If a unit there ends anyway, even no eviction might be needed.
        fewest_evicted = 0 if yielded.has_ending else fewest_victims
        return 0.0, 0, -self._largest_rank[cell.id], fewest_evicted, 0

    def priority_helps(self, unit: Unit, cells: Mapping[str, Cell], left: Mapping[str, Amounts]) -> bool:
        """Return whether a higher priority would help a unit: others on one of the cells might make room for it.

        Those that may be evicted only later count as well. False if the unit has the highest priority already.
        """
        if unit.rank == PRIORITY_RANK[_HIGHEST]:
            return False
        highest = msgspec.structs.replace(unit, priority=_HIGHEST)
        return any(
            self.find_bound(highest, part, cells[name], left[name], is_patient=True) is not None
            for name in self._largest_rank  # cells with a unit that ends or may be evicted
            if name in cells
            for part in unit.parts
        )

    def _sum_yield(self, preemptor: Unit, cell: str, *, is_patient: bool) -> _Yield:
        """Return what all units that could end for a preemptor free on a cell together, and the most that one frees."""
        sums: dict[str, int] = {}
        largest: dict[str, int] = {}
        has_ending = False
        for unit in self._by_cell.get(cell, ()):
            if not self.may_end(preemptor, unit, is_patient=is_patient):
                continue
            has_ending = has_ending or self.is_ending(unit)
            for name, amount in self.freed_by(unit.uid, cell).items():
                sums[name] = sums.get(name, 0) + amount
                largest[name] = max(amount, largest.get(name, 0))
        return _Yield(has_ending, sums, largest)

    def seconds_left(self, victim: Unit) -> float:
        """Return the time for which a unit may not be evicted yet."""
        return self._seconds_left.get(victim.uid, 0.0)

    def may_evict(self, preemptor: Unit, victim: Unit) -> bool:
        """Return whether `preemptor` may evict `victim` now."""
        return (
            victim.rank > preemptor.rank
            and not victim.is_protected
            and victim.uid not in self._seconds_left
            and not self._is_safe_at_home(victim, preemptor)
        )

    def _is_safe_at_home(self, victim: Unit, preemptor: Unit) -> bool:
        """Return whether the victim is at home in its pool and the preemptor is not, so that it may not be evicted."""
        pool = self._pools[victim.uid]
        return not is_borrowed(victim, pool) and is_borrowed(preemptor, pool)

    def may_end(self, preemptor: Unit, victim: Unit, *, is_patient: bool) -> bool:
        """Return whether a unit ends anyway or may be evicted for `preemptor`: now, or later if `is_patient`.

        False if its whole room is for its successor already.
        """
        if victim.uid in self._replaced:
            return False
        if self.is_ending(victim):
            return True
        if victim.rank <= preemptor.rank or victim.is_protected or self._is_safe_at_home(victim, preemptor):
            return False
        return is_patient or victim.uid not in self._seconds_left

    def find_wait(self, victims: Iterable[Unit]) -> float:
        """Return the time until all of these units may be evicted."""
        return max((self.seconds_left(victim) for victim in victims if not self.is_ending(victim)), default=0.0)

    def has_victims(self, rank: int, cell: str) -> bool:
        """Return whether a cell may have a victim for this rank, from counts alone."""
        return self._largest_rank.get(cell, -1) > rank

    def has_young_victims(self, rank: int, cell: str) -> bool:
        """Return whether a cell may have a victim for this rank once its least run time is over."""
        return self._largest_young_rank.get(cell, -1) > rank

    def list_cells(self, *, young: bool) -> Collection[str]:
        """Return the cells with possible victims, or with those that may be evicted only later (`young`)."""
        return self._largest_young_rank if young else self._largest_rank

    def list_victims(self, preemptor: Unit, cell: Cell, *, is_patient: bool) -> Sequence[Unit]:
        """Return the possible victims on a cell, in the order in which they should be evicted.

        First those that end anyway, then those that may be evicted now, then later. Of each, the least important come
        first; but if the preemptor is at home in the pool, units that borrow there come before those at home.
        """
        units = self._by_cell.get(cell.id, ())
        # `_by_cell` is in this order already, apart from units at home and those that may be evicted only later.
        usable = [unit for unit in units if self.may_end(preemptor, unit, is_patient=is_patient)]

        is_at_home = not is_borrowed(preemptor, cell.pool)
        if is_patient or (is_at_home and any(is_borrowed(unit, cell.pool) for unit in usable)):
            # False comes first; units that are alike stay in their order.
            usable.sort(
                key=lambda unit: (
                    not self.is_ending(unit),  # those that end anyway
                    unit.uid in self._seconds_left,  # those that may be evicted now
                    is_at_home and not is_borrowed(unit, cell.pool),  # those that borrow
                )
            )
        return usable

    def spare_order(self, preemptor: Unit, pool: str, victim: Unit) -> tuple[bool, float, bool, int, float, str]:
        """Return the sort key of a victim: needless victims are spared in this order.

        First those that would not end otherwise, of these those that may be evicted last, then those at home in the
        pool if the preemptor is, too, then the most important, and then those that were admitted first.
        """
        return (
            self.is_ending(victim),  # False comes first
            -self.seconds_left(victim),  # the longest wait first
            not is_borrowed(preemptor, pool) and is_borrowed(victim, pool),  # False: at home
            victim.rank,  # the most important first
            victim.evictable_since or 0.0,
            victim.uid,
        )


NO_CANDIDATES: Final = Candidates((), {}, now=0.0, min_run_seconds=0.0)


def claim_room(need: Amounts, room: Amounts) -> dict[str, int]:
    """Return what a need claims of the room that a victim frees; it may be less than the need.

    A claimed device counts for each need that it meets, so that it is gone for all of these.
    """
    claim = {name: max(0, min(amount, room.get(name, 0))) for name, amount in need.items()}
    # CLAIMED ends each name that counts devices of a ResourceClaim, such as gpu.nvidia.com/[any].
    number = sum(amount for name, amount in claim.items() if name.endswith(CLAIMED))
    if number:
        claim |= {name: min(number, amount) for name, amount in room.items() if name.endswith(CLAIMED)}
    return claim


def find_victims(
    preemptor: Unit,
    need: Amounts,
    cell: Cell,
    free: Amounts,
    candidates: Candidates,
    *,
    chosen: Container[str] = (),
    is_patient: bool = False,
) -> Victims | None:
    """Return the units that should end so that a need fits on a cell; None if all of them together are too few.

    Units are picked in the order of `list_victims`, and needless ones are spared again. The cost says how bad that is.

    Args:
        preemptor: the unit that waits.
        need: what one part of it needs.
        cell: the cell.
        free: what is left of the cell.
        candidates: the units that hold room.
        chosen: `uid` of units that end for another part of the same unit; their room is in `free`.
        is_patient: take also units that may be evicted later.
    """
    if not candidates.has_victims(preemptor.rank, cell.id):
        return None

    # 1. Pick units in their order until nothing lacks any more. What the cell does not count is no obstacle.
    lacking = {name: amount - free[name] for name, amount in need.items() if amount > 0 and name in free}
    short = {name for name, amount in lacking.items() if amount > 0}  # what is missing still
    picked: list[tuple[Unit, Amounts]] = []  # each with what it frees on this cell
    for victim in candidates.list_victims(preemptor, cell, is_patient=is_patient):
        if not short:
            break
        freed = candidates.freed_by(victim.uid, cell.id)
        if victim.uid in chosen or all(freed.get(name, 0) <= 0 for name in short):
            continue
        picked.append((victim, freed))
        for name in lacking:
            lacking[name] -= freed.get(name, 0)
        short = {name for name in short if lacking[name] > 0}
    if short:
        return None

    # 2. Spare those that are needless: a larger one that was picked later may make up for earlier ones.
    if len(picked) > 1:
        for pick in sorted(picked, key=lambda entry: candidates.spare_order(preemptor, cell.pool, entry[0])):
            _victim, freed = pick
            lacking_without = {name: amount + freed.get(name, 0) for name, amount in lacking.items()}
            if all(amount <= 0 for amount in lacking_without.values()):
                picked.remove(pick)
                lacking = lacking_without

    # 3. Rate them. What lacks is zero or negative by now: the negative is what they free in vain.
    evicted = [victim for victim, _ in picked if not candidates.is_ending(victim)]
    is_at_home = not is_borrowed(preemptor, cell.pool)
    evicts_at_home = is_at_home and any(not is_borrowed(victim, cell.pool) for victim in evicted)
    highest_rank = min((victim.rank for victim in evicted), default=_NO_RANK)
    wasted_devices = -sum(amount for name, amount in lacking.items() if "/" in name)  # a `/`: a device
    cost = (candidates.find_wait(evicted), int(evicts_at_home), -highest_rank, len(evicted), wasted_devices)
    return Victims(tuple(victim for victim, _ in picked), cost)
