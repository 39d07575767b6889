"""Phase and conditions of a Model with a copy of its weights on each node."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from controller.models import claims
from controller.models.copy_claims import CopyClaim, CopyDemand
from controller.models.decision import (
    CACHED,
    READY,
    REASONS_WITHOUT_EVENT,
    VOLUME_CHANGING,
    InspectedModel,
    explain_progress,
    inspected_message,
    model_condition,
    refused_secret,
)
from controller.models.jobs import JobProgress
from controller.models.volume import MODELS_PATH
from crds.cache import NodeCopy
from kube.client import Obj

_READ_AGAIN_SECONDS: Final = 60.0
"""Time within which another StorageClass of the same name is noticed."""
_MOST_NAMED: Final = 3
"""Nodes that a message names."""


class CopyObstacle(NamedTuple):
    """The reason why no further copy is made."""

    phase: str
    """Phase of a Model without any copy."""
    reason: str
    message: str
    again_seconds: float | None = None
    """Time after which to look again, if no watch reports its end."""


def find_obstacle(inspected: InspectedModel) -> CopyObstacle | None:
    """Return why no copy can be made, with the way out, or None."""
    model, observed = inspected.model, inspected.observed
    if observed.copies.binds_immediately:
        message = (
            f"StorageClass {model.spec.cache.storage_class_name} of spec.cache.storageClassName has volumeBindingMode "
            "Immediate, so its volume may be on any node: name a class with WaitForFirstConsumer, such as one of local "
            "volumes, or make a Model with cache.scope model"
        )
        return CopyObstacle("Failed", "StorageClassUnsuitable", message, _READ_AGAIN_SECONDS)
    if problem := claims.find_size_problem(model, inspected.facts):
        return CopyObstacle("Failed", *problem)
    if refused := refused_secret(observed):
        return CopyObstacle("Downloading", refused.reason, refused.message)
    return None


class CopyReport(NamedTuple):
    """The copies of a Model and the fetches of further ones, for its status."""

    inspected: InspectedModel
    path: str
    demand: CopyDemand
    obstacle: CopyObstacle | None
    copies: Sequence[NodeCopy]
    going: Sequence[JobProgress]
    """Fetches that have not succeeded."""

    def phase(self) -> str:
        """Return the phase: Ready once pods can serve from any copy, or need none."""
        if self.copies or not self.demand.number:
            return "Ready"
        if self.obstacle is not None:
            return self.obstacle.phase
        return "Failed" if self.going and self._worst().outcome.state == "Failed" else "Downloading"

    def conditions(self, earlier: Sequence[CopyClaim]) -> list[Obj]:
        """Return all conditions; `earlier` are the copies of other weights, class or size from which pods serve."""
        model = self.inspected.model
        message = inspected_message(self.inspected.facts)
        ready = model_condition(model, READY, true=True, reason="Inspected", message=message)
        lacks = self._explain_lack()
        if not self.copies:
            reason, message = lacks or (
                "NoConsumers",
                "not needed: no InferenceService that runs in pods uses this Model",
            )
            return [ready, model_condition(model, CACHED, true=False, reason=reason, message=message)]
        message = f"copies on {_name_nodes(self.copies)} at {MODELS_PATH}/{self.copies[0].path}"
        if sha256 := self.copies[0].sha256:
            message += f", sha256 {sha256}"
        if lacks and not earlier:
            message += f"; for another copy: {lacks[1]}"
        cached = model_condition(model, CACHED, true=True, reason="Fetched", message=message)
        return [ready, cached, *self._changing(earlier, lacks)]

    def _changing(self, earlier: Sequence[CopyClaim], lacks: tuple[str, str] | None) -> list[Obj]:
        """Return the condition while pods serve from earlier copies."""
        if not earlier:
            return []
        model = self.inspected.model
        if lacks and lacks[0] not in REASONS_WITHOUT_EVENT:
            return [model_condition(model, VOLUME_CHANGING, true=False, reason=lacks[0], message=lacks[1])]
        served = ", ".join(sorted(claim.name for claim in earlier))
        message = (
            f"copies are replaced: pods serve from PersistentVolumeClaim {served} until the weights on the new volume "
            "are verified"
        )
        if lacks:
            message += f"; {lacks[1]}"
        return [model_condition(model, VOLUME_CHANGING, true=True, reason="VolumeReplaced", message=message)]

    def _explain_lack(self) -> tuple[str, str] | None:
        """Return reason and message of a copy that is lacking, or None."""
        if self.obstacle is not None:
            return self.obstacle.reason, self.obstacle.message
        if self.going:
            what = "fetches the weights to the volume"
            return explain_progress(self.inspected.model, self._worst(), doing="Fetching", what=what)
        if self.demand.number > len(self.copies):
            return "Fetching", "waiting for a PersistentVolumeClaim"
        return None

    def _worst(self) -> JobProgress:
        """Return the fetch that has most trouble."""
        rank = {"Failed": 0, "Broken": 1, "Going": 2, "Succeeded": 3}
        return min(self.going, key=lambda progress: (rank[progress.outcome.state], not progress.outcome.reason))


def _name_nodes(copies: Iterable[NodeCopy]) -> str:
    nodes = sorted({copy.node for copy in copies})
    named = ", ".join(nodes[:_MOST_NAMED])
    more = len(nodes) - _MOST_NAMED
    return f"node{'s' if len(nodes) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"
