"""The decision about the weights of an inspected Model: on the volume of their owner, in an image, or fetched.

They are fetched only when a service that runs as pods refers to the Model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from artifacts.source import parse
from controller.models import claims, jobs, volume
from controller.models.claims import ObservedClaims, VolumeDecision
from controller.models.decision import (
    CACHED,
    DONE,
    READY,
    REASONS_WITHOUT_EVENT,
    VOLUME_CHANGING,
    InspectedModel,
    ModelDecision,
    explain_progress,
    inspected_message,
    model_condition,
    refused_secret,
)
from controller.models.jobs import JobOutcome, JobProgress
from controller.models.node_copies import decide_copies
from controller.models.served import image_of, is_mounted_image, own_claim, weights_path
from controller.models.volume import MODELS_PATH
from controller.tenant_limits import TenantLimits, is_image_allowed
from crds.cache import CachedWeights
from crds.model import Model, ModelFacts
from kube.client import Obj


def decide_weights(inspected: InspectedModel) -> ModelDecision:
    """Decide about the weights of an inspected Model."""
    model, facts = inspected.model, inspected.facts
    if (claim := own_claim(model)) is not None:
        message = f"weights are on the volume of PersistentVolumeClaim {claim}, which pods mount read-only"
        return inspected.decide(model_condition(model, CACHED, true=True, reason="OnVolume", message=message))
    if is_mounted_image(model):
        mounted = CachedWeights(image=image_of(model.spec.source, facts.revision), path=facts.file, sha256=facts.sha256)
        held = _judge_image(model, mounted.image, inspected.settings.limits)
        return inspected.decide(held, cached=mounted if held["status"] == "True" else None)
    if model.spec.cache.scope == "node":
        return decide_copies(inspected, is_for_pods=_is_for_pods(model, facts))
    return _decide_volume(inspected)


def _decide_volume(inspected: InspectedModel) -> ModelDecision:
    """Decide whether the weights are on the Model's volume, and whether they need to be."""
    model, observed, facts, now = inspected.model, inspected.observed, inspected.facts, inspected.now
    consumer = observed.consumer if _is_for_pods(model, facts) else None
    is_needed = consumer is not None
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    volumes = claims.decide_volume(
        model, facts, path, observed.claims, is_needed=is_needed, is_edited=inspected.is_edited
    )
    size_problem = claims.find_size_problem(model, facts) if volumes.create else None
    if size_problem:
        volumes = volumes._replace(create=(), change=None)
    cache = _CacheState(model, facts, inspected.inspected, volumes, observed.claims)
    if volumes.target is not None:
        there = CachedWeights(
            name=volumes.target.metadata.name,
            claim=volumes.target.metadata.uid,
            path=path,
            sha256=facts.sha256,
        )
        placement = volume.place_fetch(model, consumer, inspected.settings)
        work = volume.fetching(model, facts, volumes.target, placement, inspected.settings)
        if model.status.cached == there:
            fetched = JobProgress(outcome=DONE, job=jobs.last(work, observed.jobs))
            return cache._replace(facts=volume.keep_fetched(facts, model)).held(there, fetched)
        if is_needed and (refused := refused_secret(observed)):
            return cache.waiting("Downloading", refused.reason, refused.message)
        if is_needed and not volume.is_settling(volumes.target, now):
            fetched = jobs.proceed(work, observed.jobs, observed.pods, now)
            if fetched.outcome.state == "Succeeded":
                return cache._replace(facts=volume.take_fetched(facts, fetched.outcome.answer)).held(there, fetched)
            what = "fetches the weights to the volume"
            phase = "Failed" if fetched.outcome.state == "Failed" else "Downloading"
            return cache.waiting(phase, *explain_progress(model, fetched, doing="Fetching", what=what), fetched)
    if not is_needed:
        return cache.unused()
    if size_problem:
        return cache.waiting("Failed", *size_problem)
    name = volumes.target.metadata.name if volumes.target is not None else volumes.create[0][1]["metadata"]["name"]
    message = f"waiting for PersistentVolumeClaim {name}"
    settling = JobProgress(outcome=JobOutcome(state="Going"), again_seconds=volume.SETTLING_SECONDS)
    return cache.waiting("Downloading", "Fetching", message, *([settling] if volumes.target else []))


class _CacheState(NamedTuple):
    """An inspected Model with its volumes, and the decisions that can follow."""

    model: Model
    facts: ModelFacts
    inspected: JobProgress
    volumes: VolumeDecision
    observed: ObservedClaims

    def held(self, there: CachedWeights, fetched: JobProgress) -> ModelDecision:
        """Return the decision about verified weights; the earlier volume is deleted once the status names this one."""
        cached = model_condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(there))
        return self._decision("Ready", [cached, *self._change()], [fetched], cached=there)

    def waiting(self, phase: str, reason: str, message: str, *works: JobProgress) -> ModelDecision:
        """Return the decision while the target is not verified; pods serve from an earlier volume if there is one."""
        holder = self.volumes.holder
        if holder is None:
            cached = model_condition(self.model, CACHED, true=False, reason=reason, message=message)
            return self._decision(phase, [cached, *self._change()], works)
        change = self._change()
        if reason not in REASONS_WITHOUT_EVENT:
            change = [model_condition(self.model, VOLUME_CHANGING, true=False, reason=reason, message=message)]
        cached = model_condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(holder))
        return self._decision("Ready", [cached, *change], works, cached=holder)

    def unused(self) -> ModelDecision:
        """Return the decision about a Model whose weights no pod needs; verified ones stay until others are."""
        if (holder := self.volumes.holder) is not None:
            held = model_condition(self.model, CACHED, true=True, reason="Fetched", message=_cached_message(holder))
            return self._decision("Ready", [held], [], cached=holder)
        message = "not needed: no InferenceService that runs in pods uses this Model"
        cached = model_condition(self.model, CACHED, true=False, reason="NoConsumers", message=message)
        return self._decision("Ready", [cached, *self._change()], [])

    def _change(self) -> list[Obj]:
        if self.volumes.change is None:
            return []
        reason, message = self.volumes.change
        return [model_condition(self.model, VOLUME_CHANGING, true=True, reason=reason, message=message)]

    def _decision(
        self,
        phase: str,
        conditions: Sequence[Obj],
        works: Sequence[JobProgress],
        *,
        cached: CachedWeights | None = None,
    ) -> ModelDecision:
        message = inspected_message(self.facts)
        ready = model_condition(self.model, READY, true=True, reason="Inspected", message=message)
        is_released = any(cached is None or cached.claim != claim.metadata.uid for claim in self.volumes.superseded)
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
        return model_condition(model, CACHED, true=True, reason="ImageVolume", message=f"nodes pull and mount {image}")
    message = (
        f"spec.source {model.spec.source} is no image that nodes may mount: images begin with "
        f"{' or '.join(limits.image_prefixes)} here; copy it there, make a Model with spec.cache.medium Volume, or ask "
        "the platform team for another --allowed-image-prefix"
    )
    return model_condition(model, CACHED, true=False, reason="ImageNotAllowed", message=message)


def _is_for_pods(model: Model, facts: ModelFacts) -> bool:
    """Return whether an engine in pods may read the weights: not those that MLX wrote, nor while that is not known."""
    source = parse(model.spec.source, model.spec.files)
    return source.is_gguf if facts.format is None else facts.format != "mlx"


def _cached_message(cached: CachedWeights) -> str:
    message = f"weights are on the volume at {MODELS_PATH}/{cached.path}"
    return f"{message}, sha256 {cached.sha256}" if cached.sha256 else message
