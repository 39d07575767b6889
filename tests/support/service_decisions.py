"""Decisions about one InferenceService `chat`, and the objects that its reconciler finds, without a cluster."""

from typing import Any

from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.plan import FIELD_MANAGER, Plan, Snapshot
from controller.services.checked_replica import read_models
from controller.services.pods.update_pacer import UpdatePacer
from controller.services.readiness_probe import Prober
from controller.services.reconciler import ServiceSources, decide_service
from controller.services.service_view import ServiceInputs, ViewFacts, build_view
from controller.services.serving_choice import choose_serving
from controller.services.tokens import KnownTokens, TokenStep
from controller.services.traffic_meter import TrafficMeter
from crds.inferenceservice import InferenceService
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    POD_MONITORS,
    ObjectKey,
    Resource,
)
from runtimes.probe import ProbeResult
from tests.support.api_objects import (
    ADDRESS,
    NOW,
    as_service,
    condition,
    host,
    model,
    planned_condition,
    process,
    service,
    store,
)

_EMPTY = store()
KEY = ObjectKey("team", "chat")
SETTINGS = PodSettings("pomona:test")
OK = ProbeResult(ok=True, reason="Generated", message="http://10.77.0.100:18000 generated a token")
METAL: Obj = {"hardware": {"accelerator": "metal"}}
SERVING: Obj = {"conditions": [condition("Ready", "True", "Serving", "generated a token")]}


def plain_sources(settings: PodSettings = DEFAULT_SETTINGS) -> ServiceSources:
    """Return the sources of the decisions of a controller that knows nothing beside the watch cache."""
    monitors = OptionalKind(POD_MONITORS, "")
    return ServiceSources(Prober(), settings, KnownTokens(), UpdatePacer(), monitors, TrafficMeter())


def decide_chat(
    *objects: tuple[Resource, Obj],
    answer: ProbeResult | None = None,
    new_token: str | None = None,
    settings: PodSettings = SETTINGS,
    **inputs: Any,
) -> Plan:
    """Return the plan for `chat`.

    Args:
        objects: what the store has.
        answer: the result of the probe of its endpoint.
        new_token: a new bearer token.
        settings: options of the controller.
        inputs: further fields of `ServiceInputs` or `ViewFacts`.
    """
    kept = store(*objects)
    snapshot = Snapshot(kept, NOW)
    chat = read_chat(snapshot, settings)
    facts = ViewFacts(**{name: inputs.pop(name) for name in ViewFacts._fields if name in inputs})
    view = build_view(snapshot, KEY, chat, settings, facts)
    answer = answer if view.question is not None else None
    service_inputs = ServiceInputs(view, kept.revision, answer, TokenStep(new_token), facts=facts, **inputs)
    return decide_service(Snapshot(kept, NOW, service_inputs), KEY, settings)


def read_chat(snapshot: Snapshot, settings: PodSettings = SETTINGS) -> InferenceService:
    """Return `chat` with all of its serving options, as the reconciler reads it."""
    chat = as_service(snapshot.get(INFERENCE_SERVICES, KEY) or service())
    return choose_serving(snapshot.store, chat, *read_models(snapshot, chat), settings)


def chat_service(**spec: Any) -> tuple[Resource, Obj]:
    return INFERENCE_SERVICES, service(**spec)


def list_applied(plan: Plan, resource: Resource) -> list[Obj]:
    return [obj for kind, obj in plan.apply if kind == resource]


def ready_outcome(plan: Plan) -> tuple[str, str, str]:
    condition = planned_condition(plan, "Ready")
    assert plan.status is not None
    return plan.status["phase"], condition["status"], condition["reason"]


def chat_pod(name: str = "chat-1", *, ready: bool = True, **status: Any) -> Obj:
    """Return a pod of service `chat`; `status` has further fields of its status."""
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {"inference.pomona.dev/service": "chat"},
        },
        "status": {
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}],
            "podIPs": [{"ip": ADDRESS}],
            **status,
        },
    }


def chat_deployment(
    *objects: tuple[Resource, Obj], ready: int = 1, replicas: int = 1, updated: int | None = None
) -> Obj:
    """Return the Deployment for these objects in its state after it was applied."""
    (desired,) = list_applied(decide_chat(*objects), DEPLOYMENTS)
    status = {
        "observedGeneration": 1,
        "replicas": replicas,
        "updatedReplicas": replicas if updated is None else updated,
        "readyReplicas": ready,
    }
    return manage(desired) | {"status": status}


def manage(desired: Obj, generation: int = 1) -> Obj:
    """Return a Deployment that was applied, without its status."""
    owned: Obj = {f"f:{name}": {} for name in desired["spec"]}
    metadata = desired["metadata"] | {
        "uid": "uid-deployment",
        "generation": generation,
        "resourceVersion": "1",
        "managedFields": [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": owned}}],
    }
    return desired | {"metadata": metadata}


def kept_part(deployment: Obj) -> Obj:
    """Return what the controller's store keeps of a Deployment."""
    return dict(_EMPTY.keep_part(DEPLOYMENTS, deployment))


def bound_process(phase: str = "Ready", **fields: Any) -> tuple[Resource, Obj]:
    """Return the MetalProcess that `chat` on metal creates, bound to studio-1."""
    ((_, made),) = decide_chat(chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host())).create
    return METAL_PROCESSES, process(made["metadata"]["name"], host="studio-1", phase=phase, **fields)
