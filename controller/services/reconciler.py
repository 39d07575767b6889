"""The InferenceService reconciler: create the objects that serve it, and report its state.

An unmet precondition (a Model that is missing or being fetched, a spec that contradicts itself) stops no replica that
serves: existing replicas stay until others replace them. `Ready` means that an endpoint has answered.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from controller.models.discovery import label_service
from controller.models.served import format_of
from controller.placement.board import FindStanding
from controller.placement.candidate_room import ProspectiveReplica
from controller.placement.device_feed import DeviceFeed
from controller.placement.kueue import KueueQueues
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.plan import Plan, Reconciler, Ref, Snapshot, prune
from controller.services.accelerator_choice import RoomSource, choose_accelerators
from controller.services.checked_replica import read_models
from controller.services.pods.beside_pods import build_disruption_budget, build_network_policy, build_pod_monitor
from controller.services.pods.claim_templates import list_spent_templates, list_templates
from controller.services.pods.deployment import build_network_service
from controller.services.pods.one_node import has_one_node
from controller.services.pods.update_pacer import UpdatePacer
from controller.services.probe_policy import Question
from controller.services.queue_report import NO_REPORT, read_kueue, recall_standing
from controller.services.readiness_probe import Prober
from controller.services.service_triggers import OF_PODS, list_triggers
from controller.services.service_view import ServiceInputs, ViewFacts, build_view
from controller.services.serving_choice import choose_serving
from controller.services.speed_replacer import ReplacementReport, report_without_replacer
from controller.services.speed_report import SpeedSources
from controller.services.status import ServiceView, build_events, build_status
from controller.services.tokens import KnownTokens, token_secret
from controller.services.traffic import UNKNOWN_TRAFFIC, Traffic, add_host_traffic, find_host_traffic, read_traffic
from controller.services.traffic_meter import TrafficMeter, TrafficTarget
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, MODELS, ObjectKey, Resource
from runtimes.probe import ProbeResult

ROTATION_SECONDS: Final = 1.0
"""Pause between two steps of the replacement of a token."""


NO_SPEED_SOURCES: Final = SpeedSources()


class ServiceEffects(msgspec.Struct, frozen=True):
    """All that goes on in this process for a service, beside its writes; by default nothing."""

    question: Question | None = None
    """The endpoints are probed until one has generated a token."""
    proof: ProbeResult | None = None
    """The answer to `question` that an earlier leader got."""
    target: TrafficTarget | None = None
    """The pods whose metrics are read."""
    awaiting: frozenset[str] = frozenset()
    """The Deployments that wait until their pods may be replaced."""
    prospects: Mapping[str, ProspectiveReplica] = {}
    """The service is decided again when the room for one of these replicas comes or goes, by accelerator."""
    is_gone: bool = False
    """All that is known of the service is forgotten."""


class ServiceSources(NamedTuple):
    """The parts of the controller from which decisions about services read, beside the watch cache."""

    prober: Prober
    settings: PodSettings
    tokens: KnownTokens
    """The tokens of services, shared with the reconciler of hosts."""
    pacer: UpdatePacer
    """Orders the services whose pods an update replaces."""
    monitors: OptionalKind
    """The kind PodMonitor, if the cluster has it."""
    meter: TrafficMeter
    find_standing: FindStanding = lambda _service, _last: None
    """Returns the place of a service in the queue, or None; it gets the last one that was reported."""
    kueue: KueueQueues | None = None
    """The LocalQueues of Kueue; None: no service is given to it."""
    rooms: RoomSource | None = None
    """The room of accelerators; None: no service may use several."""
    devices: DeviceFeed | None = None
    """The devices that services may claim; None: all that they claim exist."""
    speeds: SpeedSources = NO_SPEED_SOURCES

    async def observe(self, client: Client, snapshot: Snapshot, key: ObjectKey) -> ServiceInputs | None:
        """Return the inputs of a decision; None for a service that is gone. Raises as `Client`.

        The view is built here, because the next step of the token and the report of speeds follow from it. While the
        Secret is read the store may change: then `decide_service` builds the view again, by `facts`.
        """
        settings, speeds = self.settings, self.speeds
        service = _read_service(snapshot, key, settings)
        if service is None:
            return None

        # 1. The facts that are not in the watch cache: claims, Kueue, the accelerators, and the place in the queue.
        has_claims = self.devices is None or await self.devices.settle()
        revision, kueue_report = snapshot.store.revision, read_kueue(service, snapshot.store, self.kueue)

        chosen = choose_accelerators(
            snapshot,
            service,
            settings,
            self.rooms,
            has_claims=has_claims,
            find_speeds=speeds.find_speeds,
            probes=speeds.probes,
        )

        is_in_kueue = kueue_report != NO_REPORT
        standing = None if is_in_kueue else self.find_standing(key, recall_standing(service.status.queue))
        facts = ViewFacts(self.pacer.may_roll_out(key), standing, kueue_report, chosen, has_claims=has_claims)

        # 2. The view, and the next step of the token, for which the Secret may be read meanwhile.
        view = build_view(snapshot, key, service, settings, facts)
        has_replicas = _has_replicas(snapshot, service)
        all_wait = view.standing is not None and not view.replicas.ready and not view.replicas.awaiting
        # If another owner's Secret has the name, creating ours fails and a condition reports that.
        token_step = await self.tokens.find_step(
            client, key, service, snapshot.now, has_replicas=has_replicas, all_replicas_wait=all_wait
        )

        return ServiceInputs(
            answer=self.prober.find_answer(key, view.question) if view.question is not None else None,
            view=view,
            revision=revision,
            token=token_step,
            is_monitored=self.monitors.exists,
            traffic=self.meter.find_traffic(key, service.metadata.uid),
            facts=facts,
            speed=speeds.report(snapshot, key, view, settings.vendors),
        )

    def perform(self, key: ObjectKey, effects: ServiceEffects) -> None:
        """Begin or end what goes on for a service beside its writes, as its plan says; repeating it changes nothing.

        Its endpoints are probed, the metrics of its pods are read, its pods wait for an update of Pomona, and it is
        decided again when there is room for a prospect, a replica that it might have on another accelerator.
        """
        # The question is whether an endpoint generates a token; the proof is the answer that an earlier leader got.
        if effects.question is not None:
            self.prober.ask(key, effects.question, effects.proof)
        else:
            self.prober.forget(key)

        # The target is the pods whose metrics are read.
        if effects.target is not None:
            self.meter.follow(key, effects.target)
        else:
            self.meter.forget(key)

        # The pacer orders the services whose Deployments an update of Pomona is to change.
        self.pacer.set_waiting(key, effects.awaiting)

        # A prospect is a replica that it might have on another accelerator.
        if self.rooms is not None:
            self.rooms.follow(key, effects.prospects)

        if effects.is_gone:
            self.tokens.forget(key)
            self.speeds.forget(key)


def service_reconciler(sources: ServiceSources) -> Reconciler:
    """Return the reconciler of InferenceServices."""

    def restart() -> None:
        for part in (sources.tokens, sources.pacer, sources.speeds):
            part.restart()

    return Reconciler(
        resource=INFERENCE_SERVICES,
        decide=functools.partial(decide_service, settings=sources.settings),
        triggers=list_triggers(),
        observe=sources.observe,  # reads what is not in the watch cache
        perform=sources.perform,  # before the writes of a plan
        written=sources.tokens.remember,  # gets each Secret that was written
        restart=restart,  # before this replica leads
    )


def _has_replicas(snapshot: Snapshot, service: InferenceService) -> bool:
    """Return whether a service has a Deployment or a MetalProcess, ready or not."""
    namespace, uid = service.metadata.namespace, service.metadata.uid
    return any(snapshot.children(resource, namespace, uid) for resource in (DEPLOYMENTS, METAL_PROCESSES))


def decide_service(snapshot: Snapshot, key: ObjectKey, settings: PodSettings = DEFAULT_SETTINGS) -> Plan:
    """Return all writes and Events for one service, and the effects: what is to go on in this process, such as probes.

    Without inputs or a service to read, all that is known of it is forgotten. The objects of one that is being deleted
    are garbage-collected.
    """
    service = _read_service(snapshot, key, settings)
    inputs: ServiceInputs | None = snapshot.inputs
    if service is None or inputs is None:
        return Plan(effects=(ServiceEffects(is_gone=True),))

    # 1. The view of the service; that of the inputs is outdated if the store has changed since.
    view = inputs.view
    if view is None or inputs.revision != snapshot.store.revision:
        view = build_view(snapshot, key, service, settings, inputs.facts)
    replicas, token, chosen = view.replicas, inputs.token, view.accelerator_choice

    # 2. Its status.
    replacement = inputs.speed.replacement or report_without_replacer(service)
    target = _find_traffic_target(view)
    status = _report_status(view, inputs, _sum_traffic(snapshot, view, target, inputs), replacement)

    # 3. The objects beside its replicas: for all of its pods, to claim devices, and the Secret of its token.
    beside_pods = _list_beside_pods(snapshot, view, settings, is_monitored=inputs.is_monitored)
    has_pods = bool(replicas.apply or replicas.keep)
    templates = list_templates(service, settings.vendors.get(view.accelerator or "")) if has_pods else ()
    new_secret = (token_secret(service, token.new_token, token.rotation),) if token.new_token else ()

    # 4. The time of the next decision. Secrets are not watched, so the steps of a new token follow without an event.
    pauses = [token.again_seconds, replicas.again_seconds, replacement.again_seconds]
    pauses += [ROTATION_SECONDS if token.rotation or token.patch else None, chosen.again_seconds if chosen else None]
    awaiting, prospects = frozenset(replicas.awaiting), chosen.watched if chosen else {}

    # Effects go on in this process until the next decision, such as the probes of the question.
    effects = ServiceEffects(view.question, view.proof, target, awaiting=awaiting, prospects=prospects)
    return Plan(
        create=new_secret + replicas.create,
        apply=(*templates, *replicas.apply, build_network_service(service), *beside_pods),
        patch=replicas.patch + ((token.patch,) if token.patch else ()),
        delete=(
            *_prune_pods(snapshot, view, beside_pods),
            *list_spent_templates(snapshot, service, templates),
            *replicas.delete,
        ),
        status=status,
        labels=_list_labels(view) if status["phase"] == "Ready" else None,
        events=(*build_events(service, status), *replacement.list_events(service.status.replacement)),
        effects=(effects,),
        again_seconds=min((seconds for seconds in pauses if seconds is not None), default=None),
    )


def _report_status(view: ServiceView, inputs: ServiceInputs, traffic: Traffic, replacement: ReplacementReport) -> Obj:
    """Return the whole status of a service: its replicas, traffic, speed, replacement and token."""
    # The cluster may have changed while the inputs were read: an answer about other replicas or endpoints is ignored.
    is_answer_current = inputs.view is not None and inputs.view.question == view.question
    answer = inputs.answer if is_answer_current else None

    # A new leader has no answer yet; `proof` is the one that the status shows for the same replicas and endpoints.
    status = build_status(view, answer or view.proof) | traffic.fields()
    status = inputs.speed.add_to(status, view.service.metadata.generation)
    status = replacement.add_to(status)
    if rotated := inputs.token.rotation or view.service.status.token_rotation:
        status["tokenRotation"] = rotated
    return status


def _prune_pods(snapshot: Snapshot, view: ServiceView, beside: Sequence[tuple[Resource, Obj]]) -> tuple[Ref, ...]:
    """Return the Deployments, and the objects beside their pods, that a service needs no more, to be deleted.

    None are while pods may have to serve on: a blocker keeps successors from being made, or these are not ready.
    `beside` are the objects beside its pods that it needs: a disruption budget, a network policy and a PodMonitor.
    """
    if not view.wanted:
        may_prune = True
    elif view.accelerator_choice is not None:
        # `replicas` names all Deployments whose pods serve until replicas on other accelerators do: the rest may go.
        may_prune = view.blocker is None
    else:
        # Either the wanted Deployments are known, and all others may go, or enough other replicas are ready.
        has_pods = bool(view.replicas.apply or view.replicas.keep)
        has_successors = view.blocker is None and len(view.replicas.ready) >= view.wanted
        # After a change of accelerator, pods stay until hosts serve in their place. What is beside pods that stay, such
        # as a policy whose option is off by now, may be why they are not ready.
        may_prune = has_pods or has_successors
    if not may_prune:
        return ()

    # Of what the service owns, delete all but what it still needs.
    metadata = view.service.metadata
    children = {kind: snapshot.children(kind, metadata.namespace, metadata.uid) for kind in OF_PODS}
    observed = [(kind, obj) for kind, objects in children.items() for obj in objects]
    return prune(observed, (*view.replicas.apply, *view.replicas.keep, *beside))


def _find_traffic_target(view: ServiceView) -> TrafficTarget | None:
    """Return the pods of a service whose metrics are read; None if it has none."""
    pods = tuple(endpoint for endpoint in view.own_endpoints if not endpoint.host)
    metadata, model = view.service.metadata, view.service.spec.model_ref
    if not pods:
        return None
    return TrafficTarget(metadata.uid, endpoints=pods, model=model, backend=view.pod_runtime or view.runtime)


def _sum_traffic(snapshot: Snapshot, view: ServiceView, target: TrafficTarget | None, inputs: ServiceInputs) -> Traffic:
    """Return the traffic of pods and hosts together; until this leader has read the pods, what the status shows."""
    shown, metadata = read_traffic(view.service.status), view.service.metadata
    of_pods = inputs.traffic if target is not None else UNKNOWN_TRAFFIC
    if of_pods is None:
        return shown
    return add_host_traffic(of_pods, find_host_traffic(snapshot, metadata.namespace, metadata.uid), shown)


def _list_labels(view: ServiceView) -> dict[str, str] | None:
    """Return the discovery labels of a service that serves: those of its Model, with its own memory and engine.

    None, which leaves its labels as they are: its Models or its accelerator are not known now.
    """
    if view.served is None or view.accelerator is None:
        return None
    stated = view.service.spec.resources.memory
    # `resources.memory` states only the memory of the node that a replica requests. The label counts devices, too.
    if stated is None or view.memory.device_bytes_each is not None:
        memory_bytes = view.memory.total_bytes
    else:
        memory_bytes = view.memory_bytes
    return label_service(view.service, view.served.model, view.accelerator, view.runtime, memory_bytes)


def _list_beside_pods(
    snapshot: Snapshot, view: ServiceView, settings: PodSettings, *, is_monitored: bool
) -> tuple[tuple[Resource, Obj], ...]:
    """Return the disruption budget, network policy and PodMonitor that a service is to have; none if it has no pods."""
    service = view.service
    if not (view.replicas.apply or view.replicas.keep):
        return ()

    model = snapshot.read(MODELS, ObjectKey(service.metadata.namespace, service.spec.model_ref), Model)
    # An engine that pulls the Model by itself must reach a registry.
    pulls = settings.network_policies and model is not None and format_of(model) == "ollama"

    return (
        *build_disruption_budget(service, share_one_node=model is not None and has_one_node(model)),
        *build_network_policy(service, settings, pulls=pulls),
        *build_pod_monitor(service, view.pod_runtime or view.runtime, settings.monitor_labels, exists=is_monitored),
    )


def _read_service(snapshot: Snapshot, key: ObjectKey, settings: PodSettings) -> InferenceService | None:
    """Return a service with all of its serving options; None if it is gone or being deleted, or cannot be decoded."""
    service = snapshot.read(INFERENCE_SERVICES, key, InferenceService)
    if service is None or service.metadata.deletion_timestamp is not None:
        return None
    return choose_serving(snapshot.store, service, *read_models(snapshot, service), settings)
