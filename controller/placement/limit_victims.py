"""The units whose end makes room in the limits that hold another one back: only such as count against these limits."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from controller.placement.pool_limits import LimitKey, PoolLimits
from controller.placement.preemption import Candidates
from controller.placement.units import Unit
from crds.meta import PRIORITY_RANK

_LOWEST_RANK: Final = max(PRIORITY_RANK.values())
_MOST: Final = 256
"""Further units of which the search for a place knows that they may end."""


class LimitVictims:
    """The units that count against each limit, in the order in which they should end."""

    def __init__(self, candidates: Candidates, limits: PoolLimits) -> None:
        self._candidates, self._limits = candidates, limits
        self._sorted: dict[LimitKey, Sequence[Unit]] = {}

    def find_first(self, preemptor: Unit, pool: str, *, is_patient: bool) -> list[Unit] | None:
        """Return the first units that together make room in all limits of a pool, or None if all of them do not."""
        lacking = dict(self._limits.list_lacking(preemptor, pool) or {})
        picked: dict[str, Unit] = {}
        for key in list(lacking):
            for victim in self._list_victims(preemptor, key, preemptor.rank + 1, is_patient=is_patient):
                if lacking[key] <= 0:
                    break
                if victim.uid not in picked:
                    picked[victim.uid] = victim
                    for limit_key in lacking:
                        lacking[limit_key] -= self._limits.room_of(victim.uid, limit_key)
            if lacking[key] > 0:
                return None
        return list(picked.values()) or None

    def add_alike(self, preemptor: Unit, pool: str, first: Sequence[Unit], *, is_patient: bool) -> list[Unit]:
        """Return `first` and further units that are no more important, since several of these may be on one cell."""
        running = [unit.rank for unit in first if not self._candidates.is_ending(unit)]
        rank = min(running, default=_LOWEST_RANK + 1)
        by_uid = {unit.uid: unit for unit in first}
        for key in self._limits.list_lacking(preemptor, pool) or ():
            victims = self._list_victims(preemptor, key, rank, is_patient=is_patient)
            by_uid |= {unit.uid: unit for unit in itertools.islice(victims, _MOST)}
        return list(by_uid.values())

    def _list_victims(self, preemptor: Unit, key: LimitKey, rank: int, *, is_patient: bool) -> Iterator[Unit]:
        """Yield the units that free something of a limit: those that end first, then the least important and latest.

        Args:
            preemptor: the unit that waits.
            key: the limit.
            rank: the rank of the most important ones that are yielded.
            is_patient: yield also units that may be evicted later, after all others.
        """
        users = self._sorted.get(key)
        if users is None:
            users = self._sorted[key] = sorted(self._limits.list_users(key), key=self._candidates.order_victims)
        usable = itertools.takewhile(lambda unit: unit.state == "ending" or unit.rank >= rank, users)
        # Those that this round has evicted end already, and cost nothing more.
        ordered: Iterable[Unit] = itertools.chain(self._candidates.list_evicted(), usable)
        if is_patient:
            ordered = sorted(ordered, key=self._candidates.seconds_left)
        for unit in ordered:
            if self._limits.room_of(unit.uid, key) > 0 and self._candidates.may_end(
                preemptor, unit, is_patient=is_patient
            ):
                yield unit
