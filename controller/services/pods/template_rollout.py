"""The rollout of a Deployment's template: at once after an edit, in turn after an update of Pomona, or not at all.

A new version of Pomona, or another option of the controller, may render another template for every service. If all pods
were replaced at once, every model of a cluster would load again at the same time. So the Deployment has a digest of the
user's inputs beside its stamp: if the template differs and the inputs do not, the rollout waits for its turn
(`update_pacer.py`). All of that is in the Deployment, so another leader decides alike.
"""

import hashlib
from copy import deepcopy
from typing import Any, Final

import msgspec

from controller.models.served import Served, cache_path, cached_claim
from controller.reconcile.stamp import ANNOTATION_INPUTS, ANNOTATION_UPDATE, is_desired, stamp
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.model import Model
from kube.client import Obj
from kube.resources import DEPLOYMENTS

_ADDED_FIELDS: Final = ("priorityClassName", "topologySpreadConstraints")
"""Fields of a pod that earlier versions did not state, and for which no pod is restarted."""
_DEFAULTS: Final = InferenceServiceSpec(model_ref="")
"""Values that nobody decided: a field that a later version adds has its default in all objects."""


def digest_inputs(service: InferenceService, served: Served) -> str:
    """Return the digest of what users decided about the pods of a service; scaling replaces none."""
    stated = {
        name: value
        for name, value in msgspec.structs.asdict(service.spec).items()
        if value != getattr(_DEFAULTS, name) and name not in {"replicas", "suspend"}
    }
    models = (served.model, *(each.model for each in served.companions if each.model is not None))
    inputs = (stated, service.status.token_rotation, [_list_inputs(each) for each in models])
    return hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()[:16]


def _list_inputs(model: Model) -> tuple[Any, ...]:
    """Return what the pods of a Model have of it; other edits of it, and a revision to come, change no pod."""
    spec, image = model.spec, model.status.cached.image if model.status.cached else ""
    return model.metadata.uid, spec.hardware, spec.memory_bytes, cached_claim(model), cache_path(model), image


def decide_rollout(made: Obj, observed: Obj, inputs: str, *, is_estimate: bool, may_roll: bool) -> Obj | None:
    """Return the Deployment to apply, or None if its new template waits for its turn.

    Args:
        made: the desired Deployment.
        observed: the present one.
        inputs: the digest of the user's inputs.
        is_estimate: True if the memory of its pods is estimated, and stated by no user.
        may_roll: True if it is the service's turn to be replaced by an update.
    """
    earlier = (observed["metadata"].get("annotations") or {}).get(ANNOTATION_INPUTS)
    is_edited = earlier not in {None, inputs}
    if (kept := _keep_pods(made, observed, is_estimate=is_estimate, is_edited=is_edited)) is not None:
        return annotate(kept, inputs)
    if is_edited:
        return annotate(made, inputs)
    # Without a ready pod there is nothing to interrupt, and the update may be the remedy.
    if not may_roll and observed.get("status", {}).get("readyReplicas"):
        return None
    return annotate(made, inputs, {ANNOTATION_UPDATE: "true"})


def annotate(desired: Obj, inputs: str, annotations: Obj | None = None) -> Obj:
    """Return a Deployment with its stamp and the digest of the user's inputs."""
    metadata = {**desired["metadata"], "annotations": {ANNOTATION_INPUTS: inputs, **(annotations or {})}}
    return stamp({**desired, "metadata": metadata})


def is_rolled_out(deployment: Obj) -> bool:
    """Return whether all pods of a Deployment have its template and are ready."""
    wanted, status = deployment["spec"].get("replicas"), deployment.get("status") or {}
    if status.get("observedGeneration") != deployment["metadata"].get("generation"):
        return not wanted
    return all(status.get(count, 0) == wanted for count in ("replicas", "updatedReplicas", "readyReplicas"))


def _keep_pods(made: Obj, observed: Obj, *, is_estimate: bool, is_edited: bool) -> Obj | None:
    """Return the Deployment with the template that its pods have, or None if that differs in more than may wait.

    No pod is restarted for a better estimate of the memory, such as that of a later version, for the hook before the
    stop, for another limit of the time to load, and, unless a user edited something, for the fields that earlier
    versions did not state. A change of the number of pods, or of the strategy, restarts none either.
    """
    if _has_template(made, observed):
        return made
    kept = deepcopy(made)
    spec, pod = kept["spec"]["template"]["spec"], observed["spec"]["template"]["spec"]
    before = {each["name"]: each for each in (*pod.get("initContainers", ()), *pod["containers"])}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        there: Obj = before.get(container["name"], {})
        if is_estimate and (requested := there.get("resources", {}).get("requests", {}).get("memory")):
            container["resources"]["requests"]["memory"] = requested
        if "lifecycle" not in there:
            container.pop("lifecycle", None)
        if (limit := there.get("startupProbe", {}).get("failureThreshold")) and "startupProbe" in container:
            container["startupProbe"]["failureThreshold"] = limit
    if not is_edited and "priorityClassName" not in pod:
        for field in _ADDED_FIELDS:
            spec.pop(field, None)
    return kept if _has_template(kept, observed) else None


def _has_template(desired: Obj, observed: Obj) -> bool:
    there = {name: observed["spec"][name] for name in ("replicas", "strategy") if name in observed["spec"]}
    return is_desired(DEPLOYMENTS, desired | {"spec": desired["spec"] | there}, observed)
