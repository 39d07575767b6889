"""The units whose end makes room in the limits that hold another one back: only such as count against these limits."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from controller.placement.pool_limits import LimitKey, PoolLimits
from controller.placement.preemption import Candidates
from controller.placement.units import Unit
from crds.meta import PRIORITY_RANK

_LOWEST_RANK: Final = max(PRIORITY_RANK.values())
_MOST_FURTHER: Final = 256
"""Further units of each limit of which the search for a place knows that they may end."""


class LimitVictims:
    """The units that count against each limit, in the order in which they should end."""

    def __init__(self, candidates: Candidates, limits: PoolLimits) -> None:
        """Choose among the units that hold room (`candidates`), by what they use of the limits."""
        self._candidates, self._limits = candidates, limits
        self._sorted_users: dict[LimitKey, Sequence[Unit]] = {}
        """By limit, the units that count against it, in the order in which they should end."""

    def find_first(self, preemptor: Unit, pool: str, *, is_patient: bool) -> list[Unit] | None:
        """Return the units that should end so that a waiting unit is within all limits of a pool, in this order.

        Each is of lower priority than the waiting unit, or ends anyway. None if nothing lacks, if the end of others
        does not help, or if all units that may end free too little.

        Args:
            preemptor: the unit that waits.
            pool: the pool.
            is_patient: count also units that may be evicted only later, when their minimum run time is over.
        """
        # By limit, how much others must free of it; None: no end of others helps; empty: nothing lacks.
        lacking_by_limit = self._limits.list_lacking(preemptor, pool)
        if not lacking_by_limit:
            return None

        still_lacking = dict(lacking_by_limit)  # what the picked units do not free yet
        picked: dict[str, Unit] = {}  # by uid
        less_important_rank = preemptor.rank + 1  # the larger a rank, the less important is the unit
        for key in lacking_by_limit:
            # Pick units that count against this limit until enough of it is free.
            for victim in self._list_victims(preemptor, key, less_important_rank, is_patient=is_patient):
                if still_lacking[key] <= 0:
                    break
                if victim.uid in picked:
                    continue
                picked[victim.uid] = victim
                # A unit that was picked for one limit may free something of the others, too.
                for limit_key in still_lacking:
                    still_lacking[limit_key] -= self._limits.freed_by(victim.uid, limit_key)

            # All of them together free too little of this limit.
            if still_lacking[key] > 0:
                return None
        return list(picked.values())

    def add_further(self, preemptor: Unit, pool: str, first: Sequence[Unit], *, is_patient: bool) -> list[Unit]:
        """Return `first`, and further units that may end, too: the search for a cell may choose among them.

        Those that do not end anyway are no more important than the most important of `first` that is evicted. Several
        of them may be on one cell, so that it becomes free without harm to others. If all of `first` end anyway, only
        units that end anyway are added.
        """
        evicted_ranks = [unit.rank for unit in first if not self._candidates.is_ending(unit)]
        # If all of them end anyway, only further units that end anyway are added.
        rank = min(evicted_ranks, default=_LOWEST_RANK + 1)
        by_uid = {unit.uid: unit for unit in first}
        for key in self._limits.list_lacking(preemptor, pool) or ():
            victims = self._list_victims(preemptor, key, rank, is_patient=is_patient)
            by_uid |= {unit.uid: unit for unit in itertools.islice(victims, _MOST_FURTHER)}
        return list(by_uid.values())

    def _list_victims(self, preemptor: Unit, key: LimitKey, rank: int, *, is_patient: bool) -> Iterator[Unit]:
        """Yield the units whose end frees something of a limit: first those that end anyway, then the least important.

        Args:
            preemptor: the unit that waits.
            key: the limit.
            rank: the rank of the most important units that are yielded; the larger a rank, the less important is a
                unit.
            is_patient: yield also units that may be evicted only later, after all others.
        """
        # 1. The units that count against the limit, sorted once: first those that end anyway, then the least important,
        # of these the latest first. The list is cut before the first unit that is too important.
        users = self._sorted_users.get(key)
        if users is None:
            users = self._sorted_users[key] = sorted(self._limits.list_users(key), key=self._candidates.order_victims)
        usable = itertools.takewhile(lambda unit: unit.state == "ending" or unit.rank >= rank, users)

        # 2. Units that this round has evicted end already, and cost nothing more: they come first.
        ordered: Iterable[Unit] = itertools.chain(self._candidates.list_evicted(), usable)
        if is_patient:
            # By the seconds until each may be evicted; the order stays among those that may be now (0 seconds).
            ordered = sorted(ordered, key=self._candidates.seconds_left)

        # 3. Leave out those that free nothing of this limit, or may not end for the preemptor.
        for unit in ordered:
            if self._limits.freed_by(unit.uid, key) > 0 and self._candidates.may_end(
                preemptor, unit, is_patient=is_patient
            ):
                yield unit
