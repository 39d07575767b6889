"""The InferenceService reconciler: what it takes to serve, what is there of it, and the truth about it.

What cannot be decided yet (a Model that is gone or being fetched, a spec that makes no sense) stops nothing that
serves: the last replicas stay until others can take their place. `Ready` is about answers and is never inferred.
"""

import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from controller import replicas, requirements
from controller.parts import Served, model_names, parts_of, read_parts
from controller.plan import Event, Key, Kind, Plan, Snapshot, prune
from controller.pods import PORT, is_token_secret, network_service, token_name, token_secret
from controller.readiness import Endpoint, Prober, Question, ready_endpoints
from controller.replicas import Replicas
from controller.requirements import Phase, Problem
from controller.status import condition, find, transitions
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE, LABEL_SERVICE_NAME, Accelerator
from crds.model import Model
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    SECRETS,
    SERVICES,
)
from kube.store import Store
from runtimes.probe import Probe

READY: Final = "Ready"
MODEL_READY: Final = "ModelReady"
SILENT: Final = {
    "Progressing",
    "Probing",
    "Starting",
    "Fetching",
    "Binding",
    "Downloading",
    "NoEndpoints",
    "ModelNotReady",
}
"""Reasons of mere progress, which are worth no Event."""


class Facts(NamedTuple):
    """What no watch brings."""

    question: Question | None
    """What was asked."""
    answer: Probe | None
    """Whether the endpoints answer; None while they are being asked, or there is nothing to ask."""
    new_token: str | None
    """A bearer token to be set, where the service has none."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision is made of."""

    service: InferenceService
    accelerator: Accelerator | None
    model_problem: Problem | None
    blocker: Problem | None
    """Why nothing new can be made now; what serves stays."""
    wanted: int
    replicas: Replicas
    endpoints: tuple[Endpoint, ...]

    @property
    def question(self) -> Question | None:
        """What has to be asked before the service may be called Ready, or None when it cannot be."""
        ready = self.replicas.ready
        if self.blocker or not self.wanted or not ready or not self.endpoints:
            return None
        metadata = self.service.metadata
        return Question(metadata.uid, metadata.generation, ready, self.endpoints, self.service.spec.mode)


def kind(prober: Prober) -> Kind:
    """Register the reconciler; `prober` asks the endpoints."""

    async def observe(client: Client, snapshot: Snapshot, key: Key) -> Facts | None:
        service = _read(snapshot, key)
        if service is None:
            prober.answer(key, None)
            return None
        question = examine(snapshot, key, service).question
        answer = prober.answer(key, question)
        try:
            there = is_token_secret(
                await client.get(SECRETS, token_name(key.name), key.namespace), service.metadata.uid
            )
        except NotFound:
            there = False
        # Where another's Secret has the name, the attempt to make ours tells so.
        return Facts(question, answer, None if there else secrets.token_urlsafe(32))

    return Kind(
        resource=INFERENCE_SERVICES,
        decide=decide,
        owns=(DEPLOYMENTS, SERVICES, METAL_PROCESSES),
        maps={
            MODELS: _of_model,
            METAL_HOSTS: _of_host,
            PODS: _by_label(LABEL_SERVICE),
            ENDPOINT_SLICES: _by_label(LABEL_SERVICE_NAME),
        },
        observe=observe,
    )


def decide(snapshot: Snapshot, key: Key) -> Plan:
    """Decide about one service; one that is being deleted needs nothing, for all it has is garbage-collected."""
    service = _read(snapshot, key)
    facts: Facts | None = snapshot.facts
    if service is None or facts is None:
        return Plan()
    view = examine(snapshot, key, service)
    steps, apply = view.replicas.steps, view.replicas.apply
    # The world may have moved on while facts were gathered.
    answer = facts.answer if facts.question == view.question else None
    conditions = [ready_condition(view, answer), _model_condition(view)]
    observed = [(DEPLOYMENTS, obj) for obj in snapshot.children(DEPLOYMENTS, service.metadata.uid)]
    # What pods served before a change of accelerator stays until hosts have taken its place.
    replaced = not view.wanted or (view.blocker is None and len(view.replicas.ready) >= view.wanted)
    return Plan(
        create=((token_secret(service, facts.new_token),) if facts.new_token else ()) + steps.create,
        apply=(network_service(service), *apply),
        patch=view.replicas.patch,
        delete=(*(prune(observed, apply) if replaced else ()), *steps.delete),
        status=_status(view, conditions),
        events=_events(service, conditions),
        again_seconds=steps.again_seconds,
    )


def _read(snapshot: Snapshot, key: Key) -> InferenceService | None:
    service = snapshot.read(INFERENCE_SERVICES, key, InferenceService)
    return None if service is None or service.metadata.deletion_timestamp is not None else service


def examine(snapshot: Snapshot, key: Key, service: InferenceService) -> View:
    """Gather what a decision about this service is made of."""

    def find(key: Key) -> Model | None:
        return snapshot.read(MODELS, key, Model)

    model = find(Key(key.namespace, service.spec.model_ref))
    accelerator = requirements.decided_accelerator(service, model)
    wanted = 0 if service.spec.suspend else service.spec.replicas
    parts = read_parts(find, service)
    model_problem = requirements.model_problem(service, model, parts)
    blocker = requirements.spec_problem(service, model, parts) or model_problem
    served = Served(model, parts) if model is not None else None
    if blocker is None and served is not None:
        blocker = requirements.memory_problem(service, served)
    usable = served if blocker is None else None
    slices = (
        obj
        for obj in snapshot.store.list(ENDPOINT_SLICES, key.namespace)
        if obj["metadata"].get("labels", {}).get(LABEL_SERVICE_NAME) == key.name
    )
    return View(
        service=service,
        accelerator=accelerator,
        model_problem=model_problem,
        blocker=blocker,
        wanted=wanted,
        replicas=replicas.examine(snapshot, service, accelerator, usable, wanted),
        endpoints=ready_endpoints(slices),
    )


def ready_condition(view: View, answer: Probe | None) -> Obj:
    """Return the condition Ready: True only when the endpoints have answered with a token."""
    generation = view.service.metadata.generation
    last = find(view.service.status.conditions, READY)
    problem = _problem(view)

    def told(reason: str, message: str, *, true: bool = False, seen: int = generation) -> Obj:
        return condition(READY, true=true, reason=reason, message=message, generation=seen)

    if not view.wanted:
        if view.service.spec.suspend:
            return told("Suspended", "spec.suspend is true: set it to false to serve again")
        return told("ScaledToZero", "spec.replicas is 0: raise it to serve again")
    if answer is not None and answer.ok:
        message = answer.message if problem is None else f"{answer.message}; {problem.message}"
        return told("Serving", message, true=True)
    if answer is not None:
        return told(answer.reason, answer.message)
    if last is not None and last.status == "True" and view.endpoints:
        # What answered still stands there. It is not said of this generation until it was asked again.
        seen = last.observed_generation or 0
        if problem is None and (seen, last.reason) == (generation, "Serving"):
            return told(last.reason, last.message, true=True)
        if problem is None:
            return told("Probing", "still answers; its replicas are asked for a first token", true=True, seen=seen)
        return told(problem.reason, f"still answers, but not as wanted: {problem.message}", true=True, seen=seen)
    if problem is not None:
        return told(problem.reason, problem.message)
    if view.question is not None:
        return told("Probing", "replicas are ready and are asked for a first token")
    return told("NoEndpoints", "replicas are ready, but the Service's EndpointSlices do not say so yet")


def _problem(view: View) -> Problem | None:
    """Return why not all replicas are ready and reached alike, or None when they are."""
    if view.blocker is not None:
        return view.blocker
    ready = len(view.replicas.ready)
    if ready >= view.wanted:
        return _mixture(view.endpoints)
    counted = f"{ready} of {view.wanted} replicas are ready"
    cause = view.replicas.problem
    if cause is None:
        return Problem("Progressing", counted, "Progressing")
    return cause._replace(message=f"{counted}: {cause.message}")


def _mixture(endpoints: tuple[Endpoint, ...]) -> Problem | None:
    """Return what to do where a client's https reaches some hosts and its http the others."""
    # Pods, which have no certificate, are there beside hosts only while one takes the place of the other.
    plain = sorted({endpoint.host for endpoint in endpoints if endpoint.scheme == "http" and endpoint.host})
    if not plain or all(endpoint.scheme == "http" for endpoint in endpoints):
        return None
    message = f"some hosts serve https and some http: give the agent of {', '.join(plain)} a --tls-certificate too"
    return Problem("MixedEndpoints", message, "Degraded")


def _scheme(view: View) -> str:
    """Return how clients are to ask: by https where all do so, and as was said before where there is nobody to ask."""
    if not view.endpoints:
        return "https" if view.service.status.endpoint.startswith("https:") else "http"
    return "https" if all(endpoint.scheme == "https" for endpoint in view.endpoints) else "http"


def _model_condition(view: View) -> Obj:
    problem, generation = view.model_problem, view.service.metadata.generation
    if problem is not None:
        return condition(MODEL_READY, true=False, reason=problem.reason, message=problem.message, generation=generation)
    names = [view.service.spec.model_ref, *(part.name for part in parts_of(view.service.spec))]
    message = f"{'Models' if len(names) > 1 else 'Model'} {', '.join(names)} can be served"
    return condition(MODEL_READY, true=True, reason="ModelUsable", message=message, generation=generation)


def phase_of(view: View, ready: Obj) -> Phase:
    """Return the one word that sums a status up."""
    problem = _problem(view)
    if not view.wanted:
        return "Suspended"
    if ready["status"] == "True":
        if problem is None:
            return "Ready" if ready["observedGeneration"] == view.service.metadata.generation else "Progressing"
        return "Degraded" if view.replicas.ready or view.blocker else "Progressing"
    return problem.phase if problem is not None else "Progressing"


def _status(view: View, conditions: list[Obj]) -> Obj:
    name, namespace = view.service.metadata.name, view.service.metadata.namespace
    return {
        "observedGeneration": view.service.metadata.generation,
        "phase": phase_of(view, conditions[0]),
        "replicas": view.replicas.total,
        "readyReplicas": len(view.replicas.ready),
        "selector": f"{LABEL_SERVICE}={name}",
        "accelerator": view.accelerator or "",
        "endpoint": f"{_scheme(view)}://{name}.{namespace}.svc:{PORT}/v1",
        "conditions": conditions,
    }


def _events(service: InferenceService, conditions: list[Obj]) -> tuple[Event, ...]:
    """Return Events of what changed in Ready, which quotes the Model where that is what is wrong."""
    ready = [each for each in conditions if each["type"] == READY]
    return transitions(service.status.conditions, ready, action="Reconcile", silent=SILENT)


def _of_model(store: Store, model: Obj) -> list[Key]:
    namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
    return [
        Key(namespace, obj["metadata"]["name"])
        for obj in store.list(INFERENCE_SERVICES, namespace)
        if name in model_names(obj)
    ]


def _of_host(store: Store, host: Obj) -> list[Key]:
    """Return the services that a host serves, and those that wait for one."""
    name = host["metadata"]["name"]
    return [
        Key(obj["metadata"]["namespace"], obj["spec"]["serviceName"])
        for obj in store.list(METAL_PROCESSES)
        if obj["spec"].get("hostName") in {None, name}
    ]


def _by_label(label: str) -> Callable[[Store, Obj], list[Key]]:
    def keys(_store: Store, obj: Obj) -> list[Key]:
        metadata = obj["metadata"]
        service = metadata.get("labels", {}).get(label)
        return [Key(metadata["namespace"], service)] if service else []

    return keys
