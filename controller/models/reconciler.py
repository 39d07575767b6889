"""The Model reconciler: inspect the artifact, then put verified weights on a volume where pods need them.

Two works, each a Job (see `jobs.py`, `volume.py`): `inspect` for every Model that the cluster can reach, `fetch` only
when a service that runs as pods refers to it. The results are kept in the status, so that nothing is lost with a
deleted Job or a stopped controller.
"""

import functools
from datetime import datetime

import msgspec

from artifacts.source import Source, SourceError, parse
from controller.models import claims, copy_observation, jobs, refresh, source_secret, volume
from controller.models.cache_decision import decide_weights
from controller.models.claims import read_classes
from controller.models.copy_observation import Reserve, models_of_mounts, models_on_node, read_mounts, reserve_nothing
from controller.models.decision import (
    CACHED,
    DONE,
    NOT_NEEDED,
    READY,
    REASONS_WITHOUT_EVENT,
    InspectedModel,
    ModelDecision,
    explain_progress,
    model_condition,
    refused_secret,
)
from controller.models.discovery import describe_parameters, label_model
from controller.models.job_pods import read_refusals
from controller.models.jobs import JobProgress
from controller.models.observation import (
    ModelInputs,
    ObservedModel,
    model_of_pod,
    models_of_service,
    models_served_beside,
    observe_model,
    read_placement,
)
from controller.models.served import METAL
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import find, transitions
from controller.reconcile.plan import Plan, Reconciler, Snapshot, prune
from controller.reconcile.triggers import Trigger, all_but_status, everything, existence, owned
from crds.model import Model, ModelFacts
from crds.size import size_text
from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, MODELS, NODES, PODS, PVCS, ObjectKey
from kube.store import Store


def model_reconciler(settings: PodSettings, reserve: Reserve = reserve_nothing) -> Reconciler:
    """Return the reconciler of Models; `reserve` returns what one replica of a service asks of its node.

    `observe` and then `decide` are called for a Model that is due; the triggers say which changes make one due.
    """

    def decide(snapshot: Snapshot, key: ObjectKey) -> Plan:
        """Decide about one Model by the store, and by what `observe` has read (`snapshot.inputs`)."""
        model = snapshot.read(MODELS, key, Model)
        if model is None or model.metadata.deletion_timestamp is not None:
            return Plan()  # its children are garbage-collected
        return decide_model(model, observe_model(snapshot, key, model, settings, reserve), settings, snapshot.now)

    async def observe(client: Client, snapshot: Snapshot, key: ObjectKey) -> ModelInputs | None:
        """Read what is not watched: the Secret of the source, StorageClasses, and Events about refused pods."""
        model = snapshot.read(MODELS, key, Model)
        if model is None:
            return None
        # A check of a source that moves is a Job, which needs the Secret.
        has_work = model.spec.source_secret_ref is not None and refresh.is_due(model, snapshot.now)
        verdict = await source_secret.read_verdict(client, model, has_work=has_work)
        classes = await read_classes(client, snapshot, model)
        refusals = await read_refusals(client, snapshot, model.metadata)
        return ModelInputs(secret=verdict, classes=classes, refusals=refusals)

    def models_of_victims(store: Store, model: Obj) -> list[ObjectKey]:
        """Return the Models with copies to evict from the nodes on which this one has, or lacks space for, a copy."""
        return copy_observation.models_of_victims(store, model, settings.node_cache_bytes)

    return Reconciler(
        resource=MODELS,
        decide=decide,
        observe=observe,
        triggers=(
            *(owned(resource, MODELS) for resource in (JOBS, PVCS)),
            Trigger(PODS, model_of_pod, everything),  # the pods of Jobs
            Trigger(INFERENCE_SERVICES, models_of_service, read_placement),  # services that need the weights
            Trigger(MODELS, models_served_beside, all_but_status),  # companions follow the main Model's hardware
            Trigger(MODELS, models_of_victims, copy_observation.read_copies),  # a full node evicts copies of others
            # A volume that nothing mounts any more may be deleted.
            *(Trigger(resource, models_of_mounts, read_mounts) for resource in (PODS, DEPLOYMENTS)),
            Trigger(NODES, models_on_node, existence),  # copies are lost with their node
        ),
    )


def decide_model(model: Model, observed: ObservedModel, settings: PodSettings, now: datetime) -> Plan:
    """Return the plan for a Model: its Jobs, its volumes and its status."""
    decision = _decide(model, observed, settings, now)
    conditions = [*decision.conditions, *source_secret.list_conditions(model, observed.secret)]
    return _plan(model, observed, msgspec.structs.replace(decision, conditions=conditions), settings)


def _decide(model: Model, observed: ObservedModel, settings: PodSettings, now: datetime) -> ModelDecision:
    """Return the decision about a Model, by the first of these cases that holds.

    1. Its source is invalid: it fails until it is edited.
    2. Hosts or an Ollama read the artifact themselves: it gets no Job.
    3. It is not inspected since the last edit: a Job reads the header of the artifact.
    4. It is inspected: its weights are decided. A source that may move is also checked again from time to time, while
       its weights stay in use.
    """
    # 1. An invalid source.
    try:
        source = parse(model.spec.source, model.spec.files)
    except SourceError as error:
        way_out = "edit spec.source" + (" or spec.files" if model.spec.files else "")
        ready = model_condition(model, READY, true=False, reason=error.reason, message=f"{error.message}; {way_out}")
        return ModelDecision(phase="Failed", conditions=[ready])

    # 2. and 3. No Job, or no inspection yet.
    if source.scheme in {"file", "ollama"} or _needs_no_job(model, source, observed, settings):
        return _decide_without_job(model, source)
    if not _is_inspected(model):
        return _decide_uninspected(model, observed, settings, now)

    # 4. It is inspected; is_watched: its source may move, and is checked again.
    is_watched = refresh.is_watched(model)
    # The last inspection Job is kept: an edit that leaves the source unchanged uses its result again. If the source
    # moves, the result may be out of date by then.
    last_inspection_job = (
        "" if is_watched else jobs.name_last_job(volume.prepare_inspection(model, settings), observed.jobs)
    )
    facts, progress = volume.read_facts(model), JobProgress(outcome=DONE, job=last_inspection_job)
    inspected = InspectedModel(model, observed, settings, now, facts, progress)
    if refused_secret(observed) or not is_watched:  # without a usable Secret, the source cannot be checked
        return decide_weights(inspected)

    # Its source is also checked.
    check = refresh.check_source(model, facts, functools.partial(_inspect, model, observed, settings, now), now)
    # The facts of the latest known revision: another one is fetched, too.
    decision = decide_weights(inspected._replace(facts=check.facts))
    return msgspec.structs.replace(
        decision,
        conditions=[*decision.conditions, *check.conditions],
        works=[*decision.works, check.progress],
        last_checked=check.last_checked,
    )


def _decide_uninspected(model: Model, observed: ObservedModel, settings: PodSettings, now: datetime) -> ModelDecision:
    """Return the decision about a Model that is new or was edited: inspect it, and decide about its weights then."""
    if refused := refused_secret(observed):
        return _await_inspection(model, refused.reason, refused.message)
    progress = _inspect(model, observed, settings, now)
    if progress.outcome.state == "Succeeded":
        facts = volume.take_answer(model, progress.outcome.answer)
        return decide_weights(InspectedModel(model, observed, settings, now, facts, progress, is_edited=True))
    reason, message = explain_progress(model, progress, doing="Inspecting", what="reads the artifact's header")
    return msgspec.structs.replace(
        _await_inspection(model, reason, message),
        phase="Failed" if progress.outcome.state == "Failed" else "Pending",
        works=[progress],
        # The edit may leave the weights as they are: then a running fetch goes on.
        undecided=[job for job in observed.jobs if jobs.read_verb(job) == "fetch"],
    )


def _inspect(
    model: Model, observed: ObservedModel, settings: PodSettings, now: datetime, last_checked: str = ""
) -> JobProgress:
    """Return the next step of the Job that reads the header; `last_checked` is that of `volume.prepare_inspection`."""
    placement = volume.place_inspection(model, observed.consumer, observed.undecided, settings)
    work = volume.prepare_inspection(model, settings, placement=placement, last_checked=last_checked)
    return jobs.proceed(work, observed.jobs, observed.pods, now)


def _await_inspection(model: Model, reason: str, message: str) -> ModelDecision:
    """Return the decision about a Model whose header is not read since it was created or edited.

    The status keeps what it says of cached weights, with the condition Cached: an edit may not change them, and pods
    read them meanwhile.
    """
    cached = find(model.status.conditions, CACHED)  # the condition as it is
    has_weights = model.status.cached is not None or model.status.copies
    return ModelDecision(
        phase="Pending",
        conditions=[
            model_condition(model, READY, true=False, reason=reason, message=message),
            *([msgspec.to_builtins(cached)] if cached else []),
        ],
        facts=volume.read_facts(model) if has_weights else None,
        cached=model.status.cached,
        copies=model.status.copies,
    )


def _needs_no_job(model: Model, source: Source, observed: ObservedModel, settings: PodSettings) -> bool:
    """Return whether a Model needs no inspection Job, for a controller that has no image for Jobs.

    That is so if only hosts serve it, which read the header themselves, and the spec says what else the Job would find
    out: the memory, and a revision that cannot change, as replicas that start later would else serve other weights. And
    the source is GGUF and needs no Secret.
    """
    spec = model.spec
    is_pinned = source.is_gguf and (spec.sha256 is not None or source.is_pinned)
    is_for_hosts = spec.hardware.accelerator == METAL and observed.consumer is None
    has_stated_memory = spec.memory_bytes is not None
    is_public = spec.source_secret_ref is None
    return not settings.image and is_pinned and is_for_hosts and has_stated_memory and is_public


def _decide_without_job(model: Model, source: Source) -> ModelDecision:
    """Return the decision about a Model that is inspected by the hosts or the Ollama that serve it: it is Ready.

    A file of hosts is not, unless the spec states its memory, by which hosts are chosen. `ready` and `cached` are the
    messages of the conditions: who inspects it, and why no volume has its weights.
    """
    if source.scheme == "file" and model.spec.memory_bytes is None:
        problem = (
            "nothing in the cluster can read a file:// source to compute its memory: set spec.memoryBytes, to what "
            "`pomona inspect` prints on a host that has the file"
        )
        unknown = model_condition(model, READY, true=False, reason="MemoryUnknown", message=problem)
        return ModelDecision(phase="Failed", conditions=[unknown])

    # For a file on hosts; the other cases are below.
    ready = "only a host that has the file can read it: the host's agent inspects it, and rejects it if it does not fit"
    cached = "pods cannot read a file:// source: set hardware.accelerator to metal, or use an hf:// or https:// source"

    if source.scheme == "ollama":
        ready = "the Ollama that serves it, in a pod or on a host, pulls and inspects it"
        cached = "it is on no volume: the Ollama of each pod pulls it into a folder of its own"
    elif source.scheme != "file":  # only hosts serve it, and the controller has no image for Jobs
        ready = "the source is public and pinned, and spec.memoryBytes is stated: each host fetches and inspects it"
        cached = NOT_NEEDED[1]
    return ModelDecision(
        phase="Ready",
        conditions=[
            model_condition(model, READY, true=True, reason="HostInspects", message=ready),
            model_condition(model, CACHED, true=False, reason="HostInspects", message=cached),
        ],
        facts=ModelFacts(format="ollama") if source.scheme == "ollama" else None,
    )


def _plan(model: Model, observed: ObservedModel, decision: ModelDecision, settings: PodSettings) -> Plan:
    """Return the plan of a decision: Jobs and claims to create and delete, the status, labels, and the next look.

    All Jobs of the Model are deleted but those of the decision's works, those that it has not decided about, and
    benchmarks.
    """
    # 1. The Jobs to delete; `observed` has none of benchmarks.
    kept_names = {work.job for work in decision.works} | {job["metadata"]["name"] for job in decision.undecided}
    unneeded_jobs = [(JOBS, job) for job in observed.jobs if job["metadata"]["name"] not in kept_names]

    # 2. The times after which to look again; the least counts.
    wait_seconds = [decision.again_seconds, *(work.again_seconds for work in decision.works)]
    if refused_secret(observed):
        wait_seconds.append(source_secret.READ_AGAIN_SECONDS)

    # 3. All writes.
    status = _build_status(model, decision)
    return Plan(
        create=(*decision.create, *((JOBS, work.create) for work in decision.works if work.create)),
        patch=(*decision.patch, *claims.build_owner_patches(observed.claims)),
        # prune leaves out the Jobs that are being deleted already.
        delete=(*prune(unneeded_jobs, ()), *decision.delete),
        status=status,
        # If the API server refuses these writes, the condition Cached states its reason.
        waiting=(CACHED,) if _waits_for_weights(decision) else (),
        labels=label_model(model, status, settings.vendors),
        events=transitions(
            model.status.conditions, decision.conditions, action="Reconcile", silent=REASONS_WITHOUT_EVENT
        ),
        again_seconds=min((seconds for seconds in wait_seconds if seconds is not None), default=None),
    )


def _build_status(model: Model, decision: ModelDecision) -> Obj:
    """Return the status of a Model, with no field for what the decision does not know."""
    status: Obj = {
        "observedGeneration": model.metadata.generation,
        "phase": decision.phase,
        "conditions": list(decision.conditions),
    }
    weights = {"cached": decision.cached, "copies": decision.copies, "shortages": decision.shortages}
    status |= {field: msgspec.to_builtins(value) for field, value in weights.items() if value}
    if decision.facts is not None:
        status |= msgspec.to_builtins(decision.facts)
        if decision.facts.size_bytes is not None:
            status["size"] = size_text(decision.facts.size_bytes)
    if decision.last_checked:
        status["lastChecked"] = decision.last_checked
    if parameters := describe_parameters(model.spec, status.get("totalParameters"), status.get("activeParameters")):
        status["parameters"] = parameters
    return status


def _waits_for_weights(decision: ModelDecision) -> bool:
    """Return whether a decision creates a claim or a Job for weights that pods need."""
    creates_anything = bool(decision.create) or any(work.create for work in decision.works)
    has_consumers = all(condition["reason"] != "NoConsumers" for condition in decision.conditions)
    return creates_anything and has_consumers


def _is_inspected(model: Model) -> bool:
    """Return whether the status has an inspection of this generation."""
    ready = find(model.status.conditions, READY)
    if ready is None or ready.status != "True":
        return False
    return ready.reason == "Inspected" and ready.observed_generation == model.metadata.generation
