"""The rollout of a Deployment's template: at once after an edit, in turn after an update of Pomona, or not at all.

A new version of Pomona, or another option of the controller, may render another template for every service. If all pods
were replaced at once, every model of a cluster would load again at the same time. So the Deployment has a digest of the
user's inputs beside its stamp: if the template differs and the inputs do not, the rollout waits for its turn
(`update_pacer.py`). All of that is in the Deployment, so another leader decides alike.

A service with copies of weights on nodes has several Deployments. Of those that serve, one at a time gets another
template, after an edit, too. One whose node takes no pod does not stop that, unless it served before the change and no
pod has started with the new template: then the change may be why no node takes it.
"""

import hashlib
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any, Final, Literal, NamedTuple

import msgspec

from controller.models.served import Served, cache_path, cached_claim
from controller.placement.queued_service import read_template_mark
from controller.reconcile.partial_objects import DRAIN_OPTION, GRACE_FIELD
from controller.reconcile.stamp import ANNOTATION_INPUTS, ANNOTATION_SERVED, ANNOTATION_UPDATE, is_desired, stamp
from controller.services.pods.queue_gate import has_gate, set_gate
from crds.cache import NodeCopy
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.meta import LABEL_COPY, POD_TEMPLATE, PROXY_CONTAINER
from crds.model import Model
from kube.client import Obj

_DEFAULTS: Final = InferenceServiceSpec(model_ref="")
"""Values that nobody decided: a field that a later version adds has its default in all objects."""


class TemplateChange(NamedTuple):
    """A desired Deployment, and what applying it does to the pods that exist."""

    desired: Obj
    cause: Literal["", "edit", "update"] = ""
    """Why pods are replaced; empty: none is."""
    is_present: bool = False
    """True if the present Deployment is as desired."""


def digest_inputs(service: InferenceService, served: Served, copy: NodeCopy | None = None) -> str:
    """Return a digest of what users decided about the pods of a service: if it changes, an edit replaces the pods.

    The number of replicas, their suspension and the drain time are left out, because they replace no pod.
    `copy` is the copy of the weights that these pods mount, if the Model has copies.
    """
    # _DEFAULTS has the default of each field: a field that a later version adds does not change the digest.
    stated = {
        name: value
        for name, value in msgspec.structs.asdict(service.spec).items()
        if value != getattr(_DEFAULTS, name) and name not in {"replicas", "suspend", "drain_seconds"}
    }
    companions = (_list_inputs(companion.model) for companion in served.companions if companion.model is not None)
    inputs = (stated, service.status.token_rotation, [_list_inputs(served.model, copy), *companions])
    return hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()[:16]


def _list_inputs(model: Model, copy: NodeCopy | None = None) -> tuple[Any, ...]:
    """Return the facts of a Model that its pods depend on; other edits, and a revision to come, replace no pod."""
    spec, image = model.spec, model.status.cached.image if model.status.cached else ""
    claim, path = (copy.name, copy.path) if copy is not None else (cached_claim(model), cache_path(model))
    return model.metadata.uid, spec.hardware, spec.stated_bytes, claim, path, image


def compare_template(
    made: Obj, observed: Obj, inputs: str, *, is_estimate: bool, is_stated: bool = False, has_places: bool = False
) -> TemplateChange:
    """Return the Deployment to apply, and whether an edit or an update of Pomona then replaces its pods.

    A difference that may wait, such as a better estimate of the memory, is left out of it, so that it restarts no pod.
    The mark of a template is an annotation of its pods, by which the queue tells templates apart.

    Args:
        made: the desired Deployment.
        observed: the present one.
        inputs: the digest of the user's inputs.
        is_estimate: True if the memory that its pods request is estimated, and stated by no user.
        is_stated: True if a Model states its memory, which counts for devices, and which an edit may change.
        has_places: True if a pod of it has a node: then it is not replaced for the queue's gate or PriorityClass.
    """
    # 1. The present Deployment may be as desired. The mark of a template stays until another part of it changes, and
    # ANNOTATION_SERVED (its pods served before the last change) until that change is rolled out.
    made = _set_mark(made, read_template_mark(observed["spec"]["template"]))
    kept_annotations = {ANNOTATION_SERVED: "true"} if _served_before_rollout(observed) else {}
    desired = annotate(made, inputs, kept_annotations)
    if is_desired(desired, observed):
        return TemplateChange(desired, is_present=True)

    # 2. Pods keep their template if it differs only in what may wait; those with a node also for the queue's settings.
    is_edited = (observed["metadata"].get("annotations") or {}).get(ANNOTATION_INPUTS) != inputs
    # An estimated request stays, unless a Model states its memory, which the edit may have changed.
    keeps_request = is_estimate and not (is_stated and is_edited)

    variants = (made, _keep_queue_settings(made, observed)) if has_places else (made,)
    for variant in variants:
        if (kept := _try_keep_template(variant, observed, keeps_request=keeps_request)) is not None:
            return TemplateChange(annotate(kept, inputs, kept_annotations))

    # 3. Else they are replaced.
    made = mark_template(made)
    annotations = {ANNOTATION_SERVED: "true"} if _has_served(observed) else kept_annotations
    if is_edited:
        return TemplateChange(annotate(made, inputs, annotations), cause="edit")
    return TemplateChange(annotate(made, inputs, {ANNOTATION_UPDATE: "true", **annotations}), cause="update")


def _has_served(observed: Obj) -> bool:
    """Return whether a Deployment beside a copy has ready pods."""
    is_of_copy = LABEL_COPY in observed["metadata"].get("labels", {})
    return is_of_copy and bool(observed.get("status", {}).get("readyReplicas"))


def _served_before_rollout(deployment: Obj) -> bool:
    """Return whether the pods of a Deployment served before a change of its template that is not rolled out."""
    return ANNOTATION_SERVED in (deployment["metadata"].get("annotations") or {}) and not is_rolled_out(deployment)


def select_changes(
    changes: Sequence[tuple[TemplateChange, Obj | None]], *, may_roll_out: bool, refused: Collection[str] = ()
) -> list[bool]:
    """Return for each change of a Deployment of one service whether it is applied now, or waits.

    Of the Deployments that serve, one at a time gets another template, so that the service keeps answering.

    Args:
        changes: the changes, each with the present Deployment.
        may_roll_out: True if it is the turn of the service to be replaced by an update of Pomona.
        refused: names of the Deployments whose pods are ready, but for those that their node has no room for.
    """
    if not any(change.cause for change, _observed in changes):
        return [True] * len(changes)

    # 1. Those without ready pods are changed at once: there is nothing to interrupt, and the change may be the remedy.
    interrupts = [
        bool(change.cause) and observed is not None and bool(observed.get("status", {}).get("readyReplicas"))
        for change, observed in changes
    ]
    selected = [not interrupt for interrupt in interrupts]
    if all(selected):
        return selected

    # 2. As long as one of these is down, no other is interrupted.
    has_started = any(
        change.is_present and observed is not None and _has_started(observed) for change, observed in changes
    )

    def is_down(change: TemplateChange, observed: Obj | None) -> bool:
        """Return whether pods of a Deployment are being replaced or not ready, so that no other may be interrupted.

        `refused` are the Deployments whose node is full; `has_started`: one has a ready pod of the new template.
        """
        if observed is None:
            return True
        # A node that refuses some of its pods does not count, unless the change may be the reason: the Deployment
        # served before it, and no Deployment of the service has started with the new template.
        if observed["metadata"]["name"] in refused and (has_started or not _served_before_rollout(observed)):
            return False
        return bool(change.cause) or not is_rolled_out(observed)

    # Those that step 1 has selected may be down.
    if any(is_selected and is_down(*change) for change, is_selected in zip(changes, selected, strict=True)):
        return selected

    # 3. Change one of the others: the first that lacks pods anyway, else the first.
    may_change = [
        (index, observed)
        for index, (change, observed) in enumerate(changes)
        if interrupts[index] and observed is not None and (may_roll_out or change.cause == "edit")
    ]
    if may_change:
        lacking_pods = [(index, observed) for index, observed in may_change if not is_rolled_out(observed)]
        first_index, _observed = (lacking_pods or may_change)[0]
        selected[first_index] = True
    return selected


def annotate(desired: Obj, inputs: str, annotations: Obj | None = None) -> Obj:
    """Return a Deployment with its stamp and the digest of the user's inputs."""
    metadata = {**desired["metadata"], "annotations": {ANNOTATION_INPUTS: inputs, **(annotations or {})}}
    return stamp({**desired, "metadata": metadata})


def mark_template(deployment: Obj) -> Obj:
    """Return a Deployment whose template has a mark, since creation times of one second cannot tell two apart."""
    template = _set_mark(deployment, "")["spec"]["template"]
    digest = hashlib.sha256(msgspec.json.encode(template, order="deterministic")).hexdigest()[:16]
    return _set_mark(deployment, digest)


def _set_mark(deployment: Obj, mark: str) -> Obj:
    """Return a Deployment with this mark of its template, or without one if it is empty."""
    template = deployment["spec"]["template"]
    metadata: Obj = template.get("metadata") or {}
    annotations = {name: value for name, value in metadata.get("annotations", {}).items() if name != POD_TEMPLATE}
    annotations |= {POD_TEMPLATE: mark} if mark else {}
    metadata = {name: value for name, value in metadata.items() if name != "annotations"}
    marked = {**template, "metadata": metadata | ({"annotations": annotations} if annotations else {})}
    return {**deployment, "spec": {**deployment["spec"], "template": marked}}


def is_rolled_out(deployment: Obj) -> bool:
    """Return whether all pods of a Deployment have its template and are ready."""
    wanted, status = deployment["spec"].get("replicas"), deployment.get("status") or {}
    if status.get("observedGeneration") != deployment["metadata"].get("generation"):
        return not wanted  # its numbers are older than its spec
    return all(status.get(count, 0) == wanted for count in ("replicas", "updatedReplicas", "readyReplicas"))


def is_changing(deployment: Obj) -> bool:
    """Return whether a Deployment may have pods of an earlier template."""
    status = deployment.get("status") or {}
    if status.get("observedGeneration") != deployment["metadata"].get("generation"):
        return True
    # updatedReplicas counts the pods of the present template, replicas those of any.
    return bool(status.get("replicas", 0) != status.get("updatedReplicas", 0))


def _has_started(deployment: Obj) -> bool:
    """Return whether a pod with the template of a Deployment is ready."""
    return not is_changing(deployment) and bool(deployment["status"].get("readyReplicas"))


def _keep_queue_settings(made: Obj, observed: Obj) -> Obj:
    """Return the desired Deployment with the gate of its present pods; with their PriorityClass if it wants the gate.

    A gate holds a new pod off Kubernetes' scheduler until the queue admits the pod. The queue reads the priority
    from the service, so an edit of it needs no new pods.
    """
    kept = set_gate(made, is_gated=has_gate(observed))

    present_class = observed["spec"]["template"]["spec"].get("priorityClassName")
    # A PriorityClass decides between pods that compete for a node. Pods behind the gate do not, so theirs may stay.
    if has_gate(made) and present_class is not None:
        kept["spec"]["template"]["spec"]["priorityClassName"] = present_class
    return kept


def _try_keep_template(made: Obj, observed: Obj, *, keeps_request: bool) -> Obj | None:
    """Return the Deployment with the template that its pods have; None: they must be replaced.

    These differences may wait until the pods are replaced for another cause: the memory request, if `keeps_request` (it
    is an estimate), and the time that a pod has to end its requests. Number of pods and strategy restart none anyway.
    """
    if _has_template(made, observed):
        return made

    # Take over what may wait; if nothing else differs, the pods keep their template.
    kept = deepcopy(made)
    desired_pod, present_pod = kept["spec"]["template"]["spec"], observed["spec"]["template"]["spec"]
    present_containers = (*present_pod.get("initContainers", ()), *present_pod["containers"])
    present_by_name = {container["name"]: container for container in present_containers}
    for container in (*desired_pod.get("initContainers", ()), *desired_pod["containers"]):
        _copy_present_fields(container, present_by_name.get(container["name"], {}), keeps_request=keeps_request)
    if GRACE_FIELD in present_pod:  # the time that a pod has to end its requests
        desired_pod[GRACE_FIELD] = present_pod[GRACE_FIELD]

    return kept if _has_template(kept, observed) else None


def _copy_present_fields(container: Obj, present: Obj, *, keeps_request: bool) -> None:
    """Copy those fields of the present container whose change may wait into the desired one."""
    if keeps_request and (requested := present.get("resources", {}).get("requests", {}).get("memory")):
        container["resources"]["requests"]["memory"] = requested
    # The value of DRAIN_OPTION, the time to end requests, is the argument behind it.
    arguments, present_arguments = container.get("args", []), present.get("args") or []
    if container["name"] == PROXY_CONTAINER and DRAIN_OPTION in present_arguments[:-1]:
        present_value = present_arguments[present_arguments.index(DRAIN_OPTION) + 1]
        arguments[arguments.index(DRAIN_OPTION) + 1] = present_value


def _has_template(desired: Obj, observed: Obj) -> bool:
    """Return whether the present Deployment is as desired, apart from its number of pods and its strategy."""
    present = {name: observed["spec"][name] for name in ("replicas", "strategy") if name in observed["spec"]}
    return is_desired(desired | {"spec": desired["spec"] | present}, observed)
