"""The Model reconciler: inspect the artifact, then put verified weights on a volume where pods need them.

Two works, each a Job (see `jobs.py`, `weights.py`): `inspect` for every Model that the cluster can reach, `fetch` only
when a service that runs as pods refers to it. What came out is kept in the status, so that a Job or a controller that
is gone undoes nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from artifacts.source import Source, SourceError, parse
from controller import jobs, weights
from controller.jobs import Outcome, Placement, Progress
from controller.parts import format_of, model_names, part_names
from controller.plan import Key, Kind, Plan, Snapshot, prune, readable
from controller.status import condition, find, transitions
from controller.weights import INSPECTION, MODELS_PATH, Facts, Settings
from crds.inferenceservice import InferenceService, ServiceHardware
from crds.meta import LABEL_MODEL, Accelerator
from crds.model import GGUF, Cached, Model
from crds.size import size_text
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, PODS, PVCS, Resource
from kube.store import Store

READY: Final = "Ready"
CACHED: Final = "Cached"
SILENT: Final = {"Inspecting", "Fetching", "NoConsumers", "Unschedulable"}
"""Reasons that are worth no Event: mere progress, and what the scheduler tells itself."""
DONE: Final = Outcome(state="Succeeded")


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a Model."""

    jobs: Sequence[Obj] = ()
    pods: Mapping[str, Sequence[Obj]] = {}
    """Pods by the uid of their Job."""
    claim: Obj | None = None
    consumers: Sequence[InferenceService] = ()
    """Services that serve this Model as pods, the oldest first."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is decided, before it is written as a Plan."""

    phase: str
    conditions: Sequence[Obj]
    facts: Facts | None = None
    cached: Cached | None = None
    works: Sequence[Progress] = ()
    """Their Jobs stay or are made."""
    create: tuple[tuple[Resource, Obj], ...] = ()
    undecided: Sequence[Obj] = ()
    """Jobs that stay because nothing is known of them yet."""


def accelerator_of(service: InferenceService, model: Model) -> Accelerator:
    """Return where a service runs: its own word, else the Model's."""
    return service.spec.hardware.accelerator or model.spec.hardware.accelerator


def kind(image: str, environment: Mapping[str, str]) -> Kind:
    """Register the reconciler; `image` and `environment` are those of its Jobs."""
    settings = Settings(image, environment)

    def decide(snapshot: Snapshot, key: Key) -> Plan:
        model = snapshot.read(MODELS, key, Model)
        if model is None or model.metadata.deletion_timestamp is not None:
            return Plan()  # its children are garbage-collected
        return desired(model, observe(snapshot, key, model), settings, snapshot.now)

    return Kind(
        resource=MODELS,
        decide=decide,
        owns=(JOBS, PVCS),
        maps={PODS: _of_pod, INFERENCE_SERVICES: _of_service, MODELS: _beside},
    )


def observe(snapshot: Snapshot, key: Key, model: Model) -> Observed:
    """Gather from the store what a decision about this Model needs."""
    owned = snapshot.children(JOBS, model.metadata.uid)
    services = (
        obj
        for obj in snapshot.store.list(INFERENCE_SERVICES, key.namespace)
        if key.name in model_names(obj) and "deletionTimestamp" not in obj["metadata"]
    )
    placed = (_placed(each, _served(snapshot, each) or model) for each in readable(services, InferenceService))
    pods = (
        each
        for each in placed
        if not each.spec.suspend and VENDORS[accelerator_of(each, model)].in_pods and format_of(model) != "mlx"
    )
    claims = snapshot.children(PVCS, model.metadata.uid)
    return Observed(
        jobs=owned,
        pods={job["metadata"]["uid"]: snapshot.children(PODS, job["metadata"]["uid"]) for job in owned},
        claim=next((claim for claim in claims if "deletionTimestamp" not in claim["metadata"]), None),
        consumers=sorted(pods, key=lambda each: (each.metadata.creation_timestamp, each.metadata.name)),
    )


def _placed(service: InferenceService, model: Model) -> InferenceService:
    """Return a service that says itself where it runs."""
    hardware = ServiceHardware(accelerator=accelerator_of(service, model))
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, hardware=hardware))


def _served(snapshot: Snapshot, service: InferenceService) -> Model | None:
    """Return the Model that a service serves, whose hardware is also that of its draft, projector and adapters."""
    return snapshot.read(MODELS, Key(service.metadata.namespace, service.spec.model_ref), Model)


def desired(model: Model, observed: Observed, settings: Settings, now: datetime) -> Plan:
    """Decide what is to be done for a Model and what is to be said of it."""
    return _plan(model, observed, _judge(model, observed, settings, now))


def _judge(model: Model, observed: Observed, settings: Settings, now: datetime) -> Verdict:
    try:
        source = parse(model.spec.source)
    except SourceError as error:
        told = _condition(model, READY, true=False, reason=error.reason, message=f"{error.message}; edit spec.source")
        return Verdict(phase="Failed", conditions=[told])
    if source.scheme in {"file", "ollama"}:
        return _hosts_only(model, source)
    if _is_inspected(model):
        return _cache(model, observed, settings, now, known=_known(model, observed, settings, now))
    work = weights.inspection(model, settings)
    progress = jobs.proceed(work, observed.jobs, observed.pods, now)
    if progress.outcome.state == "Succeeded":
        return _cache(model, observed, settings, now, known=(Facts.of_answer(model, progress.outcome.answer), progress))
    reason, message = _why(model, progress, doing="Inspecting", what="the artifact's header is being read")
    cached = find(model.status.conditions, CACHED)
    return Verdict(
        phase="Failed" if progress.outcome.state == "Failed" else "Pending",
        # An edit may leave the weights as they are: what is known of them stands until the inspection says.
        conditions=[
            _condition(model, READY, true=False, reason=reason, message=message),
            *([msgspec.to_builtins(cached)] if cached else []),
        ],
        cached=model.status.cached,
        works=[progress],
        undecided=[job for job in observed.jobs if jobs.verb(job) == "fetch"],
    )


def _known(model: Model, observed: Observed, settings: Settings, now: datetime) -> tuple[Facts, Progress]:
    """Return what is known of an inspected Model; what an earlier version did not look for is looked for now."""
    known = Facts.of_status(model)
    work = weights.inspection(model, settings, known)
    if not weights.is_outdated(model):
        return known, Progress(outcome=DONE, job=jobs.last(work, observed.jobs))
    progress = jobs.proceed(work, observed.jobs, observed.pods, now)
    if progress.outcome.state == "Succeeded":
        found = Facts.of_answer(model, progress.outcome.answer)
        # Of other weights than those that are served nothing is taken.
        known = found if found.revision == known.revision else msgspec.structs.replace(known, inspection=INSPECTION)
    elif progress.outcome.state == "Failed":
        known = msgspec.structs.replace(known, inspection=INSPECTION)
    return known, progress


def _hosts_only(model: Model, source: Source) -> Verdict:
    ready = "only a host that has the file can read it: its agent inspects it and rejects it when it does not fit"
    if source.is_library:
        ready = "a host where Ollama runs pulls it there"
    cached = (
        f"pods cannot read a {source.scheme}:// source: serve it with accelerator metal, or use an hf:// or https:// "
        "source"
    )
    return Verdict(
        phase="Ready",
        conditions=[
            _condition(model, READY, true=True, reason="HostInspects", message=ready),
            _condition(model, CACHED, true=False, reason="HostInspects", message=cached),
        ],
    )


def _cache(
    model: Model, observed: Observed, settings: Settings, now: datetime, *, known: tuple[Facts, Progress]
) -> Verdict:
    """Decide for a Model that is inspected: whether its weights are on a volume, and whether they have to be."""
    facts, inspected = known
    ready = _condition(model, READY, true=True, reason="Inspected", message=_summary(facts))

    def verdict(phase: str, told: Obj, *works: Progress, cached: Cached | None = None) -> Verdict:
        return Verdict(phase=phase, conditions=[ready, told], facts=facts, cached=cached, works=[inspected, *works])

    if observed.claim is not None:
        work = weights.fetching(model, facts, observed.claim, _placement(model, observed.consumers), settings)
        there = Cached(claim=observed.claim["metadata"]["uid"], path=weights.path_of(model, facts), sha256=facts.sha256)
        held = _condition(model, CACHED, true=True, reason="Fetched", message=_whereabouts(there))
        if model.status.cached == there:
            fetched = Progress(outcome=DONE, job=jobs.last(work, observed.jobs))
            return verdict("Ready", held, fetched, cached=there)
        if observed.consumers and not weights.is_settling(observed.claim, now):
            fetched = jobs.proceed(work, observed.jobs, observed.pods, now)
            if fetched.outcome.state == "Succeeded":
                return verdict("Ready", held, fetched, cached=there)
            what = "the weights are on their way to the volume"
            reason, message = _why(model, fetched, doing="Fetching", what=what)
            phase = "Failed" if fetched.outcome.state == "Failed" else "Downloading"
            return verdict(phase, _condition(model, CACHED, true=False, reason=reason, message=message), fetched)
    if observed.consumers:
        waits = _condition(model, CACHED, true=False, reason="Fetching", message="the volume is being made")
        if observed.claim is not None:
            settling = Progress(outcome=Outcome(state="Going"), again_seconds=weights.SETTLING_SECONDS)
            return verdict("Downloading", waits, settling)
        made = verdict("Downloading", waits)
        return msgspec.structs.replace(made, create=(weights.new_claim(model, facts),))
    unused = "no InferenceService that runs as pods refers to this Model"
    return verdict("Ready", _condition(model, CACHED, true=False, reason="NoConsumers", message=unused))


def _plan(model: Model, observed: Observed, verdict: Verdict) -> Plan:
    """Make the Jobs that are to run, delete those that are past, and write the status."""
    kept = {work.job for work in verdict.works} | {job["metadata"]["name"] for job in verdict.undecided}
    past = [(JOBS, job) for job in observed.jobs if job["metadata"]["name"] not in kept]
    status: Obj = {
        "observedGeneration": model.metadata.generation,
        "phase": verdict.phase,
        "conditions": list(verdict.conditions),
    }
    if verdict.cached is not None:
        status["cached"] = msgspec.to_builtins(verdict.cached)
    if verdict.facts is not None:
        status |= msgspec.to_builtins(verdict.facts)
        if verdict.facts.size_bytes is not None:
            status["size"] = size_text(verdict.facts.size_bytes)
    waits = (work.again_seconds for work in verdict.works if work.again_seconds is not None)
    return Plan(
        create=(*verdict.create, *((JOBS, work.create) for work in verdict.works if work.create is not None)),
        delete=prune(past, ()),
        status=status,
        events=transitions(model.status.conditions, verdict.conditions, action="Reconcile", silent=SILENT),
        again_seconds=min(waits, default=None),
    )


def _is_inspected(model: Model) -> bool:
    """Whether the status says so of this very spec."""
    ready = find(model.status.conditions, READY)
    generation = model.metadata.generation
    return ready is not None and ready.reason == "Inspected" and ready.observed_generation == generation


def _whereabouts(cached: Cached) -> str:
    path = f"{MODELS_PATH}/{cached.path}"
    return f"{path}, sha256 {cached.sha256}" if cached.sha256 else path


def _placement(model: Model, consumers: Sequence[InferenceService]) -> Placement:
    """Return where the first consumer runs, whose taints and volume are those of the fetch."""
    if not consumers:
        return Placement()
    spec = consumers[0].spec
    tolerations = (*VENDORS[accelerator_of(consumers[0], model)].tolerations, *spec.tolerations)
    return Placement(spec.node_selector, tuple(msgspec.to_builtins(each) for each in tolerations))


def _why(model: Model, progress: Progress, *, doing: str, what: str) -> tuple[str, str]:
    """Return reason and message of a work that is not done, with the way out where the user has one."""
    namespace, outcome = model.metadata.namespace, progress.outcome
    if outcome.state == "Failed":
        way_out = f"edit the Model, or try this again with: kubectl -n {namespace} delete job {progress.job}"
        return outcome.reason, f"{outcome.message.rstrip('.')}; {way_out}"
    if outcome.state == "Broken":
        return outcome.reason, f"{outcome.message.rstrip('.')}; it is tried again by itself"
    secret = model.spec.source_secret_ref
    if outcome.reason == "CreateContainerConfigError" and secret is not None:
        way_out = f"kubectl -n {namespace} create secret generic {secret.name} --from-literal=token=TOKEN"
        return "SecretNotFound", f"spec.sourceSecretRef {secret.name}: {outcome.message}; create it with: {way_out}"
    return (outcome.reason, f"Job {progress.job} waits: {outcome.message}") if outcome.reason else (doing, what)


def _condition(model: Model, kind: str, *, true: bool, reason: str, message: str) -> Obj:
    return condition(kind, true=true, reason=reason, message=message, generation=model.metadata.generation)


def _summary(facts: Facts) -> str:
    gguf = facts.gguf or GGUF()
    known = (gguf.architecture, gguf.quantization, size_text(facts.size_bytes) if facts.size_bytes else "")
    return f"{facts.file or 'folder'}: " + ", ".join(each for each in known if each)


def _of_pod(_store: Store, pod: Obj) -> list[Key]:
    metadata = pod["metadata"]
    model = metadata.get("labels", {}).get(LABEL_MODEL)
    return [Key(metadata["namespace"], model)] if model else []


def _of_service(_store: Store, service: Obj) -> list[Key]:
    return [Key(service["metadata"]["namespace"], name) for name in sorted(model_names(service))]


def _beside(store: Store, model: Obj) -> list[Key]:
    """Return the Models that are served beside this one, which run where it runs."""
    namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
    services = (obj for obj in store.list(INFERENCE_SERVICES, namespace) if obj["spec"]["modelRef"] == name)
    return [Key(namespace, part) for obj in services for part in sorted(part_names(obj))]
