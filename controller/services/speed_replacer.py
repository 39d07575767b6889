"""The replacement of replicas in pods whose speed or fit has fallen: gathers the facts, finds a place, and reports.

All decisions are those of `controller/placement/replacement.py`. The pods follow from `status.replacement`: the
Deployment gets one more, the queue gives it a better place, and the degraded one ends when it is ready.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import structlog

from controller.placement.candidate_room import CandidateRooms, ProspectiveReplica
from controller.placement.pod_units import restrict_to_better_place
from controller.placement.replacement import (
    DegradedReplica,
    ReplacementHold,
    ServiceFacts,
    begin_replacement,
    continue_replacement,
    describe_degraded,
    find_hold,
    find_replica,
    is_active,
    least_speed,
    pick_worst,
    record_recovery,
)
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import condition
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Event, Snapshot
from controller.services.candidates import check_candidate
from controller.services.checked_replica import read_models
from controller.services.class_speeds import FindSpeeds, describe_refusal
from controller.services.device_classes import find_replica_class
from controller.services.endpoints import Endpoint
from controller.services.pods.devices import request_devices
from controller.services.pods.one_node import has_one_node
from controller.services.pods.queue_gate import is_queued
from controller.services.pods.surge import list_present_replicas
from controller.services.speed_watch import SpeedWatch
from controller.services.status import ServiceView
from crds.inferenceservice import InferenceService
from crds.meta import without_defaults
from crds.model import Model
from crds.placement import ClassSpeed, SpeedReplacement
from crds.rate import format_rate
from kube.client import Obj
from kube.resources import MODELS, PODS, ObjectKey

SPEED_DEGRADED: Final = "SpeedDegraded"
"""Condition of a service with a replica that is slow for some time."""
FIT_DEGRADED: Final = "FitDegraded"
"""Condition of a service with a replica on a device class that fits it no more."""
_REPLACING: Final = "Replacing"
_STEP_SECONDS: Final = 1.0
"""Pause after a step: the status is not watched by what it decides."""
_GONE: Final = ReplacementHold("NotReady", "its pod is about to end, or is not one that can be replaced", 30.0)

CountReplacement = Callable[[Literal["Moved", "GivenUp"]], None]

log = structlog.get_logger()


class ReplacementReport(NamedTuple):
    """The replacement of a service, as its status shows it."""

    replacement: SpeedReplacement | None = None
    """The last one."""
    conditions: tuple[Obj, ...] = ()
    """Those of its replicas that are degraded."""
    again_seconds: float | None = None

    def add_to(self, status: Obj) -> Obj:
        """Return a status with the replacement."""
        shown = {"replacement": without_defaults(self.replacement)} if self.replacement is not None else {}
        return {**status, **shown, "conditions": [*status["conditions"], *self.conditions]}

    def list_events(self, last: SpeedReplacement | None) -> tuple[Event, ...]:
        """Return the Events by which the replacement has changed since the last status: it has begun, or ended.

        One that ended has moved the replica, or was given up.
        """
        made = self.replacement
        if made is None or (last is not None and (last.started_at, last.ended_at) == (made.started_at, made.ended_at)):
            return ()
        if made.ended_at is None:
            return (Event("Warning", "ReplicaSlow", made.message, "Replace"),)
        kind: Literal["Normal", "Warning"] = "Normal" if made.outcome == "Moved" else "Warning"
        return (Event(kind, "ReplicaMoved" if made.outcome == "Moved" else "MoveGivenUp", made.message, "Replace"),)


def report_without_replacer(service: InferenceService) -> ReplacementReport:
    """Return the report of a controller that replaces no slow replica: a replacement that goes on is given up."""
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
        """Begin with no replacement known; those under way are found in the statuses of services, one by one."""
        self.watch = watch
        self._rooms, self._settings, self._find_speeds, self._count = rooms, settings, find_speeds, count
        self._last_replacements: dict[ObjectKey, SpeedReplacement | None] = {}
        """The last replacement of each service, from whose end the cool-down of its namespace counts."""
        self._moving: set[ObjectKey] = set()
        """The services of which a replica is being replaced: those of this leader, and those that it has found."""

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        self.watch.forget(key)
        self._last_replacements.pop(key, None)
        self._moving.discard(key)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self.watch.restart()
        self._last_replacements.clear()
        self._moving.clear()

    def report(
        self, snapshot: Snapshot, key: ObjectKey, view: ServiceView, classes: Sequence[ClassSpeed]
    ) -> ReplacementReport:
        """Return the degraded replicas of a service and the state of a replacement; begin a replacement that is due.

        A replica is degraded if it is slower than its hardware, or fits no more. A replacement under way is dropped if
        the administrator has switched replacements off, else it goes on. Without one, the worst replica begins one,
        unless something holds it where it is. Reason and detail are those of the conditions that report it.
        """
        # 1. The degraded replicas: those that are slow, and those that do not fit.
        service, last = view.service, view.service.status.replacement
        watched = self.watch.follow(key, list_expected(snapshot, view, classes, self._settings))
        degraded = (*watched.slow, *list_misfits(snapshot, view, classes, self._settings))
        facts = describe_service(snapshot, view, self._settings)

        # 2. A replacement under way is dropped or goes on. Without one, a new one begins, or a hold says why none does.
        again_seconds: float | None
        if last is not None and is_active(last) and not self.watch.rules.is_on:
            # The pods follow from `status.replacement`, which is removed.
            last, reason, detail, again_seconds = None, "ReplacementOff", "", _STEP_SECONDS
        elif last is not None and is_active(last):
            if key not in self._last_replacements:
                # This leader has found it. One that comes into a status later keeps no other service from its own:
                # whoever may write the status could forge it.
                self._moving.add(key)
            last, again_seconds = self._continue(key, last, facts, snapshot)
            reason, detail = _REPLACING if is_active(last) else "CoolDown", last.message
        else:
            # One that has ended is marked as helpful if the replica is as fast as expected in its new place.
            last = record_recovery(last, watched.healthy) if last is not None else None
            begun_or_hold = self._begin(snapshot, view, degraded, facts, last) if degraded else None
            if isinstance(begun_or_hold, SpeedReplacement):
                last, reason, detail, again_seconds = begun_or_hold, _REPLACING, begun_or_hold.message, _STEP_SECONDS
                self._moving.add(key)
            elif begun_or_hold is not None:
                hold = begun_or_hold
                reason, detail, again_seconds = hold.reason, hold.message, hold.again_seconds
            else:
                reason, detail, again_seconds = "", "", None

        # 3. Note the state for the decisions about other services.
        if not is_active(last):
            self._moving.discard(key)
        self._last_replacements[key] = last

        conditions = _list_conditions(service, degraded, facts, last, (reason, detail))
        return ReplacementReport(replacement=last, conditions=conditions, again_seconds=again_seconds)

    def _continue(
        self, key: ObjectKey, last: SpeedReplacement, facts: ServiceFacts, snapshot: Snapshot
    ) -> tuple[SpeedReplacement, float | None]:
        """Return the next state of a replacement, and the seconds until the next look at it.

        If it has ended, that is logged and counted for the metrics.
        """
        progress = continue_replacement(last, facts, snapshot.now)
        made = progress.replacement
        if made.ended_at is None or made.outcome is None:
            return made, progress.again_seconds

        self._count(made.outcome)
        fields = {"outcome": made.outcome, "place": made.from_place, "to": made.to_place, "message": made.message}
        log.info("replacement_ended", service=str(key), **fields)
        return made, _STEP_SECONDS

    def _begin(
        self,
        snapshot: Snapshot,
        view: ServiceView,
        degraded: Sequence[DegradedReplica],
        facts: ServiceFacts,
        last: SpeedReplacement | None,
    ) -> SpeedReplacement | ReplacementHold:
        """Return the replacement of the worst replica, which begins now, or the hold: why the replica stays.

        It stays by a rule, such as one replacement at a time, because its pod is gone, or for lack of a better place.
        """
        key = ObjectKey(view.service.metadata.namespace, view.service.metadata.name)
        worst, rules = pick_worst(degraded), self.watch.rules

        # A rule may hold it, such as the cool-down of its namespace, or a replacement of another service.
        others_in_namespace = [
            replacement
            for other, replacement in self._last_replacements.items()
            if replacement is not None and other.namespace == key.namespace and other != key
        ]
        is_other_moving = bool(self._moving - {key})
        hold = find_hold(last, facts, others_in_namespace, snapshot.now, rules, is_other_moving=is_other_moving)

        # Its pod must still be there.
        leaving = find_replica(worst, facts.replicas)
        if hold is not None or leaving is None:
            return hold or _GONE  # _GONE: its pod is about to end

        # There must be a place that is fast enough, or on which it fits.
        least_tokens_per_second = least_speed(worst, rules)
        better_place = self._find_better_place(snapshot, view, worst, least_tokens_per_second)
        if isinstance(better_place, ReplacementHold):
            return better_place

        made = begin_replacement(worst, leaving, least_tokens_per_second, better_place, snapshot.now)
        log.warning("replacement_began", service=str(key), place=worst.place, better=better_place, message=made.message)
        return made

    def _find_better_place(
        self, snapshot: Snapshot, view: ServiceView, degraded: DegradedReplica, least_tokens_per_second: float
    ) -> str | ReplacementHold:
        """Return the best free place (`node/NAME`) for a degraded replica, or the reason why there is none.

        It must reach `least_tokens_per_second`, or fit if that is 0. The queue compares the room for a prospect: a
        further replica of the service, which may not be on the present place.
        """
        # 1. A further replica of the service, as the queue would place it.
        service, accelerator, store = view.service, view.accelerator, snapshot.store
        model, companions = read_models(snapshot, service)
        checked = check_candidate(
            store, service, accelerator or "", model, companions, settings=self._settings, find_speeds=self._find_speeds
        )
        if checked.prospect is None:
            return ReplacementHold("NotReady", checked.problem.message if checked.problem else "its Model is not known")

        # 2. The best room for it elsewhere; None: there is none.
        unit, pod = checked.prospect
        elsewhere = restrict_to_better_place(unit, degraded.place, least_tokens_per_second)
        place = self._rooms.find_best(ProspectiveReplica(elsewhere, pod))
        if place is None or place.cell is None:
            better = f"reach {format_rate(least_tokens_per_second)} tokens/s" if least_tokens_per_second else "fit it"
            message = (
                f"no other node with room is known to {better}: look for what else uses {degraded.place}, or add a node"
            )
            return ReplacementHold("NoBetterPlace", message, self.watch.rules.check_seconds)

        return place.cell.id


def list_misfits(
    snapshot: Snapshot, view: ServiceView, classes: Sequence[ClassSpeed], settings: PodSettings
) -> list[DegradedReplica]:
    """Return the replicas on device classes that do not fit any more, such as after an edit of spec.placement.

    A class does not fit if a replica has too little memory there, or less than spec.placement.minFit demands.
    """
    tight = {speed.device_class: speed for speed in classes if speed.refusal == "TooTight" or speed.fit == "too_tight"}
    if not tight:
        return []

    accelerators, degraded = (view.accelerator or "").split(","), list[DegradedReplica]()
    # Where replicas answer: kind and name of the host or node.
    places = {("host", endpoint.host) if endpoint.host else ("node", endpoint.node) for endpoint in view.own_endpoints}

    for kind, name in sorted(places):
        device_class = find_replica_class(snapshot, view.service, accelerators, name, settings.vendors)
        if device_class in tight:
            misfit = f"{device_class}: {describe_refusal(tight[device_class])}"
            degraded.append(DegradedReplica(f"{kind}/{name}", misfit=misfit))
    return degraded


def list_expected(
    snapshot: Snapshot, view: ServiceView, classes: Sequence[ClassSpeed], settings: PodSettings
) -> Mapping[Endpoint, float]:
    """Return the speed in tokens/s that each pod should have on its device class: as measured, or the least estimated.

    Pods on a class of unknown speed are left out, and so are replicas on hosts.
    """
    speeds = {speed.device_class: float(speed.low or speed.tokens_per_second or 0) for speed in classes}
    accelerators = (view.accelerator or "").split(",")

    # Pods on one node have the same speed, which is looked up once; 0: unknown.
    expected: dict[Endpoint, float] = {}
    by_node: dict[str, float] = {}
    for endpoint in view.own_endpoints:
        if endpoint.host or not endpoint.node:
            continue

        if endpoint.node not in by_node:
            device_class = find_replica_class(snapshot, view.service, accelerators, endpoint.node, settings.vendors)
            by_node[endpoint.node] = speeds.get(device_class or "", 0.0)
        if by_node[endpoint.node]:
            expected[endpoint] = by_node[endpoint.node]
    return expected


def describe_service(snapshot: Snapshot, view: ServiceView, settings: PodSettings) -> ServiceFacts:
    """Return the facts about a service by which its replacements are decided.

    It is settled if its latest spec was decided about and no rollout is under way: its pods are as they should be.
    """
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
    if view.accelerator_choice is not None:
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


def _list_conditions(
    service: InferenceService,
    degraded: Sequence[DegradedReplica],
    facts: ServiceFacts,
    last: SpeedReplacement | None,
    next_step: tuple[str, str],
) -> tuple[Obj, ...]:
    """Return SpeedDegraded if a replica is slow, and FitDegraded if one does not fit, with the step that follows.

    The one of a replacement under way stays until its end, although its replica may not be seen to be degraded any
    more. `next_step` is the reason of the conditions, such as Replacing, and the explanation in words.
    """
    reason, detail = next_step
    conditions = []
    for kind, degraded_of_kind in (
        (SPEED_DEGRADED, [replica for replica in degraded if not replica.misfit]),
        (FIT_DEGRADED, [replica for replica in degraded if replica.misfit]),
    ):
        # A replacement has an observed speed if its replica was slow, and none if it did not fit.
        is_replaced = last is not None and is_active(last) and bool(last.observed) == (kind == SPEED_DEGRADED)
        if not degraded_of_kind and not is_replaced:
            continue
        message = detail
        # A replica that is being replaced has the message of the replacement, any other one its state.
        if degraded_of_kind and not is_replaced:
            worst = pick_worst(degraded_of_kind)
            state = describe_degraded(worst, find_replica(worst, facts.replicas))
            message = state if reason == _REPLACING else f"{state}; it stays: {detail}"

        generation = service.metadata.generation
        conditions.append(condition(kind, true=True, reason=reason, message=message, generation=generation))
    return tuple(conditions)
