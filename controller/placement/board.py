"""The board: position, reason and estimate that each waiting service shows in its status.

It is set after each round, in constant time for each waiting unit. The words, for which all cells are looked at, are
made when a service is told, which happens at the pace of `NoticePacer`.
"""

import asyncio
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.placement.actions import Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.explanation import RefusalCounter
from controller.placement.notice_pacer import NoticePacer
from controller.placement.planner import Round
from controller.placement.pool_limits import LimitRefusal
from controller.placement.queue_events import name_service
from controller.placement.standing import (
    ServiceStanding,
    WaitFacts,
    describe_need,
    describe_wait,
    find_lack,
    find_largest,
    sort_refusals,
)
from controller.placement.start_estimate import Lane, StartRange, measure_need
from controller.placement.start_history import StartEstimator, UnitStart
from controller.placement.units import Cell, Nomination, Unit
from crds.meta import PRIORITY_RANK, Priority
from crds.queue_status import NoEstimate, QueueReason
from kube.resources import ObjectKey

UPDATE_SECONDS: Final = 1.0
"""Least time between two updates: each looks at all units, and no service is told more often."""
REFRESH_SECONDS: Final = 30.0
FRONT: Final = 3
"""Positions at which each move is told at once."""
_PRIORITIES: Final[tuple[Priority, ...]] = tuple(PRIORITY_RANK)

FindStanding = Callable[[ObjectKey, ServiceStanding | None], ServiceStanding | None]
Depths = Mapping[tuple[str, Priority], int]
"""Number of waiting units by pool and priority."""


class _Entry(NamedTuple):
    """The first waiting unit of a service."""

    unit: Unit
    pool: str
    position: int | None
    ahead: tuple[int, ...]
    """Units ahead by rank."""
    nomination: Nomination | None
    reason: QueueReason | None
    """None: too little is free, or all cells that could run it are closed."""
    start: StartRange | NoEstimate
    priority_helps: bool
    """A higher priority might make room for it."""
    limit: LimitRefusal | None = None
    """The limit for which it waits."""
    victims_end_by: float | None = None
    """When all that ends for it has ended at the latest, in seconds since 1970; None: not all of it ends yet."""

    @property
    def urgent_fields(self) -> tuple[object, ...]:
        """Fields whose change is reported immediately."""
        front_position = self.position if self.position is not None and self.position <= FRONT else None
        return self.unit.uid, self.pool, self.position is None, self.nomination, front_position, self.victims_end_by

    @property
    def moving_fields(self) -> tuple[object, ...]:
        """Fields whose change is reported when there is time."""
        return self.position, self.ahead, self.reason, self.limit, self.priority_helps, self.start


class _ShownRound(NamedTuple):
    """A round with its inputs."""

    round: Round
    cells: tuple[Cell, ...]
    now: float
    units: Sequence[Unit]
    failures: Mapping[str, str]

    def list_waiting(self) -> Sequence[Unit]:
        """Return the waiting units in queue order.

        The round itself leaves out units that pause after a failed write. They are added here, since they wait as well,
        but not units that are superseded: a unit of a later spec waits in their stead.
        """
        if not self.failures:
            return self.round.queue

        planned = {unit.uid for unit in self.round.queue}
        waiting = (unit for unit in self.units if unit.state == "waiting" and not unit.is_superseded)
        missing = [unit for unit in waiting if unit.uid in self.failures and unit.uid not in planned]
        return sorted((*self.round.queue, *missing), key=lambda unit: unit.order)


class _PoolQueue:
    """The queue of one pool while it is counted."""

    def __init__(self) -> None:
        """Start with an empty queue: no unit, none ahead by rank, and no need of any lane."""
        self.length = 0
        self.ahead = [0] * len(_PRIORITIES)
        self.needed: dict[Lane, int] = {}


class Board:
    """The standings of all services that wait. All methods run in the event loop."""

    def __init__(
        self,
        on_change: Callable[[ObjectKey], None],
        on_start: Callable[[UnitStart], None] = lambda _start: None,
        on_depths: Callable[[Depths], None] = lambda _depths: None,
    ) -> None:
        """Make an empty board.

        Args:
            on_change: gets each service whose standing has changed, at most once a second.
            on_start: gets each unit that was admitted, for the metrics.
            on_depths: gets the numbers of replicas that wait whenever they are counted, for the metrics.
        """
        self._on_depths = on_depths
        self._on_start = on_start
        self._pacer = NoticePacer(on_change)  # spreads its calls over time
        self._estimator = StartEstimator(on_start)  # estimates when units start

        # What the last shown round has set.
        self._entries: dict[ObjectKey, _Entry] = {}
        """By service, its first waiting unit as last shown."""
        self._lengths: dict[str, int] = {}
        """Length of the queue of each pool."""
        self._victims: dict[str, ObjectKey] = {}
        """The services of units that end for a nominated one, by uid."""
        self._needs: dict[str, tuple[Lane, int]] = {}
        """By uid of a waiting unit: its pool with the scarce resource, and how much of that it needs."""
        self._cells: Sequence[Cell] = ()  # those of the round that is shown
        self._closed: frozenset[str] = frozenset()
        """`Cell.id` of the cells that took no new unit when the standings were set last."""
        self._now = 0.0  # the wall clock of the round that is shown
        self.depths: Depths = {}

        # For the texts, which are made when a service asks.
        self._counter: RefusalCounter | None = None
        """Counts the cells by the reason for which they refuse a unit; None: no service has asked yet."""
        self._is_counted = False
        """The counter has taken the round that is shown: it does so when the first service asks."""

        # Rounds that come, and the time at which the latest is shown.
        self._updated_at = -math.inf
        """The time of the loop when the standings were set last."""
        self._timer: asyncio.TimerHandle | None = None
        """Shows the latest round later; None: no round waits to be shown."""
        self._evicted: set[str] = set()
        """uids of the units that were evicted since the standings were set last."""
        self._recalled: set[ObjectKey] = set()
        """Services whose last standing was repeated before the first round of this leader."""
        self._latest: _ShownRound | None = None
        """The last round; it is shown within a second."""
        self._shown: _ShownRound | None = None
        """The round by which the standings were set last."""

    def restart(self) -> None:
        """Forget everything: another replica may have led since.

        What is known by uid of a unit (`_needs`, `_victims`) may stay: the next round drops units that are gone.
        """
        self._pacer.clear()
        self._estimator = StartEstimator(self._on_start)
        if self._timer is not None:
            self._timer.cancel()
        self._latest = self._shown = self._timer = self._counter = None
        self._updated_at = -math.inf
        self._evicted.clear()
        self._recalled.clear()
        self._entries, self._lengths, self.depths = {}, {}, {}

    def update(
        self,
        decided: Round,
        cells: Iterable[Cell],
        now: float,
        *,
        units: Sequence[Unit],
        failures: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Show a round: at once, or, if another was shown less than a second ago, the latest after that second.

        Args:
            decided: the round.
            cells: all cells, as the round had them.
            now: the wall clock, in seconds since 1970.
            units: all units, as the round had them.
            failures: the error by uid of each unit whose last write failed, and is tried again.
        """
        self._evicted.update(action.victim.uid for action in decided.actions if isinstance(action, EvictUnit))
        self._latest = _ShownRound(decided, tuple(cells), now, units, failures)

        loop = asyncio.get_running_loop()
        wait_seconds = self._updated_at + UPDATE_SECONDS - loop.time()
        if wait_seconds <= 0:
            self._show_latest()
        elif self._timer is None:  # else the timer shows this round
            self._timer = loop.call_later(wait_seconds, self._show_latest)

    def _show_latest(self) -> None:
        """Compute the standing of each waiting service from the latest round, and report those that have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        # 1. Take over the round.
        shown = self._shown = self._latest
        if shown is None:  # the board was restarted meanwhile
            return
        self._cells, self._now, units = shown.cells, shown.now, shown.units
        self._is_counted, self._updated_at = False, asyncio.get_running_loop().time()

        # 2. Teach the estimator of start times what came, started and ended.
        self._estimator.observe(units, self._evicted, {cell.id: cell.pool for cell in self._cells}, self._now)
        self._evicted.clear()

        # 3. Find the first waiting unit of each service (its entry), and the services whose units end for it (victims).
        entries, lengths = self._list_entries(shown)
        self._on_depths(self.depths)
        entries = self._note_victims(entries, units)

        # 4. Give changed services to the pacer, which spreads the notices over time.
        closed = frozenset(cell.id for cell in self._cells if cell.closed)
        self._report_changes(entries, lengths, has_closed_changed=closed != self._closed)
        self._entries, self._lengths, self._closed = entries, lengths, closed
        self._pacer.flush()

    async def run(self, _leading: object) -> None:
        """Forget all standings, then recompute them while no new round comes, since estimates age."""
        loop = asyncio.get_running_loop()
        self.restart()
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            passed = loop.time() - self._updated_at
            if self._shown is not None and self._entries and passed >= REFRESH_SECONDS:
                # The same round is shown again, as of now.
                self._latest = self._shown._replace(now=self._now + passed)
                self._show_latest()

    def find_standing(self, service: ObjectKey, last: ServiceStanding | None = None) -> ServiceStanding | None:
        """Return the standing of a service in the queue, or None if none of its replicas waits.

        It is that of its first waiting replica. The texts are made here and not after each round, since all cells are
        counted for them. A pending notice that the service has only moved is dropped: its place is being reported now.
        Before the first round of this leader, the answer is the `last` standing that was reported.
        """
        # This leader has shown no round yet: repeat what the service reports already.
        if self._shown is None:
            if last is not None:
                self._recalled.add(service)
            return last

        self._pacer.drop_move(service)
        entry = self._entries.get(service)
        if entry is None:
            return None
        unit = entry.unit

        # 1. Find the reason: if the entry has none, it follows from how many cells refuse the unit, and why.
        counts = sort_refusals(self._count_refusals(unit, self._shown))
        reason = entry.reason if entry.reason is not None else find_lack(unit, counts)

        # 2. Name the services whose units end for it (victims), and the cells that it gets then.
        victim_uids = entry.nomination.victims if entry.nomination is not None else ()
        services = (self._victims[uid] for uid in victim_uids if uid in self._victims)
        victims = tuple(sorted({name_service(key, service.namespace) for key in services}))
        promised = entry.nomination.cells if entry.nomination is not None else ()

        # 3. Put this into words.
        facts = WaitFacts(
            counts,
            largest=find_largest(unit, self._cells) if reason == "NoSuchHardware" else None,
            cells=promised,
            victims=victims,
            victims_end_by=entry.victims_end_by,
            ahead=sum(entry.ahead),
            limit=entry.limit,
            priority_helps=entry.priority_helps,
            error=self._shown.failures.get(unit.uid, ""),
        )
        return ServiceStanding(
            pool=entry.pool,
            position=entry.position,
            length=self._lengths.get(entry.pool, 0),
            ahead={_PRIORITIES[rank]: count for rank, count in enumerate(entry.ahead) if count},
            waiting_for=describe_need(unit),
            enqueued_at=unit.enqueued_at,
            cells=promised,
            victims=victims,
            reason=reason,
            message=describe_wait(unit, reason, facts),
            start=entry.start,
        )

    def _count_refusals(self, unit: Unit, shown: _ShownRound) -> Mapping[str, int]:
        """Return the number of cells by the reason for which they refuse a unit; a new round is taken in first."""
        if self._counter is None:
            self._counter = RefusalCounter(self._cells, shown.round)
        elif not self._is_counted:
            self._counter.update(self._cells, shown.round)
        self._is_counted = True
        return self._counter.count(unit)

    def _list_entries(self, shown: _ShownRound) -> tuple[dict[ObjectKey, _Entry], dict[str, int]]:
        """Return the first waiting unit of each service as an entry, and the length of each pool's queue; set `depths`.

        The units are visited in queue order, and each queue is summed up on the way.
        """
        decided, failures = shown.round, shown.failures
        nominated = {action.unit.uid: action.nomination for action in decided.actions if isinstance(action, Nominate)}
        # A unit whose last write failed may fail again: it stays in the queue during each try.
        admitted = {action.unit.uid for action in decided.actions if isinstance(action, Admit)} - shown.failures.keys()
        withdrawn = {action.unit.uid for action in decided.actions if isinstance(action, WithdrawNomination)}
        queues: dict[str, _PoolQueue] = {}
        entries: dict[ObjectKey, _Entry] = {}
        needs: dict[str, tuple[Lane, int]] = {}
        depths: dict[tuple[str, Priority], int] = {}  # number of waiting units by pool and priority
        for unit in shown.list_waiting():
            uid = unit.uid
            if uid in admitted:
                continue

            # 1. Find its queue. `lane` is its home pool with the resource that is scarce there, such as devices.
            lane, amount = self._needs.get(uid) or measure_need(unit)
            needs[uid] = lane, amount
            queue = queues.get(lane.pool) or queues.setdefault(lane.pool, _PoolQueue())
            depths[lane.pool, unit.priority] = depths.get((lane.pool, unit.priority), 0) + 1
            needed = queue.needed.get(lane, 0) + amount  # by those ahead and by it

            # 2. Find why it waits. A nomination is the promise of cells whose units still end.
            nomination = nominated.get(uid, None if uid in withdrawn else unit.nomination)
            reason = find_reason(decided, uid, nomination, failures)
            # A blockage is the reason why the round found no place; None: it has a promise, or was not considered.
            blockage = decided.blocked.get(uid) if nomination is None else None
            can_start = blockage is None or blockage.can_start

            # 3. The first unit of a service stands for it.
            if unit.service not in entries:
                entries[unit.service] = _Entry(
                    unit=unit,
                    pool=lane.pool,
                    position=queue.length + 1 if can_start else None,
                    ahead=tuple(queue.ahead),
                    nomination=nomination,
                    reason=reason,
                    start=self._estimate(unit, lane, needed, reason, can_start=can_start),
                    priority_helps=may_be_raised(decided, uid),
                    limit=find_limit(decided, uid),
                )

            # 4. The units behind this one have to wait for it, unless it can never start.
            if can_start:
                queue.length += 1
                queue.ahead[unit.rank] += 1  # counted by rank: 0 is the most important priority
                if nomination is None:  # else its cells are promised: it takes nothing of what becomes free
                    queue.needed[lane] = needed
        self._needs, self.depths = needs, depths
        return entries, {pool: queue.length for pool, queue in queues.items()}

    def _estimate(
        self, unit: Unit, lane: Lane, needed: int, reason: QueueReason | None, *, can_start: bool
    ) -> StartRange | NoEstimate:
        """Return when a unit probably starts, or why that is not known."""
        if reason == "Draining":
            return "Draining"
        return self._estimator.estimate(unit, lane, needed, self._now) if can_start else "NoPosition"

    def _note_victims(self, entries: Mapping[ObjectKey, _Entry], units: Iterable[Unit]) -> dict[ObjectKey, _Entry]:
        """Remember the services whose units end for nominated ones (victims); return the entries with their last end.

        `victims_end_by` is the time at which the last victim of an entry has ended; it is left out while the end of one
        is not known.
        """
        # 1. By service that waits, the uids of the units whose end its first unit awaits.
        awaited = {
            service: entry.nomination.victims
            for service, entry in entries.items()
            if entry.nomination is not None and entry.nomination.victims
        }
        victim_uids = frozenset[str]().union(*awaited.values())
        present = {unit.uid: unit for unit in units if unit.uid in victim_uids} if victim_uids else {}

        # 2. Remember their services. A unit that has ended is not present any more; its service is known from before.
        known_services = {uid: service for uid, service in self._victims.items() if uid in victim_uids}
        self._victims = known_services | {uid: unit.service for uid, unit in present.items()}

        # 3. Add the last end to each entry.
        updated = dict(entries)
        for service, victims in awaited.items():
            ends = [present[uid].ends_by for uid in victims if uid in present]
            known_ends = [moment for moment in ends if moment is not None]
            # While the end of one victim is not known, the last end is not known either.
            if known_ends and len(known_ends) == len(ends):
                updated[service] = entries[service]._replace(victims_end_by=max(known_ends))
        return updated

    def _report_changes(
        self, entries: Mapping[ObjectKey, _Entry], lengths: Mapping[str, int], *, has_closed_changed: bool
    ) -> None:
        """Give the pacer each service whose standing differs from the last one.

        `urgent_fields` are reported at once, `moving_fields` when there is time. Closed cells change only texts, so
        they count as a move.
        """
        for service, entry in entries.items():
            last = self._entries.get(service)  # its entry as last reported
            if last is None or last.urgent_fields != entry.urgent_fields:
                self._pacer.add(service)
            elif has_closed_changed or (
                last.moving_fields != entry.moving_fields or self._lengths.get(last.pool) != lengths.get(entry.pool)
            ):
                # The foremost are reported first; one without a position, which can never start, comes last.
                self._pacer.add_move(service, math.inf if entry.position is None else entry.position)

        # Services that no longer wait, also those that were told a standing before the first round.
        for service in (self._entries.keys() | self._recalled) - entries.keys():
            self._pacer.add(service)
        self._recalled.clear()


def find_reason(
    decided: Round, uid: str, nomination: Nomination | None, failures: Container[str] = ()
) -> QueueReason | None:
    """Return the reason why a unit waits, for its status; None: too little room is free, or all its cells are closed.

    Draining: it waits for its victims to end. HeadOfLine: the cells that it fits on are kept for a unit ahead. Quota: a
    limit holds it back. NotConsidered: so many are ahead that the round did not look at it.

    Args:
        decided: the round.
        uid: the unit.
        nomination: its nomination after the round.
        failures: `uid` of units whose last write failed.
    """
    if nomination is not None:
        return "Draining"

    # The reason why the round gave it no place; None: the round has not looked at it, as after a failed write.
    blockage = decided.blocked.get(uid)
    if blockage is None:
        return "AdmissionFailed" if uid in failures else "NotConsidered"

    if not blockage.feasible:  # no cell could run it even if nothing else ran
        return "NoSuchHardware"
    if blockage.is_shadowed:  # the cells that it fits on are kept for a unit ahead
        return "HeadOfLine"
    if blockage.limit is not None:
        return "Quota"
    return None


def find_limit(decided: Round, uid: str) -> LimitRefusal | None:
    """Return the limit for which a unit waits, or None."""
    blockage = decided.blocked.get(uid)
    return blockage.limit if blockage is not None else None


def may_be_raised(decided: Round, uid: str) -> bool:
    """Return whether a higher priority might make room for a unit."""
    blockage = decided.blocked.get(uid)
    return blockage is None or blockage.priority_helps
