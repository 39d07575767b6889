"""Admission: the leader's loop that plans the queue and carries out what was planned.

Something changes, a moment is waited for more of it, a thread plans one round, and the ledger is swapped; only then
units get their cells and others are evicted. All that a round is decided by is in the objects and in the ledger, so
nothing is lost when the controller dies between any two lines: the next leader finishes what the ledger says.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from controller.placement.admission_writer import AdmissionWriter, StaleUnit
from controller.placement.cell_registry import CellRegistry
from controller.placement.ledger import Claim, FreedPlace, LedgerLost, QueueLedger
from controller.placement.observed_units import FindVolumeNodes, ObservedUnits, observe_units
from controller.placement.planner import Action, Admit, EvictUnit, Nominate, PlanRules, Round, WithdrawNomination, plan
from controller.placement.queue_events import describe_preemption
from controller.placement.queue_places import format_place
from controller.placement.units import Amounts, Cell, Unit, fits, subtract_amounts
from controller.placement.wake_rules import READ, RoomWatch, decisive_facts
from controller.reconcile.plan import Event, Leading
from devices.vendors import Vendors
from kube.backoff import backoff_seconds
from kube.client import Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, PODS, ObjectKey, Resource
from kube.store import Store

ROUND_SECONDS: Final = 0.1
"""Least time between the begin of two rounds: what happens together is decided together."""
IDLE_SHARE: Final = 20.0
"""After a round without a decision the next one waits for this many times its duration: rounds that find nothing take
at most a twentieth of a core, whatever changes meanwhile."""
LONGEST_PAUSE_SECONDS: Final = 5.0
WRITES_AT_ONCE: Final = 8
SEEN_SECONDS: Final = 5.0
"""Time in which the watch shows what was written; without it, an eviction is asked for again."""
FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 60.0
"""Longest pause before a write that failed is tried again; other units are admitted meanwhile."""
REPORTED_TRIES: Final = 3
"""Tries after which the owner of a service is told of an admission that fails: a server that restarts fails a few."""

AdmissionOutcome = Literal["admitted", "stale", "failed"]
"""Outcome of a decision. stale: before the write, the unit changed, or its cell was lost or had no room left."""

log = structlog.get_logger()


class AdmissionFailures(NamedTuple):
    """The failures in a row to admit one unit."""

    tries: int = 0
    retry_at: float = 0.0
    """When to try again, on the clock of the event loop."""
    refused_by: frozenset[str] = frozenset()
    """Cells that the API server refused since all of them had refused."""


_NO_FAILURE: Final = AdmissionFailures()


class RoundReport(NamedTuple):
    """One round, for those who tell users about it."""

    round: Round
    cells: Sequence[Cell]
    units: Sequence[Unit]
    """All units, also those whose admission is under way."""
    now: float
    """The wall clock, in seconds since 1970."""
    plan_seconds: float


class AdmissionParts(NamedTuple):
    """All that the loop works with beside the API server."""

    registry: CellRegistry
    vendors: Vendors
    identity: str
    """Name of this replica, by which the ledger tells leaders apart."""
    is_queued_by_default: bool = True
    """Services that state no mode are in mode Queue."""
    find_volume_nodes: FindVolumeNodes = lambda _pod: None
    """Finds the nodes of the volumes of a waiting pod."""
    rules: Callable[[], PlanRules] = PlanRules
    """Returns the administrator's rules."""
    on_round: Callable[[RoundReport], None] = lambda _report: None
    """Called after each round has been planned."""
    on_outcome: Callable[[AdmissionOutcome], None] = lambda _outcome: None
    """Called with the outcome of each admission."""
    on_preemption: Callable[[EvictUnit], None] = lambda _eviction: None
    """Called with each unit that was evicted for another one."""


class Admission:
    """The loop."""

    def __init__(self, parts: AdmissionParts) -> None:
        self._parts = parts
        self._changed = asyncio.Event()
        self._is_due = False
        """A change of a unit is planned in any case, one of the cells only if it makes room."""
        self._follows = False

    def wake(self) -> None:
        """Plan again soon: something has changed."""
        self._is_due = True
        self._changed.set()

    async def run(self, leading: Leading) -> None:
        """Plan and admit for ever."""
        if not self._follows:
            leading.store.subscribe(self._wake_on_change)
            self._parts.registry.subscribe(self._changed.set)
            self._follows = True
        loop, watch = asyncio.get_running_loop(), RoomWatch()
        async with asyncio.TaskGroup() as tasks:
            ledger = QueueLedger(leading.client, self._parts.identity)
            term = _Term(self._parts, leading, ledger, tasks, self.wake)
            await term.begin()
            self.wake()
            while True:
                await self._changed.wait()
                self._changed.clear()
                started = loop.time()
                has_decided = False
                if watch.take_cells(self._parts.registry.list_cells()) or self._is_due:
                    self._is_due = False
                    found = await term.play_round()
                    watch.expect(found.queue)
                    has_decided = bool(found.actions)
                took = loop.time() - started
                pause = ROUND_SECONDS - took if has_decided else max(ROUND_SECONDS, took * IDLE_SHARE)
                await asyncio.sleep(min(max(0.0, pause), LONGEST_PAUSE_SECONDS))

    def _wake_on_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        if resource in READ and (old and decisive_facts(resource, old)) != (new and decisive_facts(resource, new)):
            self.wake()


class _Term:
    """The time of one leader, with all that it need not remember beyond."""

    def __init__(
        self,
        parts: AdmissionParts,
        leading: Leading,
        ledger: QueueLedger,
        tasks: asyncio.TaskGroup,
        wake: Callable[[], None],
    ) -> None:
        self._parts, self._leading, self._ledger, self._tasks = parts, leading, ledger, tasks
        self._wake = wake
        self._writer = AdmissionWriter(leading)
        self._claims: dict[str, Claim] = {}
        """Units whose admission has begun and has no known outcome yet."""
        self._freed: tuple[FreedPlace, ...] = ()
        self._failures: dict[str, AdmissionFailures] = {}

    async def begin(self) -> None:
        """Take the ledger over, and finish what the last leader began."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                content = await self._ledger.take_over()
            except (ApiError, Unreachable, LedgerLost) as error:
                failures += 1
                log.warning("ledger_not_taken_over", error=str(error))
                await asyncio.sleep(backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS))
            else:
                break
        self._freed = content.freed
        self._claims = dict(content.claims)
        for uid, claim in content.claims.items():
            # The last leader may still send its write. Both give the unit the same cell.
            await self._settle(uid, claim, loop.time())

    async def _settle(self, uid: str, claim: Claim, now: float) -> AdmissionOutcome:
        """Carry a claim out; it stays until its outcome is known."""
        try:
            await self._writer.admit(uid, claim.kind, claim.objects, claim.cells)
        except StaleUnit as stale:
            log.info("admission_stale", unit=uid, cause=str(stale))
            outcome: AdmissionOutcome = "stale"
        except (ApiError, Unreachable) as error:
            await self._fail(uid, claim, error, now)
            self._tasks.create_task(self._learn_outcome(uid, claim))
            return "failed"
        else:
            self._failures.pop(uid, None)
            outcome = "admitted"
        self._claims.pop(uid, None)
        return outcome

    async def _learn_outcome(self, uid: str, claim: Claim) -> None:
        """Read the objects of a claim whose write failed; until they are known, its cells stay reserved."""
        await self._writer.read(claim.kind, claim.objects)
        self._claims.pop(uid, None)
        self._wake()

    async def play_round(self) -> Round:
        """Plan one round, carry it out and return it."""
        loop = asyncio.get_running_loop()
        moment, started = datetime.now(UTC), loop.time()
        now = moment.timestamp()
        observed = observe_units(
            self._leading.store,
            self._parts.vendors,
            moment,
            self._list_freed(),
            is_queued_by_default=self._parts.is_queued_by_default,
            find_volume_nodes=self._parts.find_volume_nodes,
        )
        cells = reserve(self._parts.registry.list_cells(), self._claims, observed.units)
        units = list(self._list_plannable(observed.units, started))
        found = await asyncio.to_thread(plan, cells, units, self._parts.rules(), now)
        self._parts.on_round(RoundReport(found, cells, observed.units, now, loop.time() - started))
        if found.again_seconds is not None:
            loop.call_later(found.again_seconds, self._wake)
        await self._keep_places(observed)
        if found.actions:
            if await self._write_ledger(found.actions):
                await self._carry_out(found, started)
            else:
                self._wake()
        return found

    def _list_freed(self) -> Mapping[str, Sequence[str]]:
        freed: dict[str, list[str]] = {}
        for each in self._freed:
            if _is_gone(self._leading.store, each):
                freed.setdefault(each.service, []).append(each.enqueued_at)
        return freed

    def _list_plannable(self, units: Iterable[Unit], now: float) -> Iterable[Unit]:
        """Return all units but those whose admission is under way, or is tried again later."""
        known: set[str] = set()
        for unit in units:
            known.add(unit.uid)
            if unit.state != "waiting":
                yield unit
                continue
            failed = self._failures.get(unit.uid)
            if unit.uid in self._claims or (failed is not None and failed.retry_at > now):
                continue
            yield msgspec.structs.replace(unit, refused_by=failed.refused_by) if failed is not None else unit
        self._failures = {uid: failed for uid, failed in self._failures.items() if uid in known}

    async def _write_ledger(self, actions: Sequence[Action]) -> bool:
        """Write what is about to be done; False: nothing of it may be done."""
        claims = {
            each.unit.uid: Claim(
                kind=each.unit.key.kind,
                namespace=each.unit.key.namespace,
                names=tuple(name.name for name in each.unit.objects),
                cells=each.cells,
                service=each.unit.service.name,
            )
            for each in actions
            if isinstance(each, Admit)
        }
        # The service itself makes the successor of a process, with its place.
        evicted = [each.victim for each in actions if isinstance(each, EvictUnit)]
        freed = [_free_place(victim) for victim in evicted if victim.key.kind != "process"]
        if not claims and not freed:
            return True
        known = {place.unit for place in self._freed}
        freed_places = (*self._freed, *(place for place in freed if place.unit not in known))
        try:
            await self._ledger.write(self._claims | claims, freed_places)
        except (ApiError, Unreachable, LedgerLost) as error:
            log.warning("ledger_not_written", error=str(error))
            self._leading.require_leadership()
            await self.begin()
            return False
        self._claims |= claims
        self._freed = freed_places
        return True

    async def _carry_out(self, found: Round, now: float) -> None:
        """Carry a round out. One unit that is refused holds up no other."""
        gate = asyncio.Semaphore(WRITES_AT_ONCE)

        async def admit(action: Admit) -> None:
            async with gate:
                self._parts.on_outcome(await self._admit(action, now))

        async with asyncio.TaskGroup() as writes:
            for action in found.actions:
                if isinstance(action, Admit):
                    writes.create_task(admit(action))
        promised: set[str] = set()
        for action in found.actions:
            if isinstance(action, Nominate):
                if await self._try(action.unit.uid, self._writer.nominate(action.unit, action.nomination)):
                    promised.add(action.unit.uid)
            elif isinstance(action, WithdrawNomination):
                await self._try(action.unit.uid, self._writer.nominate(action.unit, None))
        for action in found.actions:
            # Only once its cell is promised: else the room that is made may go to whoever comes first.
            if isinstance(action, EvictUnit) and (action.preemptor.nomination or action.preemptor.uid in promised):
                await self._evict(action)

    async def _admit(self, action: Admit, now: float) -> AdmissionOutcome:
        unit = action.unit
        if not self._has_room(unit, action.cells):
            self._claims.pop(unit.uid, None)
            self._wake()
            return "stale"
        outcome = await self._settle(unit.uid, self._claims[unit.uid], now)
        if outcome == "stale":
            self._wake()
        return outcome

    def _has_room(self, unit: Unit, names: Sequence[str]) -> bool:
        """Return whether the cells of a unit still live and have room: planning and the writes before took time."""
        left: dict[str, Amounts] = {}
        for need, name in zip(unit.parts, names, strict=False):
            cell = self._parts.registry.find_cell(name)
            if cell is None or cell.closed or not fits(need, left.get(name, cell.free)):
                return False
            left[name] = subtract_amounts(left.get(name, cell.free), need)
        return True

    async def _evict(self, action: EvictUnit) -> None:
        victim, preemptor = action.victim, action.preemptor
        failed = self._failures.get(victim.uid)
        if failed is not None and failed.retry_at > asyncio.get_running_loop().time():
            return
        if await self._try(victim.uid, self._writer.evict(victim)):
            log.info("unit_evicted", unit=str(victim.key), preemptor=str(preemptor.key))
            self._parts.on_preemption(action)
            self._tasks.create_task(self._report(victim.service, describe_preemption(victim, preemptor)))
            # The watch shows the end a moment later: it need not be asked for again.
            self._failures[victim.uid] = AdmissionFailures(retry_at=asyncio.get_running_loop().time() + SEEN_SECONDS)

    async def _try(self, unit: str, write: Awaitable[None]) -> bool:
        """Make one write for a unit, which is decided again if it fails; return whether it was made."""
        try:
            await write
        except StaleUnit as stale:
            log.info("decision_stale", unit=unit, cause=str(stale))
        except (ApiError, Unreachable) as error:
            self._back_off(unit, "", error, asyncio.get_running_loop().time())
        else:
            self._failures.pop(unit, None)
            return True
        return False

    async def _keep_places(self, observed: ObservedUnits) -> None:
        """Write down the places that waiting pods inherit, and forget those that nothing inherits any more."""
        for name, place in observed.places.items():
            await self._try(str(name), self._writer.keep_place("pod", name, place))
        self._freed = tuple(
            each
            for each in self._freed
            if each.enqueued_at in observed.open_places.get(each.service, ()) or not _is_gone(self._leading.store, each)
        )

    def _back_off(self, uid: str, cell: str, error: ApiError | Unreachable, now: float) -> int:
        """Note a failure, and decide again after a pause; return the number of failures."""
        last = self._failures.get(uid, _NO_FAILURE)
        pause = backoff_seconds(last.tries + 1, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
        refused = last.refused_by
        if cell:
            # If every cell that fits has refused, a new round of all of them begins.
            refused = frozenset({cell}) if cell in refused else refused | {cell}
        self._failures[uid] = AdmissionFailures(last.tries + 1, now + pause, refused)
        asyncio.get_running_loop().call_later(pause, self._wake)
        log.log(
            logging.INFO if isinstance(error, Conflict | NotFound) else logging.WARNING,
            "admission_failed",
            unit=uid,
            cell=cell,
            error=str(error),
            retry_seconds=round(pause, 1),
        )
        return last.tries + 1

    async def _fail(self, uid: str, claim: Claim, error: ApiError | Unreachable, now: float) -> None:
        cell = claim.cells[0] if claim.cells else ""
        if self._back_off(uid, cell, error, now) == REPORTED_TRIES:
            await self._report_failure(claim, cell, error)

    async def _report(self, service: ObjectKey, event: Event) -> None:
        """Send an Event about a service."""
        found = self._leading.store.get(INFERENCE_SERVICES, service.name, service.namespace)
        if found is not None:
            await self._leading.recorder.event(found, event.type, event.reason, event.note, event.action)

    async def _report_failure(self, claim: Claim, cell: str, error: ApiError | Unreachable) -> None:
        """Send an Event about the service: its condition only says that the unit waits."""
        service = self._leading.store.get(INFERENCE_SERVICES, claim.service, claim.namespace)
        if service:
            note = f"{claim.names[0]} is not admitted to {cell}, and tried again: {error}"
            await self._leading.recorder.event(service, "Warning", "AdmissionFailed", note, "Admit")


def reserve(cells: Iterable[Cell], claims: Mapping[str, Claim], units: Iterable[Unit]) -> list[Cell]:
    """Return cells without the room of units that are being admitted and are not seen to have it yet."""
    taken: dict[str, list[Amounts]] = {}
    if claims:
        for unit in units:
            claim = claims.get(unit.uid)
            if claim is not None and unit.state == "waiting":
                for need, cell in zip(unit.parts, claim.cells, strict=False):
                    taken.setdefault(cell, []).append(need)
    return [
        msgspec.structs.replace(cell, free=functools.reduce(subtract_amounts, taken[cell.id], cell.free))
        if cell.id in taken
        else cell
        for cell in cells
    ]


def _free_place(victim: Unit) -> FreedPlace:
    """Return the record by which the successor of an evicted pod finds its place, when the pod itself is gone."""
    namespace, name = victim.objects[0]
    return FreedPlace(
        service=victim.service_uid,
        unit=victim.uid,
        namespace=namespace,
        name=name,
        enqueued_at=format_place(victim.enqueued_at),
    )


def _is_gone(store: Store, place: FreedPlace) -> bool:
    """Return whether the pod of a freed place is gone: until then its successor finds the place in the pod itself."""
    found = store.get(PODS, place.name, place.namespace)
    return found is None or found["metadata"]["uid"] != place.unit
