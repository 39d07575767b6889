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
from controller.models.jobs import JobOutcome, JobProgress, Work
from controller.models.node_copies import decide_copies
from controller.models.served import image_of, is_mounted_image, own_claim, weights_path
from controller.models.volume import MODELS_PATH
from controller.pod_settings import TenantLimits, is_image_allowed
from crds.cache import CachedWeights
from crds.model import Model, ModelFacts
from kube.client import Obj
from kube.kinds import PersistentVolumeClaim


def decide_weights(inspected: InspectedModel) -> ModelDecision:
    """Decide how pods get the weights of an inspected Model.

    There are four ways: from the user's own claim, which the source names; from an image that nodes mount; from copies
    on nodes; or from one volume. For the first two nothing is fetched, so they are decided here.
    """
    model, facts = inspected.model, inspected.facts
    # Condition and status of the cached weights; the user's claim needs no status, as the source says where they are.
    cached = None
    if (claim := own_claim(model)) is not None:
        message = f"weights are on the volume of PersistentVolumeClaim {claim}, which pods mount read-only"
        cached_condition = model_condition(model, CACHED, true=True, reason="OnVolume", message=message)
    elif is_mounted_image(model):
        image = image_of(model.spec.source, facts.revision)
        cached_condition = _judge_image(model, image, inspected.settings.limits)
        if cached_condition["status"] == "True":
            cached = CachedWeights(image=image, path=facts.file, sha256=facts.sha256)
    elif model.spec.cache.scope == "node":  # copies are made only if engines in pods can read the weights
        return decide_copies(inspected, is_for_pods=_is_for_pods(model, facts))
    else:
        return _decide_volume(inspected)

    # The Model is Ready, as it is inspected; if its image is not allowed, the condition Cached says so.
    ready = model_condition(model, READY, true=True, reason="Inspected", message=inspected_message(facts))
    return ModelDecision(
        phase="Ready", conditions=[ready, cached_condition], facts=facts, cached=cached, works=[inspected.inspection]
    )


def _decide_volume(inspected: InspectedModel) -> ModelDecision:
    """Decide about the weights on the Model's own volume: which claim is for them, and whether a Job fetches them.

    They are needed if a service whose pods can read them uses the Model: the consumer.

    1. Choose the target, the claim for the weights; if it has to be created, its stated size must hold them.
    2. If the target is the verified claim in the status, nothing more is to do.
    3. If the weights are needed, fetch them to the target, or wait until the target is created.
    4. Else no claim and no Job is created; pods go on with verified weights on an earlier volume, the holder.
    """
    # 1. The target.
    model, observed, facts = inspected.model, inspected.observed, inspected.facts
    consumer = observed.consumer if _is_for_pods(model, facts) else None
    is_needed = consumer is not None
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    volumes = claims.decide_claims(
        model, facts, path, observed.claims, is_needed=is_needed, is_edited=inspected.is_edited
    )
    if volumes.create and (problem := claims.find_size_problem(model, facts)):
        return _conclude(inspected, volumes._replace(create=(), change=None), phase="Failed", lack=problem)

    # 2. and 3. It exists: use it if it is verified, else fetch to it.
    if (target := volumes.target) is not None:
        name, uid = target.metadata.name, target.metadata.uid
        wanted = CachedWeights(name=name, claim=uid, path=path, sha256=facts.sha256)
        placement = volume.place_fetch(model, consumer, inspected.settings)
        fetch = volume.prepare_fetch(model, facts, target, placement, inspected.settings)
        if model.status.cached == wanted:
            done = JobProgress(outcome=DONE, job=jobs.name_last_job(fetch, observed.jobs))
            kept = inspected._replace(facts=volume.keep_fetched(facts, model))
            return _conclude(kept, volumes, done, verified=wanted)
        if is_needed:
            return _decide_fetch(inspected, volumes, target, fetch, wanted)

    # 4. Nothing needs the weights. Pods that still read an earlier volume go on with it, so no change is under way:
    # `change` would say that a volume grows or is replaced.
    if not is_needed:
        return _conclude(inspected, volumes if volumes.holder is None else volumes._replace(change=None))

    # 3. They are needed and there is no target: the decision creates its claim.
    _, new_claim = volumes.create[0]
    return _await_claim(inspected, volumes, new_claim["metadata"]["name"])


def _decide_fetch(
    inspected: InspectedModel, volumes: VolumeDecision, claim: PersistentVolumeClaim, fetch: Work, wanted: CachedWeights
) -> ModelDecision:
    """Decide about the fetch of needed weights to a claim that exists; `wanted` is the status once it has succeeded.

    It waits for a usable Secret of the source, and then until a new claim has had the time to bind by itself. After
    that its Job takes the next step.
    """
    model, observed, now = inspected.model, inspected.observed, inspected.now
    # Wait for the Secret, and then for the claim.
    if refused := refused_secret(observed):
        return _conclude(inspected, volumes, phase="Downloading", lack=(refused.reason, refused.message))
    if volume.is_settling(claim, now):
        wait = JobProgress(outcome=JobOutcome(state="Going"), again_seconds=volume.SETTLING_SECONDS)
        return _await_claim(inspected, volumes, claim.metadata.name, wait)

    # Take the next step of the Job.
    progress = jobs.proceed(fetch, observed.jobs, observed.pods, now)
    if progress.outcome.state == "Succeeded":
        # The fetch has read the header of the weights, too.
        fresh = inspected._replace(facts=volume.take_fetched(inspected.facts, progress.outcome.answer))
        return _conclude(fresh, volumes, progress, verified=wanted)

    # It is not done: the condition Cached says why.
    lack = explain_progress(model, progress, doing="Fetching", what="fetches the weights to the volume")
    phase = "Failed" if progress.outcome.state == "Failed" else "Downloading"
    return _conclude(inspected, volumes, progress, phase=phase, lack=lack)


def _await_claim(inspected: InspectedModel, volumes: VolumeDecision, claim: str, *works: JobProgress) -> ModelDecision:
    """Return the decision while the claim of this name is not ready for a fetch."""
    lack = ("Fetching", f"waiting for PersistentVolumeClaim {claim}")
    return _conclude(inspected, volumes, *works, phase="Downloading", lack=lack)


def _conclude(
    inspected: InspectedModel,
    volumes: VolumeDecision,
    *works: JobProgress,
    verified: CachedWeights | None = None,
    phase: str = "Ready",
    lack: Explanation | None = None,
) -> ModelDecision:
    """Return the decision about a Model with these volumes: its phase, conditions, status, and changes of claims.

    Args:
        inspected: the Model.
        volumes: its claims.
        works: the fetch, if there is one.
        verified: the wanted weights, if they are verified; else pods serve from an earlier volume if there is one.
        phase: phase of a Model without weights that pods can read.
        lack: why the wanted weights are not verified.
    """
    # The wanted weights, else verified ones on an earlier volume (the holder); None: pods have none.
    weights = verified or volumes.holder
    location = ""  # in words, for the condition Cached
    if weights is not None:
        location = f"weights are on the volume at {MODELS_PATH}/{weights.path}"
        location += f", sha256 {weights.sha256}" if weights.sha256 else ""

    # A superseded claim is deleted when no pod mounts it any more: until then, look again.
    has_unneeded_claim = any(weights is None or weights.claim != claim.metadata.uid for claim in volumes.superseded)
    return ModelDecision(
        phase=phase if weights is None else "Ready",
        conditions=inspected.report_weights(location, lack, volumes.change),
        facts=inspected.facts,
        cached=weights,
        works=[inspected.inspection, *works],
        create=volumes.create,
        patch=volumes.patch,
        # The earlier volume is deleted once the status names this one.
        delete=claims.list_deletions(inspected.model, volumes, inspected.observed.claims),
        again_seconds=claims.RELEASE_SECONDS if has_unneeded_claim else None,
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
