"""The Model reconciler: inspect the artifact, then put verified weights on a volume where pods need them.

Two works, each a Job (see `jobs.py`, `volume.py`): `inspect` for every Model that the cluster can reach, `fetch` only
when a service that runs as pods refers to it. The results are kept in the status, so that nothing is lost with a
deleted Job or a stopped controller.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from artifacts.source import Source, SourceError, parse
from controller.models import claims, jobs, refresh, source_secret, volume
from controller.models.claims import ObservedClaims, VolumeDecision, read_expandable
from controller.models.discovery import describe_parameters, label_model
from controller.models.jobs import JobOutcome, JobProgress, Placement
from controller.models.observation import (
    ModelInputs,
    ObservedModel,
    model_of_pod,
    models_of_service,
    models_served_beside,
    observe_model,
)
from controller.models.served import (
    METAL,
    accelerator_of,
    image_of,
    is_mounted_image,
    own_claim,
    select_nodes,
    weights_path,
)
from controller.models.source_secret import SecretVerdict
from controller.models.volume import MODELS_PATH, ModelFacts
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import condition, find, transitions
from controller.reconcile.plan import Patch, Plan, Reconciler, Ref, Snapshot, prune
from controller.reconcile.triggers import Trigger, all_but_status, everything, owned
from controller.tenant_limits import TenantLimits, allowed_tolerations, is_image_allowed
from crds.inferenceservice import InferenceService
from crds.model import GGUF, Cached, Model
from crds.size import size_text
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, PODS, PVCS, ObjectKey, Resource

READY: Final = "Ready"
CACHED: Final = "Cached"
VOLUME_CHANGING: Final = "VolumeChanging"
"""Condition while the volume grows or another one takes its place; absent otherwise."""
REASONS_WITHOUT_EVENT: Final = {
    "Accepted",
    "Inspecting",
    "Fetching",
    "NoConsumers",
    "Unschedulable",
    refresh.UP_TO_DATE,
}
"""Reasons without an Event: normal progress, and problems that the scheduler reports itself."""
DONE: Final = JobOutcome(state="Succeeded")


class ModelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a Model, before it is written as a Plan."""

    phase: str
    conditions: Sequence[Obj]
    facts: ModelFacts | None = None
    cached: Cached | None = None
    works: Sequence[JobProgress] = ()
    """Works whose Jobs are kept or created."""
    create: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    again_seconds: float | None = None
    last_checked: str = ""
    undecided: Sequence[Obj] = ()
    """Jobs that are kept until the inspection shows whether they are needed."""


def model_reconciler(settings: PodSettings) -> Reconciler:
    """Return the reconciler."""

    def decide(snapshot: Snapshot, key: ObjectKey) -> Plan:
        model = snapshot.read(MODELS, key, Model)
        if model is None or model.metadata.deletion_timestamp is not None:
            return Plan()  # its children are garbage-collected
        return desired(model, observe_model(snapshot, key, model, settings.vendors), settings, snapshot.now)

    async def observe(client: Client, snapshot: Snapshot, key: ObjectKey) -> ModelInputs | None:
        model = snapshot.read(MODELS, key, Model)
        if model is None:
            return None
        has_work = model.spec.source_secret_ref is not None and refresh.is_due(model, snapshot.now)
        verdict = await source_secret.read_verdict(client, model, has_work=has_work)
        return ModelInputs(verdict, await read_expandable(client, snapshot, model))

    return Reconciler(
        resource=MODELS,
        decide=decide,
        observe=observe,
        triggers=(
            *(owned(resource, MODELS) for resource in (JOBS, PVCS)),
            Trigger(PODS, model_of_pod, everything),
            Trigger(INFERENCE_SERVICES, models_of_service, all_but_status),
            Trigger(MODELS, models_served_beside, all_but_status),
        ),
    )


def desired(model: Model, observed: ObservedModel, settings: PodSettings, now: datetime) -> Plan:
    """Decide about a Model: its Jobs, its volume and its status."""
    decision = _decide(model, observed, settings, now)
    conditions = [*decision.conditions, *source_secret.list_conditions(model, observed.secret)]
    return _plan(model, observed, msgspec.structs.replace(decision, conditions=conditions))


def _decide(model: Model, observed: ObservedModel, settings: PodSettings, now: datetime) -> ModelDecision:
    try:
        source = parse(model.spec.source, model.spec.files)
    except SourceError as error:
        way_out = "edit spec.source" + (" or spec.files" if model.spec.files else "")
        ready = _condition(model, READY, true=False, reason=error.reason, message=f"{error.message}; {way_out}")
        return ModelDecision(phase="Failed", conditions=[ready])
    if source.scheme in {"file", "ollama"}:
        return _decide_hosts_only(model, source)
    if _needs_no_job(model, source, observed):
        return _decide_hosts_only(model, source)
    refused = _refused_secret(observed)
    if refused and not _is_inspected(model):
        ready = _condition(model, READY, true=False, reason=refused.reason, message=refused.message)
        cached = find(model.status.conditions, CACHED)
        return ModelDecision(
            phase="Pending",
            conditions=[ready, *([msgspec.to_builtins(cached)] if cached else [])],
            facts=_kept_facts(model),
            cached=model.status.cached,
        )
    if _is_inspected(model):
        facts, inspected = _inspected_facts(model, observed, settings, now)
        if refused or not refresh.is_watched(model):
            return _decide_weights(model, observed, settings, now, known=(facts, inspected))
        check = refresh.check_source(
            model, facts, observed_jobs=observed.jobs, pods=observed.pods, settings=settings, now=now
        )
        made = _decide_weights(model, observed, settings, now, known=(check.facts, inspected))
        return msgspec.structs.replace(
            made,
            conditions=[*made.conditions, *check.conditions],
            works=[*made.works, check.progress],
            last_checked=check.last_checked,
        )
    work = volume.inspection(model, settings)
    progress = jobs.proceed(work, observed.jobs, observed.pods, now)
    if progress.outcome.state == "Succeeded":
        known = ModelFacts.of_answer(model, progress.outcome.answer), progress
        return _decide_weights(model, observed, settings, now, known=known, is_edited=True)
    reason, message = _explain_progress(model, progress, doing="Inspecting", what="reads the artifact's header")
    cached = find(model.status.conditions, CACHED)
    return ModelDecision(
        phase="Failed" if progress.outcome.state == "Failed" else "Pending",
        # An edit may leave the weights unchanged: their last condition stays until the inspection has ended.
        conditions=[
            _condition(model, READY, true=False, reason=reason, message=message),
            *([msgspec.to_builtins(cached)] if cached else []),
        ],
        facts=_kept_facts(model),
        cached=model.status.cached,
        works=[progress],
        undecided=[job for job in observed.jobs if jobs.verb(job) == "fetch"],
    )


def _kept_facts(model: Model) -> ModelFacts | None:
    """Return the facts of the weights on the volume, which stay known until an inspection shows others."""
    return ModelFacts.of_status(model) if model.status.cached is not None else None


def _inspected_facts(
    model: Model, observed: ObservedModel, settings: PodSettings, now: datetime
) -> tuple[ModelFacts, JobProgress]:
    """Return the facts of an inspected Model; a Model that an earlier release inspected is inspected again."""
    known = ModelFacts.of_status(model)
    work = volume.inspection(model, settings, known)
    if not volume.is_outdated(model) or _refused_secret(observed):
        # An edit takes the answer of a Job that is kept. That of a source which moves may be out of date by then.
        kept = "" if refresh.is_watched(model) else jobs.last(work, observed.jobs)
        return known, JobProgress(outcome=DONE, job=kept)
    progress = jobs.proceed(work, observed.jobs, observed.pods, now)
    if progress.outcome.state == "Succeeded":
        known = known.after_inspection(ModelFacts.of_answer(model, progress.outcome.answer))
    elif progress.outcome.state == "Failed":
        known = msgspec.structs.replace(known, inspection=volume.inspection_version(model))
    return known, progress


def _refused_secret(observed: ObservedModel) -> SecretVerdict | None:
    """Return the verdict on a Secret that must not be used, or None."""
    return observed.secret if observed.secret is not None and not observed.secret.accepted else None


def _needs_no_job(model: Model, source: Source, observed: ObservedModel) -> bool:
    """Return whether hosts alone serve a public source that cannot change: then each finds the same by itself.

    Unless the source is pinned, replicas that start at different times would serve different weights.
    """
    spec = model.spec
    # The format of a folder is not known before it is inspected.
    is_pinned = source.is_gguf and (spec.sha256 is not None or source.is_pinned)
    is_for_hosts = spec.hardware.accelerator == METAL and observed.consumer is None
    is_known = spec.memory_bytes is not None and spec.source_secret_ref is None
    # What was inspected once is inspected again after an edit: processes that name its revision would else be replaced.
    is_new = model.status.size_bytes is None and not observed.jobs
    return is_pinned and is_for_hosts and is_known and is_new


def _decide_hosts_only(model: Model, source: Source) -> ModelDecision:
    ready = "only a host that has the file can read it: the host's agent inspects it, and rejects it if it does not fit"
    cached = (
        f"pods cannot read a {source.scheme}:// source: set hardware.accelerator to metal, or use an hf:// or https:// "
        "source"
    )
    if source.is_library:
        ready = "the Ollama that serves it, in a pod or on a host, pulls and inspects it"
        cached = "it is on no volume: the Ollama of each pod pulls it into a folder of its own"
    elif source.scheme != "file":
        ready = "the source is public and pinned, and spec.memoryBytes is stated: each host fetches and inspects it"
        cached = "not needed: no InferenceService that runs in pods uses this Model"
    return ModelDecision(
        phase="Ready",
        conditions=[
            _condition(model, READY, true=True, reason="HostInspects", message=ready),
            _condition(model, CACHED, true=False, reason="HostInspects", message=cached),
        ],
        facts=ModelFacts(format="ollama") if source.is_library else None,
    )


def _decide_weights(
    model: Model,
    observed: ObservedModel,
    settings: PodSettings,
    now: datetime,
    *,
    known: tuple[ModelFacts, JobProgress],
    is_edited: bool = False,
) -> ModelDecision:
    """Decide about the weights of an inspected Model, which may be on a volume of their owner."""
    claim = own_claim(model)
    if claim is None:
        return _decide_cache(model, observed, settings, now, known=known, is_edited=is_edited)
    facts, inspected = known
    message = f"weights are on the volume of PersistentVolumeClaim {claim}, which pods mount read-only"
    return ModelDecision(
        phase="Ready",
        conditions=[
            _condition(model, READY, true=True, reason="Inspected", message=_inspected_message(facts)),
            _condition(model, CACHED, true=True, reason="OnVolume", message=message),
        ],
        facts=facts,
        works=[inspected],
    )


def _decide_cache(
    model: Model,
    observed: ObservedModel,
    settings: PodSettings,
    now: datetime,
    *,
    known: tuple[ModelFacts, JobProgress],
    is_edited: bool = False,
) -> ModelDecision:
    """Decide for an inspected Model whether its weights are on a volume, and whether they need to be."""
    facts, inspected = known
    if not _is_for_pods(model, facts):
        observed = msgspec.structs.replace(observed, consumer=None)
    if is_mounted_image(model):
        mounted = Cached(image=image_of(model.spec.source, facts.revision), path=facts.file, sha256=facts.sha256)
        held = _judge_image(model, mounted.image, settings.limits)
        ready = _condition(model, READY, true=True, reason="Inspected", message=_inspected_message(facts))
        return ModelDecision(
            phase="Ready",
            conditions=[ready, held],
            facts=facts,
            cached=mounted if held["status"] == "True" else None,
            works=[inspected],
        )
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    is_needed = observed.consumer is not None
    volumes = claims.decide_volume(model, facts, path, observed.claims, is_needed=is_needed, is_edited=is_edited)
    shortage = claims.find_shortage(model, facts) if volumes.create else None
    if shortage:
        volumes = volumes._replace(create=(), change=None)
    cache = _CacheState(model, facts, inspected, volumes, observed.claims)
    if volumes.target is not None:
        there = Cached(
            name=volumes.target["metadata"]["name"],
            claim=volumes.target["metadata"]["uid"],
            path=path,
            sha256=facts.sha256,
        )
        placement = _placement(model, observed.consumer, settings)
        work = volume.fetching(model, facts, volumes.target, placement, settings)
        if claims.is_same(model.status.cached, there):
            fetched = JobProgress(outcome=DONE, job=jobs.last(work, observed.jobs))
            return cache._replace(facts=facts.of_same_weights(model)).held(there, fetched)
        if is_needed and (refused := _refused_secret(observed)):
            return cache.waiting("Downloading", refused.reason, refused.message)
        if is_needed and not volume.is_settling(volumes.target, now):
            fetched = jobs.proceed(work, observed.jobs, observed.pods, now)
            if fetched.outcome.state == "Succeeded":
                return cache._replace(facts=facts.after_fetch(fetched.outcome.answer)).held(there, fetched)
            what = "fetches the weights to the volume"
            phase = "Failed" if fetched.outcome.state == "Failed" else "Downloading"
            return cache.waiting(phase, *_explain_progress(model, fetched, doing="Fetching", what=what), fetched)
    if not is_needed:
        return cache.unused()
    if shortage:
        return cache.waiting("Failed", "VolumeTooSmall", shortage)
    claim = volumes.target or volumes.create[0][1]
    message = f"waiting for PersistentVolumeClaim {claim['metadata']['name']}"
    settling = JobProgress(outcome=JobOutcome(state="Going"), again_seconds=volume.SETTLING_SECONDS)
    return cache.waiting("Downloading", "Fetching", message, *([settling] if volumes.target else []))


class _CacheState(NamedTuple):
    """An inspected Model with its volumes, and the decisions that can follow."""

    model: Model
    facts: ModelFacts
    inspected: JobProgress
    volumes: VolumeDecision
    observed: ObservedClaims

    def held(self, there: Cached, fetched: JobProgress) -> ModelDecision:
        """Return the decision about verified weights; the earlier volume is deleted once the status names this one."""
        cached = _condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(there))
        return self._decision("Ready", [cached, *self._change()], [fetched], cached=there)

    def waiting(self, phase: str, reason: str, message: str, *works: JobProgress) -> ModelDecision:
        """Return the decision while the target is not verified; pods serve from an earlier volume if there is one."""
        holder = self.volumes.holder
        if holder is None:
            cached = _condition(self.model, CACHED, true=False, reason=reason, message=message)
            return self._decision(phase, [cached, *self._change()], works)
        change = self._change()
        if reason not in REASONS_WITHOUT_EVENT:
            change = [_condition(self.model, VOLUME_CHANGING, true=False, reason=reason, message=message)]
        cached = _condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(holder))
        return self._decision("Ready", [cached, *change], works, cached=holder)

    def unused(self) -> ModelDecision:
        """Return the decision about a Model whose weights no pod needs; verified ones stay until others are."""
        if (holder := self.volumes.holder) is not None:
            held = _condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(holder))
            return self._decision("Ready", [held], [], cached=holder)
        message = "not needed: no InferenceService that runs in pods uses this Model"
        cached = _condition(self.model, CACHED, true=False, reason="NoConsumers", message=message)
        return self._decision("Ready", [cached, *self._change()], [])

    def _change(self) -> list[Obj]:
        if self.volumes.change is None:
            return []
        reason, message = self.volumes.change
        return [_condition(self.model, VOLUME_CHANGING, true=True, reason=reason, message=message)]

    def _decision(
        self,
        phase: str,
        conditions: Sequence[Obj],
        works: Sequence[JobProgress],
        *,
        cached: Cached | None = None,
    ) -> ModelDecision:
        message = _inspected_message(self.facts)
        ready = _condition(self.model, READY, true=True, reason="Inspected", message=message)
        is_released = any(cached is None or cached.claim != claims.uid(each) for each in self.volumes.superseded)
        return ModelDecision(
            phase=phase,
            conditions=[ready, *conditions],
            facts=self.facts,
            cached=cached,
            works=[self.inspected, *works],
            create=self.volumes.create,
            patch=self.volumes.patch,
            delete=claims.list_deletions(self.model, self.volumes, self.observed),
            again_seconds=claims.RELEASE_SECONDS if is_released else None,
        )


def _judge_image(model: Model, image: str, limits: TenantLimits) -> Obj:
    """Return the condition of an image that nodes mount."""
    if is_image_allowed(image, limits):
        return _condition(model, CACHED, true=True, reason="ImageVolume", message=f"nodes pull and mount {image}")
    message = (
        f"spec.source {model.spec.source} is no image that nodes may mount: images begin with "
        f"{' or '.join(limits.image_prefixes)} here; copy it there, make a Model with spec.cache.medium Volume, or ask "
        "the platform team for another --allowed-image-prefix"
    )
    return _condition(model, CACHED, true=False, reason="ImageNotAllowed", message=message)


def _is_for_pods(model: Model, facts: ModelFacts) -> bool:
    """Return whether an engine in pods may read the weights: not those that MLX wrote, nor while that is not known."""
    source = parse(model.spec.source, model.spec.files)
    return source.is_gguf if facts.format is None else facts.format != "mlx"


def _plan(model: Model, observed: ObservedModel, decision: ModelDecision) -> Plan:
    """Return the plan: create the Jobs that are needed, delete the others, and write the status."""
    kept = {work.job for work in decision.works} | {job["metadata"]["name"] for job in decision.undecided}
    past = [(JOBS, job) for job in observed.jobs if job["metadata"]["name"] not in kept]
    status: Obj = {
        "observedGeneration": model.metadata.generation,
        "phase": decision.phase,
        "conditions": list(decision.conditions),
    }
    if decision.cached is not None:
        status["cached"] = msgspec.to_builtins(decision.cached)
    if decision.facts is not None:
        status |= msgspec.to_builtins(decision.facts)
        if decision.facts.size_bytes is not None:
            status["size"] = size_text(decision.facts.size_bytes)
    if decision.last_checked:
        status["lastChecked"] = decision.last_checked
    if parameters := describe_parameters(model.spec, status.get("totalParameters"), status.get("activeParameters")):
        status["parameters"] = parameters
    waits = [work.again_seconds for work in decision.works if work.again_seconds is not None]
    if decision.again_seconds is not None:
        waits.append(decision.again_seconds)
    if _refused_secret(observed):
        waits.append(source_secret.READ_AGAIN_SECONDS)
    return Plan(
        create=(*decision.create, *((JOBS, work.create) for work in decision.works if work.create is not None)),
        patch=decision.patch,
        delete=(*prune(past, ()), *decision.delete),
        status=status,
        labels=label_model(model, status),
        events=transitions(
            model.status.conditions, decision.conditions, action="Reconcile", silent=REASONS_WITHOUT_EVENT
        ),
        again_seconds=min(waits, default=None),
    )


def _is_inspected(model: Model) -> bool:
    """Return whether the status has an inspection of this generation."""
    ready = find(model.status.conditions, READY)
    generation = model.metadata.generation
    return ready is not None and ready.reason == "Inspected" and ready.observed_generation == generation


def _cached_message(cached: Cached) -> str:
    message = f"weights are on the volume at {MODELS_PATH}/{cached.path}"
    return f"{message}, sha256 {cached.sha256}" if cached.sha256 else message


def _placement(model: Model, consumer: InferenceService | None, settings: PodSettings) -> Placement:
    """Return the placement of the consumer: the fetch must tolerate the same taints and reach the same volume."""
    if consumer is None:
        return Placement()
    spec = consumer.spec
    allowed = allowed_tolerations(spec.tolerations, settings.limits)
    tolerations = (*settings.vendors[accelerator_of(consumer, model)].tolerations, *allowed)
    selected = select_nodes(consumer, model, settings.vendors)
    return Placement(selected, tuple(msgspec.to_builtins(each) for each in tolerations))


def _explain_progress(model: Model, progress: JobProgress, *, doing: str, what: str) -> tuple[str, str]:
    """Return reason and message of an unfinished work, with the way out if the user has one."""
    namespace, outcome = model.metadata.namespace, progress.outcome
    if outcome.state == "Failed":
        way_out = f"edit the Model, or retry with: kubectl -n {namespace} delete job {progress.job}"
        return outcome.reason, f"{outcome.message.rstrip('.')}; {way_out}"
    if outcome.state == "Broken":
        return outcome.reason, f"{outcome.message.rstrip('.')}; it is retried automatically"
    secret = model.spec.source_secret_ref
    if outcome.reason == "CreateContainerConfigError" and secret is not None:
        refused = source_secret.judge_secret(namespace, secret.name, None)
        return refused.reason, f"{refused.message} ({outcome.message})"
    if (claim := own_claim(model)) is not None and "persistentvolumeclaim" in outcome.message.lower():
        message = f"PersistentVolumeClaim {claim} of spec.source cannot be mounted: {outcome.message.rstrip('.')}"
        return "ClaimNotReady", f"{message}; see: kubectl -n {namespace} describe pvc {claim}"
    if outcome.reason:
        return outcome.reason, f"Job {progress.job} is waiting: {outcome.message}"
    return doing, f"Job {progress.job} {what}"


def _condition(model: Model, kind: str, *, true: bool, reason: str, message: str) -> Obj:
    return condition(kind, true=true, reason=reason, message=message, generation=model.metadata.generation)


def _inspected_message(facts: ModelFacts) -> str:
    gguf = facts.gguf or GGUF()
    known = (gguf.architecture, gguf.quantization, size_text(facts.size_bytes) if facts.size_bytes else "")
    return f"{facts.file or 'folder'}: " + ", ".join(each for each in known if each)
