"""Limits of pools: what their own units use, what they lend and borrow, and the quotas of namespaces.

The home of a unit is the first of its pools; outside its home it is borrowed. Amounts are devices on nodes and bytes of
memory on hosts. A limit counts what runs and what is promised. One that is below what runs admits nothing more. Units
that count against a limit may end for a more important one that it holds back: `limit_victims.py` finds them.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from controller.placement.units import MEMORY, Amounts, Cell, HostRequirement, NodeRequirement, Unit
from crds.acceleratorpool import EACH_NAMESPACE
from crds.size import size_text

LimitReason = Literal["Quota", "Nominal", "Lending", "Borrowing"]
PoolReason = Literal["InvalidSpec", "NoCell", "Overlap", "LimitTooHigh", "LimitExceeded"]
"""Kind of a contradiction. LimitExceeded: more runs than a limit allows, which admits nothing more."""
Measure = Literal["devices", "memory"]
DEVICES: Final[Measure] = "devices"


class PoolRules(NamedTuple):
    """The administrator's rules for a pool; None: no limit."""

    nominal: int | None = None
    """Amount that units at home in this pool use of it at most."""
    borrowing_limit: int | None = None
    """Amount that units at home in this pool use of all other pools at most."""
    lending_limit: int | None = None
    """Amount that units of other homes use of this pool at most."""
    elastic: int = 0
    """Number of units that may wait at once for a node which an autoscaler adds; 0: the pool has a fixed size."""
    node_labels: tuple[tuple[str, str], ...] = ()
    """Labels that a node of this pool has."""
    overcommit_percent: int = 100
    """Memory that pods on one time-sliced device may take together, in percent."""


class PoolQuota(NamedTuple):
    """The limits of a namespace in a pool; None: no limit."""

    devices: int | None = None
    memory_bytes: int | None = None


Quotas = Mapping[tuple[str, str], PoolQuota]
"""Quotas by namespace and pool; `EACH_NAMESPACE` stands for each namespace without one of its own there."""


class LimitKey(NamedTuple):
    """Identity of one limit."""

    reason: LimitReason
    owner: str
    """The pool; of a quota, namespace and pool."""
    measure: Measure


class LimitRefusal(NamedTuple):
    """The limit that holds a unit back."""

    key: LimitKey
    allowed: int
    used: int
    needed: int

    @property
    def reason(self) -> LimitReason:
        """Return the kind of the limit."""
        return self.key.reason

    @property
    def could_ever_fit(self) -> bool:
        """Return whether the limit has room for the unit once nothing else counts."""
        return self.needed <= self.allowed


class _KeptAmounts:
    """The amounts of a limit that are kept for waiting units, in the order of the queue."""

    def __init__(self) -> None:
        """Start with nothing kept."""
        self._orders: list[tuple[int, float, str]] = []
        self._sums: list[int] = []
        """Sum up to each of them."""

    def add(self, unit: Unit, amount: int) -> None:
        """Keep an amount for a unit that is behind all for which something is kept."""
        self._orders.append(unit.order)
        sum_before = self._sums[-1] if self._sums else 0
        self._sums.append(sum_before + amount)

    def sum_ahead(self, unit: Unit) -> int:
        """Return what is kept for units that are ahead of this one."""
        number_ahead = bisect.bisect_left(self._orders, unit.order)
        return self._sums[number_ahead - 1] if number_ahead else 0


class PoolLimits:
    """The use of each limit in one round."""

    def __init__(
        self, pools: Mapping[str, PoolRules] = MappingProxyType({}), quotas: Quotas = MappingProxyType({})
    ) -> None:
        """Start with limits of which nothing is used.

        Args:
            pools: the rules of each pool.
            quotas: the limits of namespaces.
        """
        self._pools, self._quotas = pools, quotas

        # What is used or spoken for: `add_holder`, `add`, `hold` and `keep` count it.
        self._used: dict[LimitKey, int] = {}
        """Amounts that units with a place, or with a promise of one, use of each limit."""
        self._reserved: dict[LimitKey, tuple[int, float, str]] = {}
        """Limits whose rest is reserved for a unit that waits, with its order in the queue: a later one that is smaller
        may not pass, or it would wait for ever."""
        self._kept: dict[LimitKey, _KeptAmounts] = {}
        """Amounts that waiting units need of each limit, by order of the queue: kept for them against later ones."""
        self._users: dict[LimitKey, list[Unit]] = {}
        """Units with a place that count against each limit."""
        self._rooms: dict[str, dict[LimitKey, int]] = {}
        """By `uid`, what the end of a unit frees of each limit and is promised to no other one."""

    @property
    def by_namespace(self) -> bool:
        """Return whether the namespace of a unit matters."""
        return bool(self._quotas)

    def add_holder(self, unit: Unit, pool: str) -> None:
        """Count the use of a unit that has a place in a pool; its end can make room in the limits for another one."""
        for key, _, amount in self._list_limits(unit, pool):
            self._used[key] = self._used.get(key, 0) + amount
            if amount > 0:
                self._users.setdefault(key, []).append(unit)
                self._rooms.setdefault(unit.uid, {})[key] = amount

    def add(self, unit: Unit, pool: str, victims: Iterable[Unit] = ()) -> None:
        """Count a unit that gets a place in a pool, or is promised one.

        What its victims free of each limit covers its need first, and counts for no other unit from then on; the rest
        is new use.
        """
        for key, _, needed in self._list_limits(unit, pool):
            lacking = needed
            for victim in victims:
                room = self.freed_by(victim.uid, key)
                if (claimed := min(lacking, room)) > 0:
                    self._rooms[victim.uid][key] = room - claimed
                    lacking -= claimed
            self._used[key] = self._used.get(key, 0) + lacking

    def find_refusal(self, unit: Unit, pool: str, leaving: Iterable[Unit] = ()) -> LimitRefusal | None:
        """Return the limit that keeps a unit out of a pool, or None.

        A limit refuses a unit that needs more than is left, counting units with a place or a promise of one. It also
        refuses one that would take what is left from a unit ahead, for which it is kept or reserved: unless it needs no
        more than it replaces.

        Args:
            unit: the unit.
            pool: the pool.
            leaving: units that end for it, or that it replaces: what they use counts no more.
        """
        refusal: LimitRefusal | None = None
        for key, allowed, amount in self._list_limits(unit, pool):
            # `leaving` frees two kinds of room: that of units that it replaces is its own, that of victims is not.
            from_replaced = sum(self.freed_by(other.uid, key) for other in leaving if other.uid in unit.replaces)
            from_victims = sum(self.freed_by(other.uid, key) for other in leaving if other.uid not in unit.replaces)
            used = self._used.get(key, 0) - from_replaced - from_victims

            # 1. The limit is lower than the need. No end of other units helps: this refusal outranks the others.
            if amount > allowed:
                return LimitRefusal(key, allowed=allowed, used=used, needed=amount)

            # 2. Too little is left, or what is left is for a unit ahead. The first such limit is returned.
            is_kept = self._is_reserved(key, unit) or used + self._sum_kept(key, unit) + amount > allowed
            # A unit that takes no more than those that it replaces overtakes nobody.
            overtakes = is_kept and amount > from_replaced
            if refusal is None and amount > 0 and (used + amount > allowed or overtakes):
                refusal = LimitRefusal(key, allowed=allowed, used=used, needed=amount)
        return refusal

    def exceeds(self, unit: Unit, pool: str) -> bool:
        """Return whether a unit alone exceeds a limit of a pool."""
        return any(amount > allowed for _, allowed, amount in self._list_limits(unit, pool))

    def list_lacking(self, unit: Unit, pool: str) -> Mapping[LimitKey, int] | None:
        """Return how much of each exceeded limit must be freed for a unit; empty if none is exceeded.

        None if freeing cannot help: a limit allows less than the unit needs, or what is freed is reserved for a unit
        ahead.
        """
        lacking: dict[LimitKey, int] = {}
        for key, allowed, amount in self._list_limits(unit, pool):
            if amount > allowed or (amount > 0 and self._is_reserved(key, unit)):
                return None
            lack = self._used.get(key, 0) + self._sum_kept(key, unit) + amount - allowed
            if amount > 0 and lack > 0:
                lacking[key] = lack
        return lacking

    def list_users(self, key: LimitKey) -> Sequence[Unit]:
        """Return the units with a place that count against a limit."""
        return self._users.get(key, ())

    def freed_by(self, uid: str, key: LimitKey) -> int:
        """Return what the end of a unit frees of a limit, apart from what is promised to others already."""
        return self._rooms[uid].get(key, 0) if uid in self._rooms else 0

    def _is_reserved(self, key: LimitKey, unit: Unit) -> bool:
        """Return whether a unit that is ahead waits for what is left of a limit."""
        return key in self._reserved and self._reserved[key] < unit.order

    def _sum_kept(self, key: LimitKey, unit: Unit) -> int:
        """Return what is kept of a limit for waiting units that are ahead of this one."""
        return self._kept[key].sum_ahead(unit) if key in self._kept else 0

    def count_room(self, unit: Unit, pool: str, most: int) -> int:
        """Return the number of units like this one, at most `most`, for which all limits of a pool have room.

        What is kept for waiting units that are ahead is no room, and a limit that one of them has reserved has none at
        all.
        """
        for key, allowed, amount in self._list_limits(unit, pool):
            if amount > 0:
                if self._is_reserved(key, unit):
                    return 0
                left = allowed - self._used.get(key, 0) - self._sum_kept(key, unit)
                most = max(0, min(most, left // amount))
        return most

    def is_elastic(self, pool: str) -> bool:
        """Return whether an autoscaler adds nodes to a pool."""
        return self._pools.get(pool, _UNLIMITED).elastic > 0

    def keep(self, unit: Unit, pool: str, *, is_shared: bool) -> None:
        """Keep for a waiting unit what it needs of the limits of a pool; call it for units in the order of the queue.

        Else it might wait for ever: units that pass it use up the limit, and may be evicted only later, or never.

        Args:
            unit: the unit.
            pool: the pool.
            is_shared: whether it lacks room alone: then limits that other namespaces share are kept, too.
        """
        for key, _, amount in self._list_limits(unit, pool):
            if is_shared or key.reason == "Quota":
                self._kept.setdefault(key, _KeptAmounts()).add(unit, amount)

    def hold(self, unit: Unit, key: LimitKey) -> None:
        """Reserve what is left of a limit, which refused this unit, against all later units."""
        self._reserved.setdefault(key, unit.order)

    def _list_limits(self, unit: Unit, pool: str) -> Iterator[tuple[LimitKey, int, int]]:
        """Yield each limit that counts a unit in a pool, with the amounts that it allows and that the unit needs.

        Besides quotas of its namespace, these are: in its home, the first of its pools, Nominal; in any other pool,
        Lending (what that pool lends) and Borrowing (what its home borrows of all others).
        """
        if not self._pools and not self._quotas:
            return

        # 1. The quota of its namespace.
        namespace = unit.key.namespace
        # EACH_NAMESPACE: the quota of each namespace that has none of its own in this pool.
        quota = self._quotas.get((namespace, pool)) or self._quotas.get((EACH_NAMESPACE, pool))
        if quota is not None:
            owner = f"{namespace}/{pool}"
            if quota.devices is not None:
                yield LimitKey("Quota", owner, DEVICES), quota.devices, sum_amounts(unit.parts, DEVICES)
            if quota.memory_bytes is not None:
                yield LimitKey("Quota", owner, MEMORY), quota.memory_bytes, sum_amounts(unit.parts, MEMORY)

        # 2. The limits of pools. Hosts are limited by memory, nodes by devices.
        measure: Measure = MEMORY if isinstance(unit.requirement, HostRequirement) else DEVICES
        home = unit.pools[0] if unit.pools else pool
        rules, home_rules = self._pools.get(pool, _UNLIMITED), self._pools.get(home, _UNLIMITED)
        limits: list[tuple[LimitReason, str, int | None]] = (
            [("Nominal", pool, rules.nominal)]
            if pool == home
            else [("Lending", pool, rules.lending_limit), ("Borrowing", home, home_rules.borrowing_limit)]
        )
        for reason, owner, allowed in limits:
            if allowed is not None:
                yield LimitKey(reason, owner, measure), allowed, sum_amounts(unit.parts, measure)


def find_pool(unit: Unit, cells: Mapping[str, Cell], pools: Mapping[str, PoolRules]) -> str:
    """Return the pool of a placed unit: that of its node; if that is unknown, where it probably was admitted.

    A unit is admitted without a cell only in an elastic pool, to which an autoscaler adds nodes: the first one whose
    labels it demands, else one without labels, else any. Otherwise its home, the first of its pools; empty if it has
    none.
    """
    for name in unit.cells:
        if (cell := cells.get(name)) is not None:
            return cell.pool

    # Its cell is unknown. If it was admitted without one, it demands the labels of its pool.
    elastic = [pool for pool in unit.pools if pools.get(pool, PoolRules()).elastic > 0]
    labels = {pool: pools[pool].node_labels for pool in elastic}
    requirement = unit.requirement
    demanded_pools = (
        pool
        for pool in elastic
        if labels[pool] and isinstance(requirement, NodeRequirement) and requirement.demands(labels[pool])
    )
    unlabelled_pools = (pool for pool in elastic if not labels[pool])

    # The first that exists, in this order of preference.
    return next(itertools.chain(demanded_pools, unlabelled_pools, elastic, unit.pools), "")


def is_borrowed(unit: Unit, pool: str) -> bool:
    """Return whether a unit that uses a pool is at home in another one."""
    return bool(unit.pools) and unit.pools[0] != pool


def limit_text(measure: Measure, amount: int) -> str:
    """Return an amount that a limit counts, such as `4 devices` or `96.0 GiB of memory`."""
    return f"{size_text(amount)} of memory" if measure == MEMORY else f"{amount} device{'' if amount == 1 else 's'}"


def amount_text(measure: Measure, amount: int) -> str:
    """Return devices as a number, and memory as a size."""
    return size_text(amount) if measure == MEMORY else f"{amount}"


def sum_amounts(parts: Iterable[Amounts], measure: Measure) -> int:
    """Return the devices or the memory of all parts."""
    if measure == MEMORY:
        return sum(part.get(MEMORY, 0) for part in parts)
    return sum(amount for part in parts for name, amount in part.items() if "/" in name)


def sum_of_cell(cell: Cell, amounts: Amounts) -> int:
    """Return the devices of a node, or the memory of a host, in these amounts: `cell.total` or `cell.free`.

    Only resources that count each device once are summed: a name with a domain may also be a network interface, or a
    claim that several needs count.
    """
    if cell.kind == "host":
        return amounts.get(MEMORY, 0)
    if cell.devices is None:
        return sum_amounts([amounts], DEVICES)
    return sum(amounts.get(name, 0) for name in cell.devices)


class PoolProblem(NamedTuple):
    """A contradiction of a pool."""

    pool: str
    reason: PoolReason
    message: str


def find_pool_problems(pools: Mapping[str, PoolRules], cells: Iterable[Cell]) -> list[PoolProblem]:
    """Return the contradictions between rules and cells: pools without cells, and limits above what a pool has."""
    # By pool: what its cells have in all, as devices or bytes of memory.
    total_of_pool: dict[str, int] = {}
    measures: dict[str, Measure] = {}
    for cell in cells:
        measures[cell.pool] = measure_of(cell)
        total_of_pool[cell.pool] = total_of_pool.get(cell.pool, 0) + sum_of_cell(cell, cell.total)

    problems: list[PoolProblem] = []
    for name, rules in sorted(pools.items()):
        if rules.elastic > 0:
            continue  # an autoscaler may add what is not there yet

        if name not in total_of_pool:
            message = f"pool {name} has no node and no host: correct its accelerator and nodeSelector, or add one"
            problems.append(PoolProblem(name, "NoCell", message))
            continue

        measure, most = measures[name], total_of_pool[name]
        for field, value in (("nominal", rules.nominal), ("lendingLimit", rules.lending_limit)):
            if value is not None and value > most:
                has, noun = amount_text(measure, most), "host" if measure == MEMORY else "node"
                message = f"{field} is {limit_text(measure, value)}, but the pool has {has}: lower it, or add {noun}s"
                problems.append(PoolProblem(name, "LimitTooHigh", message))
    return problems


def measure_of(cell: Cell) -> Measure:
    """Return what limits count of the pool of a cell."""
    return MEMORY if cell.kind == "host" else DEVICES


_UNLIMITED: Final = PoolRules()
