"""The decision about a Model before it is written as a Plan: phase, conditions, facts, and the works that go on.

Inspection and weights are decided in modules of their own, and both end here.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.models import jobs, refresh, source_secret
from controller.models.jobs import JobOutcome, JobProgress
from controller.models.observation import ObservedModel
from controller.models.served import METAL, own_claim
from controller.models.source_secret import SecretVerdict
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import condition
from controller.reconcile.plan import Patch, Ref
from crds.cache import CachedWeights, NodeCopy, NodeShortage
from crds.model import Model, ModelFacts
from crds.size import size_text
from crds.weights_header import GGUF
from kube.client import Obj
from kube.resources import Resource

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


Explanation = tuple[str, str]
"""Reason and message of a condition."""
NOT_NEEDED: Final[Explanation] = ("NoConsumers", "not needed: no InferenceService that runs in pods uses this Model")


class ModelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a Model, before it is written as a Plan."""

    phase: str
    conditions: Sequence[Obj]
    facts: ModelFacts | None = None
    cached: CachedWeights | None = None
    copies: Sequence[NodeCopy] = ()
    """Verified copies on nodes, of a Model with spec.cache.scope node."""
    shortages: Sequence[NodeShortage] = ()
    """Nodes whose disk has no space for a copy that is being made."""
    works: Sequence[JobProgress] = ()
    """Works whose Jobs are kept or created."""
    create: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    again_seconds: float | None = None
    last_checked: str = ""
    undecided: Sequence[Obj] = ()
    """Jobs that are kept until the inspection shows whether they are needed."""


DONE: Final = JobOutcome(state="Succeeded")
"""The outcome of a work whose result is in the status."""


class InspectedModel(NamedTuple):
    """A Model whose header has been read, and all that decides about its weights."""

    model: Model
    observed: ObservedModel
    settings: PodSettings
    now: datetime
    facts: ModelFacts
    inspection: JobProgress
    """The inspection that found the facts."""
    is_edited: bool = False
    """True if this inspection follows an edit, so that earlier weights are not wanted any more."""

    def report_weights(
        self, location: str, lack: Explanation | None = None, change: Explanation | None = None
    ) -> list[Obj]:
        """Return the conditions Ready, Cached and, while the volume changes, VolumeChanging.

        Cached says where pods read weights, else why they have none. VolumeChanging is True with the change; but if
        pods have weights to read, such as earlier ones, and the wanted ones have a problem, it is False with that.

        Args:
            location: where verified weights are that pods can read; empty: nowhere.
            lack: why pods cannot read the wanted weights yet; None: they can, or none needs them.
            change: the replacement or growth of a volume that is not complete.
        """
        # Ready and Cached.
        has_weights = bool(location)
        reason, message = ("Fetched", location) if has_weights else (lack or NOT_NEEDED)
        conditions = [
            model_condition(self.model, READY, true=True, reason="Inspected", message=inspected_message(self.facts)),
            model_condition(self.model, CACHED, true=has_weights, reason=reason, message=message),
        ]

        # VolumeChanging. While pods have weights to read, a problem with the wanted ones is reported in place of the
        # change. A lack whose reason (lack[0]) has no Event is no problem, but mostly normal progress.
        has_problem = has_weights and lack is not None and lack[0] not in REASONS_WITHOUT_EVENT
        explanation = lack if has_problem else change
        if explanation is not None:
            reason, message = explanation
            changing = model_condition(
                self.model, VOLUME_CHANGING, true=not has_problem, reason=reason, message=message
            )
            conditions.append(changing)
        return conditions


def refused_secret(observed: ObservedModel) -> SecretVerdict | None:
    """Return the verdict on a Secret that must not be used, or None."""
    return observed.secret if observed.secret is not None and not observed.secret.accepted else None


def explain_progress(model: Model, progress: JobProgress, *, doing: str, what: str) -> Explanation:
    """Return reason and message of an unfinished work, with the way out if the user has one.

    `doing` is the reason, and `what` is what its Job does, for a work that goes on without a problem.
    """
    namespace, outcome = model.metadata.namespace, progress.outcome
    # 1. There is no Job, or the last one has failed.
    if outcome.reason == jobs.NO_IMAGE:
        is_for_hosts = model.spec.hardware.accelerator == METAL
        more = "; hosts serve one public GGUF file without it if spec.memoryBytes and spec.sha256 are stated"
        return outcome.reason, f"{outcome.message}{more if is_for_hosts else ''}"
    if outcome.state == "Failed":
        way_out = f"edit the Model, or retry with: kubectl -n {namespace} delete job {progress.job}"
        return outcome.reason, f"{outcome.message.rstrip('.')}; {way_out}"
    if outcome.state == "Broken":
        return outcome.reason, f"{outcome.message.rstrip('.')}; it is retried automatically"

    # 2. Its pod waits for something that the user can bring: a Secret or a volume.
    secret = model.spec.source_secret_ref
    if outcome.reason == "CreateContainerConfigError" and secret is not None:
        # Mostly the Secret with the container's variables is not there: it is judged so (None).
        refused = source_secret.judge_secret(namespace, secret.name, None)
        return refused.reason, f"{refused.message} ({outcome.message})"
    if (claim := own_claim(model)) is not None and "persistentvolumeclaim" in outcome.message.lower():
        message = f"PersistentVolumeClaim {claim} of spec.source cannot be mounted: {outcome.message.rstrip('.')}"
        return "ClaimNotReady", f"{message}; see: kubectl -n {namespace} describe pvc {claim}"

    # 3. It waits for anything else, or goes on.
    if outcome.reason:
        return outcome.reason, f"Job {progress.job} is waiting: {outcome.message}"
    return doing, f"Job {progress.job} {what}"


def model_condition(model: Model, kind: str, *, true: bool, reason: str, message: str) -> Obj:
    """Return a condition of the Model's present generation."""
    return condition(kind, true=true, reason=reason, message=message, generation=model.metadata.generation)


def inspected_message(facts: ModelFacts) -> str:
    """Return the message of an inspected Model: file, architecture, quantization and size."""
    gguf = facts.gguf or GGUF()
    parts = (gguf.architecture, gguf.quantization, size_text(facts.size_bytes) if facts.size_bytes else "")
    return f"{facts.file or 'folder'}: " + ", ".join(part for part in parts if part)
