"""The decision about the weights of an inspected Model: on the volume of their owner, in an image, or fetched.

They are fetched only when a service that runs as pods refers to the Model.
"""

from artifacts.source import parse
from controller.models import claims, jobs, volume
from controller.models.claims import VolumeDecision
from controller.models.decision import (
    CACHED,
    DONE,
    READY,
    Explanation,
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
    """Decide how pods get the weights of an inspected Model: from a claim, an image, copies on nodes or one volume."""
    model, facts = inspected.model, inspected.facts
    if (claim := own_claim(model)) is not None:
        message = f"weights are on the volume of PersistentVolumeClaim {claim}, which pods mount read-only"
        cached_condition, cached = model_condition(model, CACHED, true=True, reason="OnVolume", message=message), None
    elif is_mounted_image(model):
        image = image_of(model.spec.source, facts.revision)
        cached_condition = _judge_image(model, image, inspected.settings.limits)
        mounted = CachedWeights(image=image, path=facts.file, sha256=facts.sha256)
        cached = mounted if cached_condition["status"] == "True" else None
    elif model.spec.cache.scope == "node":
        return decide_copies(inspected, is_for_pods=_is_for_pods(model, facts))
    else:
        return _decide_volume(inspected)
    ready = model_condition(model, READY, true=True, reason="Inspected", message=inspected_message(facts))
    return ModelDecision(
        phase="Ready", conditions=[ready, cached_condition], facts=facts, cached=cached, works=[inspected.inspected]
    )


def _decide_volume(inspected: InspectedModel) -> ModelDecision:
    """Decide whether the weights are on the Model's volume, and whether they need to be."""
    model, observed, facts, now = inspected.model, inspected.observed, inspected.facts, inspected.now
    consumer = observed.consumer if _is_for_pods(model, facts) else None
    is_needed = consumer is not None
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    volumes = claims.decide_volume(
        model, facts, path, observed.claims, is_needed=is_needed, is_edited=inspected.is_edited
    )
    target = volumes.target
    if volumes.create and (problem := claims.find_size_problem(model, facts)):
        return _conclude(inspected, volumes._replace(create=(), change=None), phase="Failed", lack=problem)
    if target is not None:
        uid = target.metadata.uid
        verified = CachedWeights(name=target.metadata.name, claim=uid, path=path, sha256=facts.sha256)
        placement = volume.place_fetch(model, consumer, inspected.settings)
        work = volume.prepare_fetch(model, facts, target, placement, inspected.settings)
        if model.status.cached == verified:
            fetched = JobProgress(outcome=DONE, job=jobs.name_last_job(work, observed.jobs))
            kept = inspected._replace(facts=volume.keep_fetched(facts, model))
            return _conclude(kept, volumes, fetched, verified=verified)
        if is_needed and (refused := refused_secret(observed)):
            return _conclude(inspected, volumes, phase="Downloading", lack=(refused.reason, refused.message))
        if is_needed and not volume.is_settling(target, now):
            fetched = jobs.proceed(work, observed.jobs, observed.pods, now)
            if fetched.outcome.state == "Succeeded":
                fresh = inspected._replace(facts=volume.take_fetched(facts, fetched.outcome.answer))
                return _conclude(fresh, volumes, fetched, verified=verified)
            lack = explain_progress(model, fetched, doing="Fetching", what="fetches the weights to the volume")
            phase = "Failed" if fetched.outcome.state == "Failed" else "Downloading"
            return _conclude(inspected, volumes, fetched, phase=phase, lack=lack)
    if not is_needed:
        return _conclude(inspected, volumes if volumes.holder is None else volumes._replace(change=None))
    name = target.metadata.name if target is not None else volumes.create[0][1]["metadata"]["name"]
    settling = JobProgress(outcome=JobOutcome(state="Going"), again_seconds=volume.SETTLING_SECONDS)
    return _conclude(
        inspected,
        volumes,
        *([settling] if target is not None else []),
        phase="Downloading",
        lack=("Fetching", f"waiting for PersistentVolumeClaim {name}"),
    )


def _conclude(
    inspected: InspectedModel,
    volumes: VolumeDecision,
    *works: JobProgress,
    verified: CachedWeights | None = None,
    phase: str = "Ready",
    lack: Explanation | None = None,
) -> ModelDecision:
    """Return the decision about a Model with these volumes.

    Args:
        inspected: the Model.
        volumes: its claims.
        works: the fetch, if there is one.
        verified: the wanted weights, if they are verified; else pods serve from an earlier volume if there is one.
        phase: phase of a Model without weights that pods can read.
        lack: why the wanted weights are not verified.
    """
    weights, held = verified or volumes.holder, ""
    if weights is not None:
        held = f"weights are on the volume at {MODELS_PATH}/{weights.path}"
        held += f", sha256 {weights.sha256}" if weights.sha256 else ""
    is_released = any(weights is None or weights.claim != claim.metadata.uid for claim in volumes.superseded)
    return ModelDecision(
        phase=phase if weights is None else "Ready",
        conditions=inspected.report_weights(held, lack, volumes.change),
        facts=inspected.facts,
        cached=weights,
        works=[inspected.inspected, *works],
        create=volumes.create,
        patch=volumes.patch,
        # The earlier volume is deleted once the status names this one.
        delete=claims.list_deletions(inspected.model, volumes, inspected.observed.claims),
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
