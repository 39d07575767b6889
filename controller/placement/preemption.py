"""Preemption: the fewest and least important units whose end makes room for one that waits.

Only units of a strictly lower priority are evicted, none that is protected, and none before its minimum run time. A unit
that ends already comes first, because it costs nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from controller.placement.units import Amounts, Cell, Unit


class Victims(NamedTuple):
    """The units that end on one cell for another one."""

    victims: tuple[Unit, ...]
    cost: tuple[int, int, int]
    """Sort key: the importance of the most important one that is evicted, their number, and what is freed in vain."""


class Candidates:
    """The units that hold room, by cell, and which of them may be evicted now."""

    def __init__(self, holding: Iterable[Unit], now: float, min_run_seconds: float) -> None:
        self._now, self._min_run_seconds = now, min_run_seconds
        self._by_cell: dict[str, list[Unit]] = {}
        self._lowest: dict[str, int] = {}
        """By cell, the rank of the least important unit that may be evicted, or that ends already."""
        self._promised: set[str] = set()
        self._ending: set[str] = set()
        """Cells with a unit that ends."""
        self.again_seconds: float | None = None
        """Time after which the first unit may be evicted that is too young for a unit that asked."""
        for unit in holding:
            for cell in dict.fromkeys(unit.cells):
                self._by_cell.setdefault(cell, []).append(unit)
                if unit.state == "ending":
                    self._ending.add(cell)
                elif not unit.is_protected:
                    self._lowest[cell] = max(unit.rank, self._lowest.get(cell, 0))
        for found in self._by_cell.values():
            # The least important first, and of these the one that was admitted last.
            found.sort(key=lambda unit: (unit.state != "ending", -unit.rank, -(unit.evictable_since or 0.0), unit.uid))

    def promise(self, victim: Unit) -> None:
        """Give the room of a unit to one that waits: it makes none for others."""
        self._promised.add(victim.uid)

    def is_promised(self, uid: str) -> bool:
        """Return whether the room of a unit is for another one already."""
        return uid in self._promised

    def may_evict(self, preemptor: Unit, victim: Unit) -> bool:
        """Return whether a unit may have another one evicted now."""
        if victim.rank <= preemptor.rank or victim.is_protected:
            return False
        age_seconds = self._now - (victim.evictable_since or 0.0)
        # A clock that jumped back must not protect a unit for ever.
        if 0 <= age_seconds < self._min_run_seconds:
            left = self._min_run_seconds - age_seconds
            self.again_seconds = left if self.again_seconds is None else min(left, self.again_seconds)
            return False
        return True

    def has_victims(self, preemptor: Unit, cell: str) -> bool:
        """Return whether a cell may have a unit that makes room, without a look at each."""
        return cell in self._ending or self._lowest.get(cell, -1) > preemptor.rank

    def list_victims(self, preemptor: Unit, cell: str) -> Sequence[Unit]:
        """Return the units of a cell that end, or may be evicted for another, in the order in which they should."""
        return [
            unit
            for unit in self._by_cell.get(cell, ())
            if unit.uid not in self._promised and (unit.state == "ending" or self.may_evict(preemptor, unit))
        ]


def find_victims(
    preemptor: Unit,
    need: Amounts,
    cell: Cell,
    free: Amounts,
    candidates: Candidates,
    chosen: Mapping[str, Unit],
) -> Victims | None:
    """Return the minimal units that make room for a need on a cell, or None if all of them together do not.

    Args:
        preemptor: the unit that waits.
        need: what one part of it needs.
        cell: the cell.
        free: what is left of the cell.
        candidates: the units that hold room.
        chosen: units that end for another part of the same unit, by uid; their room is in `free`.
    """
    lacking = {name: amount - free.get(name, 0) for name, amount in need.items() if name in free or "/" in name}
    picked: list[tuple[Unit, Amounts]] = []
    for victim in candidates.list_victims(preemptor, cell.id):
        if all(amount <= 0 for amount in lacking.values()):
            break
        if victim.uid in chosen:
            continue
        freed = _freed_on(victim, cell.id)
        if all(freed.get(name, 0) <= 0 for name, amount in lacking.items() if amount > 0):
            continue
        picked.append((victim, freed))
        lacking = {name: amount - freed.get(name, 0) for name, amount in lacking.items()}
    if any(amount > 0 for amount in lacking.values()):
        return None
    # A larger one that was picked later may make earlier ones needless; the most important is spared first.
    for victim, freed in sorted(picked, key=lambda each: (each[0].state == "ending", each[0].rank, each[0].uid)):
        back = {name: amount + freed.get(name, 0) for name, amount in lacking.items()}
        if all(amount <= 0 for amount in back.values()):
            picked.remove((victim, freed))
            lacking = back
    evicted = [victim for victim, _ in picked if victim.state != "ending"]
    importance = -min((victim.rank for victim in evicted), default=len(need) + 99)
    in_vain = -sum(amount for name, amount in lacking.items() if "/" in name)
    return Victims(tuple(victim for victim, _ in picked), (importance, len(evicted), in_vain))


def _freed_on(victim: Unit, cell: str) -> Amounts:
    if victim.cells == (cell,):
        return victim.parts[0]
    freed: dict[str, int] = {}
    for part, place in zip(victim.parts, victim.cells, strict=False):
        if place == cell:
            for name, amount in part.items():
                freed[name] = freed.get(name, 0) + amount
    return freed
