"""Admission: the leader's loop that plans the queue and carries out what was planned.

All that a round is decided by is in the objects and in the ledger, so nothing is lost when the controller dies between
any two lines: the next leader finishes what the ledger says.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import msgspec
import structlog

from controller.placement.actions import Action, Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.admission_parts import AdmissionOutcome, AdmissionParts, RoundReport
from controller.placement.admission_writer import AdmissionWriter, StaleUnit, write_at_once
from controller.placement.cell_facts import SUSPECT
from controller.placement.ledger import Claim, FreedPlace, LedgerContent, LedgerLost, QueueLedger, build_claims
from controller.placement.observed_units import ObservedUnits, observe_units_in_steps, take_last_step
from controller.placement.open_claims import OpenClaims
from controller.placement.planner import Round, plan
from controller.placement.pool_limits import PoolRules
from controller.placement.queue_events import (
    QueueEventSender,
    describe_admission,
    describe_failure,
    describe_preemption,
)
from controller.placement.round_pacer import LONGEST_PAUSE_SECONDS, ProcessorMeter
from controller.placement.units import Unit, UnitKey
from controller.placement.unscheduled_pods import PINNED_SECONDS, OverduePod, UnscheduledPods
from controller.placement.vanished_units import UnreportedEnds, VanishedUnits, build_freed_place, is_gone
from controller.placement.wake_rules import has_waiting_objects
from controller.placement.write_retries import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, WriteRetries
from controller.placement.write_slots import HANG_SECONDS, NamespaceHangs, UnitWrites, WriteSlots
from controller.reconcile.plan import Leading
from kube.backoff import backoff_seconds
from kube.errors import ApiError, Unreachable
from kube.resources import PODS, ObjectKey

WRITES_AT_ONCE: Final = 8
SEEN_SECONDS: Final = 5.0
"""Time in which the watch shows what was written; without it, an eviction is asked for again."""
EVICTION_RETRY_SECONDS: Final = 10.0
"""Longest pause before an eviction that a PodDisruptionBudget refused is asked for again."""
LATE_WRITE_SECONDS: Final = 40.0
"""Time in which a write that was not answered here arrives and is seen; the API server ends each after 34 s."""
_INCOMPLETE: Final = (
    f"the queue's ledger was missing or damaged: writes of an earlier leader are awaited for {LATE_WRITE_SECONDS:.0f} s"
)
STEP_SECONDS: Final = 0.02
"""Time for which the units are read before others have their turn: many are new when a leader starts."""
REPORTED_TRIES: Final = 3
"""Tries after which the owner of a service is told of an admission that fails: a server that restarts fails a few."""

log = structlog.get_logger()


class LeadershipTerm:
    """State of one leadership term, which ends with it.

    The ledger is a ConfigMap that survives this controller. A claim in it is a unit that is being admitted, with its
    cells (nodes or hosts); a freed place is the queue place of a unit that has ended, which its successor inherits.
    """

    def __init__(
        self,
        parts: AdmissionParts,
        leading: Leading,
        tasks: asyncio.TaskGroup,
        wake: Callable[[], None],
        vanished: VanishedUnits,
    ) -> None:
        """Start a term without claims or places; `begin` takes over those of the last leader."""
        self._parts, self._leading, self._tasks = parts, leading, tasks
        self._ledger = QueueLedger(leading.client, parts.identity)
        self._wake, self._vanished = wake, vanished  # asks for another round; places of units that vanish
        self._writer = AdmissionWriter(leading)

        # What the ledger has, or gets with the next round.
        self._claims = OpenClaims()  # admissions that are decided and not known to be written; they reserve room
        self._freed_places: tuple[FreedPlace, ...] = ()  # queue places of ended units, for their successors
        self._unwritten_uids: set[str] = set()  # units whose freed places the ledger does not have yet

        # What only this term knows.
        self._retries = WriteRetries(wake)  # pauses after failed writes, by uid of the unit
        self._unscheduled = UnscheduledPods()  # admitted pods that the scheduler refuses
        self._slots = WriteSlots(WRITES_AT_ONCE)  # limits the writes at once
        self._writes = UnitWrites(tasks, self._slots, self._retries)  # all writes apart from admissions
        self._unreported = UnreportedEnds(wake)  # ended processes whose memory a host still reports as taken
        self._events = QueueEventSender(leading)  # sends Events of the services
        self._failed_ledger_writes = 0  # in a row

    async def begin(self) -> None:
        """Forget units of earlier terms, and take the ledger over; tasks finish what the last leader began."""
        self._vanished.expect(())
        self._vanished.take()
        await self._take_over()

    async def _take_over_again(self) -> None:
        """Pause, longer after each failure in a row, then take the ledger over again: a write of it failed."""
        self._failed_ledger_writes += 1
        # Two controllers may both believe that they lead: without a pause, each would undo the steps of the other.
        pause = backoff_seconds(self._failed_ledger_writes, first=FIRST_RETRY_SECONDS, most=LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(pause)
        await self._take_over()

    async def _take_over(self) -> None:
        """Become the only writer of the ledger, and take over what it says; retry until that succeeds.

        The ledger is incomplete if it was missing or damaged: then claims of the last leader may be lost, so no cell is
        given away until their writes can no longer arrive. An error that lasts is reported to the services that wait.
        """
        failures = 0
        while True:
            self._leading.require_leadership()
            try:
                inherited = await self._ledger.take_over()  # what the last leader has left in the ledger
                self._adopt(inherited)  # from now on its claims and places are ours
                if inherited.is_incomplete:
                    await self._await_late_writes()
            except (ApiError, Unreachable, LedgerLost) as error:
                failures += 1
                log.warning("ledger_not_taken_over", error=str(error))
                if failures >= REPORTED_TRIES:
                    await self._report_ledger_error(str(error))
                await asyncio.sleep(backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS))
            else:
                return

    def _adopt(self, inherited: LedgerContent) -> None:
        """Add the last leader's freed places and claims to ours; a task repeats the write of each new claim."""
        known_uids = {place.unit for place in self._freed_places}
        new_places = (place for place in inherited.freed if place.unit not in known_uids)
        self._freed_places = (*new_places, *self._freed_places)
        for uid, claim in self._claims.add(inherited.claims).items():  # returns those that are new to us
            self._tasks.create_task(self._finish_uncertain_claim(uid, claim))

    async def _await_late_writes(self) -> None:
        """Wait until writes whose claims the damaged ledger lost can no longer arrive; then write the ledger anew."""
        await self._report_ledger_error(_INCOMPLETE)
        if has_waiting_objects(self._leading.store):  # else a late write finds no object to admit
            log.warning("late_writes_awaited", seconds=LATE_WRITE_SECONDS)
            await asyncio.sleep(LATE_WRITE_SECONDS)
        await self._ledger.write(self._claims.list_all({}), self._freed_places)  # {}: no new claims

    async def _report_ledger_error(self, error: str) -> None:
        """Show the error in the status of each unit that a round would admit or nominate now; carry nothing out."""
        _observed, report = await self._plan(self._list_inheritable())
        uids = (action.unit.uid for action in report.round.actions if isinstance(action, Admit | Nominate))
        failures = dict.fromkeys(uids, error)
        self._parts.on_round(report._replace(round=report.round._replace(actions=()), failures=failures))

    async def _finish_uncertain_claim(self, uid: str, claim: Claim) -> None:
        """Repeat the write of a claim whose first write may still arrive, then release its reserved room.

        The first write was that of another leader, or one of ours without an answer. The cell stays the same even if it
        is gone: one of its name may come back and be given to another unit before the first write arrives.
        """
        loop, failures = asyncio.get_running_loop(), 0
        given_up_at = loop.time() + LATE_WRITE_SECONDS

        # 1. Write again until that succeeds, the unit is stale (gone or changed), or no late write can arrive any more.
        outcome: AdmissionOutcome = "failed"
        while outcome == "failed" and loop.time() < given_up_at:
            # The watch may not have shown yet what the other leader saw or wrote.
            await self._writer.read(claim.kind, claim.objects)
            with contextlib.suppress(NamespaceHangs):  # then this try has failed, too
                async with self._slots.hold(claim.namespace):
                    outcome = await self._write_claim(uid, claim, is_own=False)
            if outcome == "failed":
                failures += 1
                await asyncio.sleep(backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LONGEST_PAUSE_SECONDS))

        # 2. Keep the room while a write may still arrive: every try failed, or only a part of a gang is gone.
        find_pod = functools.partial(self._leading.store.get, PODS, namespace=claim.namespace)
        # A gang is stale if one of its pods is gone; the write of another one may arrive all the same.
        is_partial_gang = outcome == "stale" and claim.kind == "gang" and any(map(find_pod, claim.names))
        if outcome == "failed" or is_partial_gang:
            kept_until = max(given_up_at, self._claims.find_late_write(uid))  # a try above may be late, too
            await asyncio.sleep(max(0.0, kept_until - loop.time()))
            await self._writer.read(claim.kind, claim.objects)

        # 3. Release the room; after a failure the claim must also leave the ledger (it is not done).
        self._release(uid, is_done=outcome != "failed")

    async def _write_claim(self, uid: str, claim: Claim, *, is_own: bool = True) -> AdmissionOutcome:
        """Write the cells of a claim into its objects once, and return the outcome.

        admitted: written. stale: the objects changed or are gone, so the next round decides anew. failed: the API
        refused or did not answer; that is noted for the retry, and the third failure in a row is sent as an Event of
        the service. If `is_own`, this leader began the claim and its room is released here: at once, or after a failure
        by a task that first finds out what was written. Otherwise the caller releases it.
        """
        try:
            await self._writer.admit(uid, claim)
        except StaleUnit as stale:
            log.info("admission_stale", unit=uid, cause=str(stale))
            outcome: AdmissionOutcome = "stale"
        except (ApiError, Unreachable) as error:
            cell = claim.cells[0] if claim.cells else ""  # without cells, the scheduler chooses the node
            if self._retries.note_failure(uid, cell, error) == REPORTED_TRIES:
                service = ObjectKey(claim.namespace, claim.service)
                self._tasks.create_task(self._events.send(service, describe_failure(claim.names[0], cell, str(error))))

            is_unanswered = isinstance(error, Unreachable) or error.status == HTTPStatus.GATEWAY_TIMEOUT
            if is_unanswered:  # its room stays reserved for as long as the write may arrive
                self._claims.expect_late_write(uid, asyncio.get_running_loop().time() + LATE_WRITE_SECONDS)
            if is_own:
                # A write without an answer may arrive late, so it is repeated; after a refusal, reading is enough.
                follow_up = self._finish_uncertain_claim if is_unanswered else self._learn_outcome
                self._tasks.create_task(follow_up(uid, claim))
            return "failed"
        else:
            self._retries.forget(uid)
            outcome = "admitted"

        if is_own:
            self._release(uid, is_done=True)
        return outcome

    def _release(self, uid: str, *, is_done: bool = False) -> None:
        """Release the room reserved for a unit, and plan again; not `is_done`: its claim must leave the ledger soon."""
        self._claims.release(uid, is_done=is_done)
        self._wake()

    async def _learn_outcome(self, uid: str, claim: Claim) -> None:
        """Read the objects of a claim whose write failed; until they are known, its cells stay reserved."""
        await self._writer.read(claim.kind, claim.objects)
        self._release(uid)

    async def play_round(self) -> RoundReport:
        """Plan one round, write its actions to the ledger, carry them out, and return the report about the round."""
        # 1. Note the queue places of vanished units (pods or processes); those of units that are gone may be inherited.
        self._add_vanished()
        inheritable = self._list_inheritable()

        # 2. Plan, and report the result to the board and the metrics.
        observed, report = await self._plan(inheritable)
        meter = ProcessorMeter()  # processor time of the reports
        with meter.running():
            self._parts.on_round(report)

        # 3. Ask for another round when time alone changes a decision; None: it changes none.
        made = report.round
        for seconds in (made.again_seconds, observed.again_seconds):
            if seconds is not None:
                asyncio.get_running_loop().call_later(seconds, self._wake)

        # 4. Annotate pods and processes with the places that they inherit.
        await self._keep_places(observed, inheritable)

        # 5. Write the decisions to the ledger first: if this controller dies, the next leader finishes them from there.
        #    Only then give cells to units, evict, and delete the overdue pods, which the scheduler refuses.
        overdue = self._list_overdue(observed.units)
        if made.actions or overdue or self._unwritten_uids or self._claims.must_rewrite_ledger:
            if await self._write_ledger(made.actions, overdue):
                await self._carry_out(made)
                await self._requeue(overdue)
            else:
                self._wake()  # nothing of this round is carried out: another one decides anew
        return report._replace(processor_seconds=report.processor_seconds + meter.seconds)

    async def _plan(self, inheritable: Iterable[FreedPlace]) -> tuple[ObservedUnits, RoundReport]:
        """Read the units and plan one round in a thread; nothing is written to the cluster."""
        loop = asyncio.get_running_loop()
        moment, started, meter = datetime.now(UTC), loop.time(), ProcessorMeter()
        now = moment.timestamp()

        # 1. Read the units of the store; successors inherit the places in `inheritable`.
        self._vanished.begin_round()  # units that vanish from here on are noted, too
        observed = await self._observe(moment, inheritable, meter)
        with meter.running():
            # Ended processes whose host still reports their memory as taken are units as well.
            observed = observed._replace(units=self._unreported.add_to(observed.units, self._leading.store))

            # 2. Subtract the room of open claims (admissions under way) from the cells.
            cells, is_all_known = self._claims.reserve(self._parts.registry.list_cells(), observed.units)
            self._vanished.expect(observed.units)  # to know their places if they vanish

            # 3. Leave out units that must not be planned now; add what the end of each would free of claimed devices.
            plannable = self._list_plannable(observed.units, started)
            units = [self._parts.registry.devices.add_freed(unit) for unit in plannable]
            rules = self._parts.rules()

        # 4. Plan in a thread, so that the event loop goes on.
        def run_planner() -> Round:
            with meter.running():
                return plan(cells, units, rules, now)

        made = await asyncio.to_thread(run_planner)
        if not is_all_known:
            # The unit of a claim is unknown, so a cell that seems full may be free: only admissions to free cells stay.
            made = made._replace(
                actions=tuple(action for action in made.actions if isinstance(action, Admit) and action.cells)
            )
        plan_seconds, failures = loop.time() - started, self._retries.list_errors()
        claimed = self._claims.list_cells()
        return observed, RoundReport(made, cells, observed.units, now, plan_seconds, meter.seconds, failures, claimed)

    def _list_inheritable(self) -> list[FreedPlace]:
        """Return the freed places whose unit is gone, so that successors may inherit them."""
        return [place for place in self._freed_places if is_gone(self._leading.store, place)]

    def _add_vanished(self) -> None:
        """Add the queue places of units that vanished since the last round to those that successors may inherit."""
        known_uids = {place.unit for place in self._freed_places}
        places = [place for place in self._vanished.take() if place.unit not in known_uids]
        self._freed_places = (*self._freed_places, *places)
        self._unwritten_uids.update(place.unit for place in places)

    async def _observe(self, moment: datetime, freed: Iterable[FreedPlace], meter: ProcessorMeter) -> ObservedUnits:
        """Return the units of the store, read in short steps so that the event loop stays responsive."""
        # The places of ended units, which waiting units of the same service inherit.
        freed_by_service: dict[str, list[str]] = {}
        for place in freed:
            freed_by_service.setdefault(place.service, []).append(place.enqueued_at)

        steps = observe_units_in_steps(
            self._leading.store,
            self._parts.vendors,
            moment,
            freed_by_service,
            is_queued_by_default=self._parts.is_queued_by_default,
            find_volume_nodes=self._parts.find_volume_nodes,
        )
        return await take_last_step(steps, STEP_SECONDS, meter)

    def _list_overdue(self, units: Iterable[Unit]) -> Sequence[OverduePod]:
        """Return the admitted pods that the scheduler has refused for too long: they go back to the queue.

        A unit without a cell, in an elastic pool (one with an autoscaler), has more time: its node may be on its way. A
        cell that refused pods of several namespaces is probably the cause, so it is closed for a while.
        """
        loop, pool_rules = asyncio.get_running_loop(), self._parts.rules().pools

        def is_elastic(unit: Unit) -> bool:
            return any(pool_rules.get(pool, PoolRules()).elastic > 0 for pool in unit.pools)

        overdue, again_seconds = self._unscheduled.list_overdue(self._leading.store, units, loop.time(), is_elastic)
        if again_seconds is not None:  # then the next pod is overdue
            loop.call_later(again_seconds, self._wake)
        for unit, message in overdue:
            for cell in self._unscheduled.note_refusal(unit, loop.time()):
                self._parts.registry.suspect(cell, SUSPECT, message, PINNED_SECONDS)
            loop.call_later(PINNED_SECONDS, self._wake)  # then the service is tried there again
        # The deletion of a paused pod was tried a moment ago.
        return [pod for pod in overdue if not self._retries.is_paused(pod.unit.uid, loop.time())]

    async def _requeue(self, overdue: Iterable[OverduePod]) -> None:
        """Delete pods that the scheduler has refused for too long: their successors wait in the queue again."""
        for unit, message in overdue:
            if await self._writes.try_write(unit.uid, unit.key.namespace, self._writer.requeue(unit)):
                log.info("unit_requeued", unit=str(unit.key), cells=unit.cells, cause=message)
                self._retries.pause(unit.uid, SEEN_SECONDS)  # until the watch shows the deletion

    def _list_plannable(self, units: Iterable[Unit], now: float) -> Iterable[Unit]:
        """Yield the units that this round may decide about: all that run or end, and most that wait.

        Left out are waiting units whose needs are not assessed yet, that are being admitted, or that pause after a
        failed write. Yielded units carry the cells that refused them (`refused_by`: tried last; `avoid`: never).
        """
        for unit in units:
            if unit.state != "waiting":
                yield unit
                continue
            if not unit.is_assessed or self._claims.covers(unit) or self._retries.is_paused(unit.uid, now):
                continue
            refused_by = self._retries.refused_by(unit.uid)
            avoided = self._unscheduled.list_avoided(unit.service, now)
            if refused_by or avoided:
                yield msgspec.structs.replace(unit, refused_by=refused_by, avoid=unit.avoid | avoided)
            else:
                yield unit

    async def _write_ledger(self, actions: Sequence[Action], overdue: Iterable[OverduePod]) -> bool:
        """Write the claims and freed places of a round to the ledger; return whether its actions may be carried out.

        False after a failed write: the ledger has been taken over again, and the next round decides anew.
        """
        # 1. Make a claim for each admission, as far as the ledger has room. Without a claim, it is not carried out.
        admissions = [action for action in actions if isinstance(action, Admit)]
        claims = build_claims(admissions, self._claims.count_objects())
        if len(claims) < len(admissions):
            self._wake()  # the others are planned again

        # 2. Free the places of units that end now. The service itself makes the successor of a process, with its place.
        victims = [action.victim for action in actions if isinstance(action, EvictUnit)]
        ended = [*victims, *(pod.unit for pod in overdue)]
        newly_freed = [build_freed_place(unit) for unit in ended if unit.key.kind != "process"]
        if not claims and not ended and not self._unwritten_uids and not self._claims.must_rewrite_ledger:
            return True  # nothing is new to the ledger; only nominations are to be carried out, if anything
        known_uids = {place.unit for place in self._freed_places}
        freed_places = (*self._freed_places, *(place for place in newly_freed if place.unit not in known_uids))

        # 3. Write both; they count here only once the ledger has them.
        self._claims.must_rewrite_ledger = False  # this write leaves out the claims that were given up
        try:
            await self._ledger.write(self._claims.list_all(claims), freed_places)
        except (ApiError, Unreachable, LedgerLost) as error:
            log.warning("ledger_not_written", error=str(error))
            self._claims.must_rewrite_ledger = True
            await self._take_over_again()
            return False
        self._claims.add(claims)
        self._freed_places = freed_places
        self._unwritten_uids.clear()
        self._failed_ledger_writes = 0
        return True

    async def _carry_out(self, made: Round) -> None:
        """Admit, nominate and evict as a round decided; a refused write of one unit does not stop the others."""
        # 1. Write the admissions that the ledger has a claim for.
        admissions = [admit for admit in made.actions if isinstance(admit, Admit) and admit.unit.uid in self._claims]
        with self._parts.admitting() if admissions else contextlib.nullcontext():  # holds reconciles back
            pending = {self._tasks.create_task(self._admit(admission)) for admission in admissions}
            done = set(pending)
            while pending and done:
                # Once none has ended for HANG_SECONDS, the rest goes on beside later rounds, with its room reserved.
                done, pending = await asyncio.wait(pending, timeout=HANG_SECONDS)

        # 2. Nominate units, or withdraw that; note in `unpromised` those for which the write failed.
        unpromised: set[str] = set()

        async def write_nomination(action: Nominate | WithdrawNomination) -> None:
            unit = action.unit
            nomination = action.nomination if isinstance(action, Nominate) else None
            if not await self._writes.try_write(unit.uid, unit.key.namespace, self._writer.nominate(unit, nomination)):
                unpromised.add(unit.uid)

        nominations = (action for action in made.actions if isinstance(action, Nominate | WithdrawNomination))
        await write_at_once(WRITES_AT_ONCE, (functools.partial(write_nomination, action) for action in nominations))

        # 3. Evict, but only for preemptors that are nominated: else the freed room may go to whoever comes first.
        for action in made.actions:
            if isinstance(action, EvictUnit) and action.preemptor.uid not in unpromised:
                await self._evict(action)

    async def _admit(self, action: Admit) -> None:
        """Write the admission of a unit if its cells still have room, and report the outcome.

        Its claim is in the ledger already, and reserves the cells. It is released if they have no room any more, or if
        other writes in the namespace hang; else `_write_claim` releases it.
        """
        unit = action.unit
        outcome: AdmissionOutcome = "stale"
        try:
            async with self._slots.hold(unit.key.namespace):
                if self._claims.has_room(unit, action.cells, self._parts.registry.find_cell):  # as cells are by now
                    self._claims.begin_write(unit)
                    outcome = await self._write_claim(unit.uid, self._claims[unit.uid])
                else:
                    self._release(unit.uid)
        except NamespaceHangs as hangs:
            outcome = "failed"
            self._release(unit.uid)
            self._retries.note_failure(unit.uid, "", hangs)  # "": no cell is to blame

        if outcome == "admitted":
            self._parts.on_admitted(action)
            self._tasks.create_task(self._events.send(unit.service, describe_admission(unit, action.cells)))
        self._parts.on_outcome(outcome)

    async def _evict(self, action: EvictUnit) -> None:
        """Evict a unit for another one (the preemptor), unless that was tried a moment ago, and report it."""
        victim, preemptor = action.victim, action.preemptor
        if self._retries.is_paused(victim.uid, asyncio.get_running_loop().time()):
            return
        write = self._writer.evict(victim, preemptor)
        if await self._writes.try_write(victim.uid, victim.key.namespace, write, EVICTION_RETRY_SECONDS):
            log.info("unit_evicted", unit=str(victim.key), preemptor=str(preemptor.key))
            self._parts.on_preemption(action)
            self._tasks.create_task(self._events.send(victim.service, describe_preemption(victim, preemptor)))
            self._retries.pause(victim.uid, SEEN_SECONDS)  # until the watch shows the end

    async def _keep_places(self, observed: ObservedUnits, inheritable: Sequence[FreedPlace]) -> None:
        """Annotate units with the places that they inherit; forget spent places, and failures of units now gone."""
        # 1. Forget failures. They are noted by uid of a unit; those to annotate its place, by its key as in `annotate`.
        self._retries.keep_only({*(unit.uid for unit in observed.units), *map(str, observed.places)})

        # 2. Annotate units that do not pause after a failure.
        now = asyncio.get_running_loop().time()

        async def annotate(key: UnitKey, place: str) -> None:
            """Write its inherited place into a pod or process; after a failure, a later round tries again."""
            name = ObjectKey(key.namespace, key.name)
            await self._writes.try_write(str(key), key.namespace, self._writer.keep_place(key.kind, name, place))

        due = [(key, place) for key, place in observed.places.items() if not self._retries.is_paused(str(key), now)]
        await write_at_once(WRITES_AT_ONCE, (functools.partial(annotate, *key_and_place) for key_and_place in due))

        # 3. Forget the places that were offered to this round (`inheritable`) and that no unit can inherit any more.
        spent = {place for place in inheritable if place.enqueued_at not in observed.open_places.get(place.service, ())}
        self._freed_places = tuple(place for place in self._freed_places if place not in spent)
        self._unwritten_uids.intersection_update(place.unit for place in self._freed_places)
