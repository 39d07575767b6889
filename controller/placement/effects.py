"""The writes by which the queue's decisions take effect: JSON patches of pods and MetalProcesses, and evictions.

A pod that waits has a scheduling gate. It is pinned to its node and loses the gate in one patch, so that it never is
free to be scheduled anywhere else. Each patch tests that the object is still the one that was decided about; a patch
that is sent twice, or by a leader that was overtaken, fails.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from controller.placement.queue_places import find_own_place, format_place
from crds.meta import ADMITTED_AT, ENQUEUED_AT, LABEL_MANAGED_BY, MANAGED_BY, NOMINATED, QUEUE_GATE
from kube.client import Obj
from kube.time import rfc3339

_AFFINITY: Final = "/spec/affinity"
_REQUIRED: Final = f"{_AFFINITY}/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"
Operations = Sequence[Mapping[str, Any]]
Labels = Sequence[tuple[str, str]]


def find_gate(pod: Obj) -> int | None:
    """Return the index of the queue's gate among a pod's scheduling gates; None: it has none."""
    gates = (pod.get("spec") or {}).get("schedulingGates") or ()
    return next((index for index, gate in enumerate(gates) if gate.get("name") == QUEUE_GATE), None)


def admit_pod(pod: Obj, node: str, node_labels: Labels = ()) -> Operations:
    """Return the patch that gives a pod its node; without a node the scheduler chooses one with these labels.

    A pod that is known to have annotations gets that of its place, unless it has that already.

    Raises ValueError: the pod does not wait in the queue.
    """
    index = find_gate(pod)
    if index is None:
        raise ValueError(f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']} has no gate of the queue")

    gate = f"/spec/schedulingGates/{index}"
    expressions = [{"key": name, "operator": "In", "values": [value]} for name, value in node_labels]
    return [
        # The patch fails unless the pod is the same, and still has its gate.
        _test("/metadata/uid", pod["metadata"]["uid"]),
        _test(f"{gate}/name", QUEUE_GATE),
        # The node, or the labels of one.
        *(_pin(pod, node) if node else ()),
        *(_restrict(pod, "matchExpressions", expressions) if expressions and not node else ()),
        # The queue's annotations and its gate.
        *_note_place(pod),
        *_remove_annotation(pod, NOMINATED),
        {"op": "remove", "path": gate},
    ]


def _note_place(pod: Obj) -> Operations:
    """Return the operation that annotates a pod with its queue place, which marks it as admitted."""
    annotations = pod["metadata"].get("annotations")
    # Without any annotation, the operation would replace all that the pod may have got meanwhile.
    if not annotations or ENQUEUED_AT in annotations:
        return []
    return _add_annotation(pod, ENQUEUED_AT, format_place(find_own_place(pod)))


def _pin(pod: Obj, node: str) -> Operations:
    """Return the operations that let a pod run on one node only."""
    return _restrict(pod, "matchFields", [{"key": "metadata.name", "operator": "In", "values": [node]}])


def _restrict(pod: Obj, field: str, added: Sequence[Obj]) -> Operations:
    """Return the operations that add node requirements to each term of a pod, or make one if it has none.

    A gated pod's terms may be extended, not replaced. `field` is matchExpressions or matchFields.
    """
    affinity = pod["spec"].get("affinity")
    node_affinity = (affinity or {}).get("nodeAffinity")
    required = (node_affinity or {}).get("requiredDuringSchedulingIgnoredDuringExecution")

    # 1. The pod has no term: make one, with as much around it as is missing.
    only_term: Obj = {"nodeSelectorTerms": [{field: [*added]}]}
    if affinity is None:
        value: Obj = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": only_term}}
        return [{"op": "add", "path": _AFFINITY, "value": value}]
    if node_affinity is None:
        value = {"requiredDuringSchedulingIgnoredDuringExecution": only_term}
        return [{"op": "add", "path": f"{_AFFINITY}/nodeAffinity", "value": value}]
    if required is None:
        return [{"op": "add", "path": _REQUIRED, "value": only_term}]

    # 2. Add the requirements to each term, since a node needs to meet only one of them.
    operations: list[Mapping[str, Any]] = []
    for index, term in enumerate(required["nodeSelectorTerms"]):
        path = f"{_REQUIRED}/nodeSelectorTerms/{index}/{field}"
        if term.get(field):
            operations += [{"op": "add", "path": f"{path}/-", "value": requirement} for requirement in added]
        else:
            operations.append({"op": "add", "path": path, "value": [*added]})
    return operations


def bind_process(process: Obj, host: str, now: datetime) -> Operations:
    """Return the patch that gives a MetalProcess its host."""
    return [
        _test("/metadata/resourceVersion", process["metadata"]["resourceVersion"]),  # fails if it has changed since
        {"op": "add", "path": "/spec/hostName", "value": host},
        *_remove_annotation(process, NOMINATED),
        *_add_annotation(process, ADMITTED_AT, rfc3339(now)),
    ]


def annotate(obj: Obj, annotations: Mapping[str, str | None]) -> Obj:
    """Return the merge patch that sets annotations of an object, or removes those that are None.

    A JSON patch would have to know whether the object has any annotation, and the store keeps only some.
    """
    return {"metadata": {"uid": obj["metadata"]["uid"], "annotations": dict(annotations)}}


def build_eviction(pod: Obj) -> Obj:
    """Return the Eviction of a pod, and of no successor with its name (by the precondition on its uid).

    An Eviction shows an admission policy only the name of the pod. So it has a label, by which the chart's policy knows
    those of the controller.
    """
    metadata = pod["metadata"]
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {LABEL_MANAGED_BY: MANAGED_BY},
        },
        "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
    }


def _add_annotation(obj: Obj, name: str, value: str) -> Operations:
    """Return the operation that sets an annotation; it makes the map of annotations if there is none."""
    annotations = obj["metadata"].get("annotations")
    if not annotations:
        return [{"op": "add", "path": "/metadata/annotations", "value": {name: value}}]
    return [{"op": "add", "path": f"/metadata/annotations/{_escape(name)}", "value": value}]


def _remove_annotation(obj: Obj, name: str) -> Operations:
    """Return the operation that removes an annotation; none if the object does not have it."""
    if name not in (obj["metadata"].get("annotations") or {}):
        return []
    return [{"op": "remove", "path": f"/metadata/annotations/{_escape(name)}"}]


def _test(path: str, value: str) -> Mapping[str, Any]:
    """Return the operation that makes the whole patch fail unless a field has this value."""
    return {"op": "test", "path": path, "value": value}


def _escape(name: str) -> str:
    """Return a name as a part of a JSON pointer, in which `~` and `/` have a meaning."""
    return name.replace("~", "~0").replace("/", "~1")
