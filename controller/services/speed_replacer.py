"""The replacement of replicas in pods whose speed has fallen: gathers the facts, asks for a better place, and reports.

All decisions are those of `controller/placement/replacement.py`. The pods follow from `status.replacement`: the
Deployment gets one more, the queue gives it a better place, and the slow one ends when it is ready.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

import structlog

from controller.models.served import read_companions
from controller.placement.candidate_room import CandidateRooms, ProspectiveReplica
from controller.placement.effects import build_eviction
from controller.placement.move_turns import MoveTurns
from controller.placement.pod_units import send_to_better_place
from controller.placement.pool_table import read_pools
from controller.placement.replacement import (
    PLACE_SECONDS,
    PresentReplica,
    ReplacementHold,
    ServiceFacts,
    SlowReplica,
    begin_replacement,
    describe_slow,
    find_hold,
    find_replica,
    go_on,
    is_active,
    least_speed,
    note_help,
    pick_slowest,
)
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import condition, find
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Event, Snapshot
from controller.services.candidates import check_candidate, state_accelerator
from controller.services.class_speeds import FindSpeeds
from controller.services.device_classes import find_replica_class
from controller.services.endpoints import Endpoint
from controller.services.pods.devices import request_devices
from controller.services.pods.one_node import has_one_node
from controller.services.pods.queue_gate import is_queued
from controller.services.pods.surge import list_present_replicas
from controller.services.speed_watch import SpeedWatch, WatchedSpeeds
from controller.services.status import ServiceView
from crds.inferenceservice import InferenceService
from crds.meta import without_defaults
from crds.model import Model
from crds.placement import ClassSpeed, SpeedReplacement
from crds.rate import format_rate
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, NotFound
from kube.resources import MODELS, PODS, ObjectKey

DEGRADED: Final = "SpeedDegraded"
"""Condition of a service with a replica that is slow for some time."""
_REPLACING: Final = "Replacing"
_STEP_SECONDS: Final = 1.0
"""Pause after a step: the status is not watched by what it decides."""
_GONE: Final = ReplacementHold("NotReady", "its pod is about to end", _STEP_SECONDS)
_REFUSED_BY_BUDGET: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR})

CountReplacement = Callable[[Literal["Moved", "GivenUp"]], None]

log = structlog.get_logger()


class ReplacementReport(NamedTuple):
    """The replacement of a service, as its status shows it."""

    replacement: SpeedReplacement | None = None
    """The last one."""
    condition: Obj | None = None
    """None: no replica is slow."""
    again_seconds: float | None = None

    def add_to(self, status: Obj) -> Obj:
        """Return a status with the replacement."""
        shown = {"replacement": without_defaults(self.replacement)} if self.replacement is not None else {}
        added = [self.condition] if self.condition is not None else []
        return {**status, **shown, "conditions": [*status["conditions"], *added]}

    def list_events(self, last: SpeedReplacement | None) -> tuple[Event, ...]:
        """Return the Events by which the replacement has changed since the last status."""
        made = self.replacement
        if made is None or (last is not None and (last.started_at, last.ended_at) == (made.started_at, made.ended_at)):
            return ()
        if made.ended_at is None:
            return (Event("Warning", "ReplicaSlow", made.message, "Replace"),)
        kind: Literal["Normal", "Warning"] = "Normal" if made.outcome == "Moved" else "Warning"
        return (Event(kind, "ReplicaMoved" if made.outcome == "Moved" else "MoveGivenUp", made.message, "Replace"),)


def report_without_replacer(service: InferenceService) -> ReplacementReport:
    """Return the report of a controller that replaces nothing: what goes on is given up, and the pods follow."""
    last = service.status.replacement
    return ReplacementReport(again_seconds=_STEP_SECONDS) if is_active(last) else ReplacementReport(last)


class SpeedReplacer:
    """The replacements of all services.

    Args:
        watch: the watch over speeds.
        rooms: the room of accelerators.
        settings: options of the controller.
        find_speeds: returns the speed of a service on the device classes of an accelerator.
        count: counts each replacement that has ended.
    """

    def __init__(
        self,
        watch: SpeedWatch,
        rooms: CandidateRooms,
        settings: PodSettings,
        find_speeds: FindSpeeds,
        count: CountReplacement,
    ) -> None:
        self.watch = watch
        self._rooms, self._settings, self._find_speeds, self._count = rooms, settings, find_speeds, count
        self._turns = MoveTurns()

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        self.watch.forget(key)
        self._turns.end(key)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self.watch.restart()
        self._turns.restart()

    async def report(
        self,
        client: Client,
        snapshot: Snapshot,
        key: ObjectKey,
        view: ServiceView,
        classes: Sequence[ClassSpeed],
    ) -> ReplacementReport:
        """Return how the replacement of a service stands, and begin one if that is due. Raises as `Client`."""
        service, last = view.service, view.service.status.replacement
        watched = self.watch.follow(key, list_expected(snapshot, view, classes, self._settings))
        facts = describe_service(snapshot, view, self._settings)
        if last is not None and is_active(last):
            return self._go_on(key, service, last, facts, snapshot)
        ahead = self._turns.list_ahead(key, snapshot.now)
        self._turns.end(key)
        last = note_help(last, watched.healthy) if last is not None else None
        if not watched.slow:
            return ReplacementReport(last, _keep_condition(service, watched))
        slow, rules = pick_slowest(watched.slow), self.watch.rules
        leaving = find_replica(slow, facts.replicas)
        hold = find_hold(last, facts, ahead, snapshot.now, rules.cool_down_seconds)
        if hold is not None or leaving is None:
            if hold is not None and hold.reason == "TooManyMoves":
                self._turns.wait(key, snapshot.now)
            return _report_hold(service, last, slow, leaving, hold or _GONE)
        least = least_speed(slow, rules)
        found = self._find_better(snapshot, view, slow, least)
        if isinstance(found, ReplacementHold):
            return _report_hold(service, last, slow, leaving, found)
        if (refusal := await self._ask_budgets(client, snapshot, key, leaving)) is not None:
            return _report_hold(service, last, slow, leaving, refusal)
        made = begin_replacement(slow, leaving, least, found, snapshot.now)
        self._turns.begin(key)
        log.warning("replacement_began", service=str(key), place=slow.place, better=found, message=made.message)
        return ReplacementReport(made, _describe_active(service, made), _STEP_SECONDS)

    def _go_on(
        self, key: ObjectKey, service: InferenceService, last: SpeedReplacement, facts: ServiceFacts, snapshot: Snapshot
    ) -> ReplacementReport:
        self._turns.begin(key)
        progress = go_on(last, facts, snapshot.now)
        made = progress.replacement
        if made.ended_at is None:
            return ReplacementReport(made, _describe_active(service, made), progress.again_seconds)
        self._turns.end(key)
        if made.outcome is not None:
            self._count(made.outcome)
        log.info(
            "replacement_ended",
            service=str(key),
            outcome=made.outcome,
            place=made.from_place,
            to=made.to_place,
            message=made.message,
        )
        if made.outcome == "Moved":
            return ReplacementReport(made, None, _STEP_SECONDS)
        generation = service.metadata.generation
        shown = condition(DEGRADED, true=True, reason="CoolDown", message=made.message, generation=generation)
        return ReplacementReport(made, shown, _STEP_SECONDS)

    def _find_better(
        self, snapshot: Snapshot, view: ServiceView, slow: SlowReplica, least: float
    ) -> str | ReplacementHold:
        """Return the best free place that is better, or why none is known."""
        again_seconds = self.watch.rules.check_seconds
        service, accelerator, store = view.service, view.accelerator, snapshot.store
        table = read_pools(store, self._settings.vendors)

        def read(key: ObjectKey) -> Model | None:
            return snapshot.read(MODELS, key, Model)

        model = read(ObjectKey(service.metadata.namespace, service.spec.model_ref))
        stated = state_accelerator(service, accelerator or "", table, 1)
        companions = read_companions(read, service)
        checked = check_candidate(*(store, stated, model, companions, self._settings), find_speeds=self._find_speeds)
        if checked.prospect is None:
            return ReplacementHold("NotReady", checked.problem.message if checked.problem else "its Model is not known")
        unit, pod = checked.prospect
        found = self._rooms.find_best(ProspectiveReplica(send_to_better_place(unit, slow.place, least), pod))
        if found is None:
            return ReplacementHold("RoomUnknown", "the controller has not looked at the nodes yet", again_seconds)
        if found.cell is None:
            wanted = f"no other node with room is known to reach {format_rate(least)} tokens/s"
            message = f"{wanted}: look for what else uses {slow.place}, or add a node"
            return ReplacementHold("NoBetterPlace", message, again_seconds)
        return found.cell.id

    async def _ask_budgets(
        self, client: Client, snapshot: Snapshot, key: ObjectKey, leaving: PresentReplica
    ) -> ReplacementHold | None:
        """Return why a PodDisruptionBudget lets the pod not be taken away, or None. Raises as `Client`.

        No replica is missing at any time, but a budget may be there to keep clients connected.
        """
        pods = snapshot.store.by_index(PODS, SERVICE_INDEX, namespaced(key.namespace, key.name))
        pod = next((each for each in pods if each["metadata"]["uid"] == leaving.uid), None)
        if pod is None:
            return _GONE
        name = leaving.name
        try:
            await client.try_subresource(PODS, name, key.namespace, "eviction", build_eviction(pod))
        except (NotFound, Conflict):
            return _GONE
        except ApiError as error:
            if error.status not in _REFUSED_BY_BUDGET:
                raise
            return ReplacementHold(
                "BudgetForbids", f"an eviction of pod {name} is refused: {error.message}", PLACE_SECONDS
            )
        return None


def list_expected(
    snapshot: Snapshot, view: ServiceView, classes: Sequence[ClassSpeed], settings: PodSettings
) -> Mapping[Endpoint, float]:
    """Return the speed in tokens/s that is expected of each pod that serves: measured, or the least by an estimate."""
    known = {each.device_class: float(each.low or each.tokens_per_second or 0) for each in classes}
    accelerators = (view.accelerator or "",)
    found: dict[Endpoint, float] = {}
    by_node: dict[str, float] = {}
    for each in view.own_endpoints:
        if each.host or not each.node:
            continue
        if each.node not in by_node:
            device_class = find_replica_class(snapshot, view.service, accelerators, each.node, settings.vendors)
            by_node[each.node] = known.get(device_class or "", 0.0)
        if by_node[each.node]:
            found[each] = by_node[each.node]
    return found


def describe_service(snapshot: Snapshot, view: ServiceView, settings: PodSettings) -> ServiceFacts:
    """Return the facts about a service by which its replacements are decided."""
    service, replicas = view.service, view.replicas
    pods = snapshot.store.by_index(PODS, SERVICE_INDEX, namespaced(service.metadata.namespace, service.metadata.name))
    is_current = service.status.observed_generation == service.metadata.generation
    return ServiceFacts(
        wanted=view.wanted,
        replicas=list_present_replicas(pods),
        is_settled=is_current and view.blocker is None and not replicas.awaiting and not replicas.keep,
        is_protected=service.spec.eviction_protection,
        obstacle=_find_obstacle(snapshot, view, settings),
    )


def _find_obstacle(snapshot: Snapshot, view: ServiceView, settings: PodSettings) -> str:
    """Return why no pod of a service can be replaced while it serves; empty if one can."""
    service = view.service
    if view.chosen is not None:
        return "it may use several accelerators, of which replicas are not compared: name one to have them replaced"
    vendor = settings.vendors.get(view.accelerator or "")
    if vendor is None or not vendor.in_pods or not is_queued(service, request_devices(service, vendor), settings):
        return "only pods that the queue has placed are replaced: set spec.scheduling.mode to Queue"
    model = snapshot.read(MODELS, ObjectKey(service.metadata.namespace, service.spec.model_ref), Model)
    if model is None or model.spec.cache.scope == "node":
        return "its pods are beside copies of the weights: spec.cache.scope of the Model is node"
    if has_one_node(model):
        return "its volume is on one node at a time: set spec.cache.accessMode of the Model to ReadWriteMany"
    return ""


def _report_hold(
    service: InferenceService,
    last: SpeedReplacement | None,
    slow: SlowReplica,
    replica: PresentReplica | None,
    hold: ReplacementHold,
) -> ReplacementReport:
    message = f"{describe_slow(slow, replica)}; it stays: {hold.message}"
    generation = service.metadata.generation
    shown = condition(DEGRADED, true=True, reason=hold.reason, message=message, generation=generation)
    return ReplacementReport(last, shown, hold.again_seconds)


def _describe_active(service: InferenceService, replacement: SpeedReplacement) -> Obj:
    generation = service.metadata.generation
    return condition(DEGRADED, true=True, reason=_REPLACING, message=replacement.message, generation=generation)


def _keep_condition(service: InferenceService, watched: WatchedSpeeds) -> Obj | None:
    """Return the condition of an earlier leader, until this one has read the service."""
    known = find(service.status.conditions, DEGRADED)
    if known is None or not watched.is_new:
        return None
    generation = known.observed_generation or service.metadata.generation
    return condition(DEGRADED, true=True, reason=known.reason, message=known.message, generation=generation)
