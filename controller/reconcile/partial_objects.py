"""Objects of which the store keeps a part: whole ones take 45 KB of memory for a pod alone, most of it unread.

No decision may read a field that is dropped here. A change of dropped fields alone triggers no decision, because
triggers compare the parts. Of managedFields, our own entries are kept: they have what we applied, and in a MetalProcess
the time of the report. Objects that are only created and never applied keep none. Equal entries are kept once, and so
is each string.
"""

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec

from controller.reconcile.indexes import mounted_claims
from controller.reconcile.labels import LABEL_MANAGER
from controller.reconcile.plan import FIELD_MANAGER
from controller.reconcile.stamp import (
    ANNOTATION_INPUTS,
    ANNOTATION_SERVED,
    ANNOTATION_STAMP,
    ANNOTATION_UPDATE,
)
from crds.meta import DELETION_COST, DEVICE_NEED, ENQUEUED_AT, NOMINATED, POD_TEMPLATE
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NETWORK_POLICIES,
    NODE_FITNESSES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    PVCS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    ROLE_BINDINGS,
    ROLES,
    SERVICES,
    Resource,
)
from kube.store import Store

DRAIN_OPTION: Final = "--drain-seconds"
"""Option of a pod's proxy whose value its Deployment keeps: an edit of it restarts no pod."""
GRACE_FIELD: Final = "terminationGracePeriodSeconds"
"""Field of a pod of which the same holds."""
_MOST_SHARED: Final = 4096
_LONGEST_SHARED: Final = 64
"""Characters; longer strings are messages, each of its own."""
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_POD_CONDITIONS: Final = frozenset({"Ready", "PodScheduled"})
_POD_ANNOTATIONS: Final = frozenset({DELETION_COST, DEVICE_NEED, ENQUEUED_AT, NOMINATED, POD_TEMPLATE})
_POD_SPEC: Final = ("nodeName", "schedulingGates", "overhead", "priorityClassName", "resourceClaims")
_REPLICA_COUNTS: Final = ("observedGeneration", "replicas", "updatedReplicas", "readyReplicas")
_READ_OF_TEMPLATE: Final = ("priorityClassName", "schedulingGates", "resourceClaims", GRACE_FIELD)
_DEPLOYMENT_CONDITIONS: Final = frozenset({"ReplicaFailure"})


class _SharedEntries:
    """The entries of managedFields that many objects have in common."""

    def __init__(self) -> None:
        self._known: dict[bytes, Obj] = {}

    def reduce(self, part: Callable[[Obj], Obj], obj: Obj) -> Obj:
        """Return a part of the object; what equals a part of another object is kept once."""
        reduced = part(obj)
        metadata = reduced["metadata"]
        entries = [self._share(entry) for entry in metadata.get("managedFields", ())]
        reduced["metadata"] = {name: value for name, value in metadata.items() if name != "managedFields"}
        kept: Obj = _intern(reduced)
        if entries:
            kept["metadata"]["managedFields"] = entries
        return kept

    def _share(self, entry: Obj) -> Obj:
        if "manager" not in entry:
            return entry
        timeless = {name: value for name, value in entry.items() if name != "time"}
        if len(self._known) > _MOST_SHARED:
            self._known.clear()
        return self._known.setdefault(msgspec.json.encode(timeless), timeless)


def declare_partial_objects(store: Store) -> None:
    """Keep only the part of each object that decisions read."""
    shared = _SharedEntries()
    for resource, part in _PARTS.items():
        store.reduce(resource, functools.partial(shared.reduce, part))


def _intern(value: Any) -> Any:
    """Return JSON whose equal strings are one object: names, uids and the keys of fields stand in many objects."""
    if type(value) is str:
        return sys.intern(value) if len(value) <= _LONGEST_SHARED else value
    if type(value) is dict:
        return {sys.intern(name): _intern(child) for name, child in value.items()}
    return [_intern(child) for child in value] if type(value) is list else value


def _pick(obj: Mapping[str, Any], names: Collection[str]) -> Obj:
    return {name: obj[name] for name in names if name in obj}


def _unmanaged(obj: Obj) -> Obj:
    return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name != "managedFields"}}


def _managed_by_us(obj: Obj) -> Obj:
    """Return the object with what we applied, and without a copy of itself that kubectl put into it."""
    entries = [
        entry
        for entry in obj["metadata"].get("managedFields", ())
        if entry.get("manager") in {FIELD_MANAGER, LABEL_MANAGER} and entry.get("operation") == "Apply"
    ]
    metadata = {**obj["metadata"], "managedFields": entries}
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {
            name: value for name, value in metadata["annotations"].items() if name != _LAST_APPLIED
        }
    return {**obj, "metadata": metadata}


def _of_process(obj: Obj) -> Obj:
    """Return a MetalProcess with the time of its last report: a rejection counts from it."""
    kept = _managed_by_us(obj)
    kept["metadata"]["managedFields"] += [
        _pick(entry, ("subresource", "time"))
        for entry in obj["metadata"].get("managedFields", ())
        if entry.get("subresource") == "status"
    ]
    return kept


def _conditions(status: Obj, kinds: Collection[str], timed: Collection[str] = ()) -> list[Obj]:
    """Return the conditions of these types, with what explains them; those of type `timed` with their time."""
    fields = ("type", "status", "reason", "message")
    return [
        _pick(condition, (*fields, "lastTransitionTime") if condition["type"] in timed else fields)
        for condition in status.get("conditions") or ()
        if condition["type"] in kinds
    ]


def _of_pod(obj: Obj) -> Obj:
    metadata = {name: value for name, value in obj["metadata"].items() if name not in {"managedFields", "annotations"}}
    if annotations := _pick(obj["metadata"].get("annotations") or {}, _POD_ANNOTATIONS):
        metadata["annotations"] = annotations
    status = obj.get("status") or {}
    # A sidecar is an init container that runs on: a pod with one that has ended does not serve.
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    kept = {
        **_pick(status, ("phase", "podIPs")),
        "conditions": _conditions(status, _POD_CONDITIONS, timed=_POD_CONDITIONS),
        "containerStatuses": [
            _pick(container, ("name", "state", "lastState", "started", "ready")) for container in containers
        ],
    }
    spec = obj.get("spec") or {}
    requests: Obj = {
        kind: [
            _pick(container, ("restartPolicy",)) | {"resources": _requests_of(container)} for container in spec[kind]
        ]
        for kind in ("initContainers", "containers")
        if kind in spec
    }
    if in_all := _requests_of(spec):
        requests["resources"] = in_all
    # Where a pod may run is read of one that has no node yet.
    selects = () if spec.get("nodeName") else ("nodeSelector", "tolerations", "affinity")
    read = _pick(spec, (*_POD_SPEC, *selects))
    return {"metadata": metadata, "spec": read | requests | _claim_volumes(spec), "status": kept}


def _requests_of(spec: Obj) -> Obj:
    """Return the resources of a container, or those that a pod states for all of its containers, without limits."""
    return _pick(spec.get("resources") or {}, ("requests",))


def _claim_volumes(pod_spec: Obj) -> Obj:
    """Return the volumes of a pod's spec that are PersistentVolumeClaims: one that is mounted is not deleted."""
    claims = mounted_claims(pod_spec)
    return {"volumes": [{"persistentVolumeClaim": {"claimName": claim}} for claim in claims]} if claims else {}


def _of_job(obj: Obj) -> Obj:
    """Return a Job with its work, claims, pull secrets and end: Models keep that of each copy on a node as a record."""
    pod = obj["spec"]["template"]["spec"]
    containers = [_pick(container, ("name",)) for container in pod.get("containers") or ()]
    return {
        "metadata": _unmanaged(obj)["metadata"],
        "spec": {
            "template": {
                "spec": {"containers": containers, **_claim_volumes(pod), **_pick(pod, ("imagePullSecrets",))},
            },
        },
        "status": _pick(obj.get("status") or {}, ("conditions",)),
    }


def _of_deployment(obj: Obj) -> Obj:
    """Return a Deployment without what its stamp stands for."""
    kept = _managed_by_us(obj)
    metadata, status = kept["metadata"], obj.get("status") or {}
    # The fields of the metadata name the owner, so they would differ in each object.
    metadata["managedFields"] = [
        {**entry, "fieldsV1": _pick(entry.get("fieldsV1", {}), ("f:spec",))} for entry in metadata["managedFields"]
    ]
    read = (ANNOTATION_STAMP, ANNOTATION_INPUTS, ANNOTATION_UPDATE, ANNOTATION_SERVED)
    metadata["annotations"] = _pick(metadata.get("annotations") or {}, read)
    pod = obj["spec"]["template"]["spec"]
    named: Obj = obj["spec"]["template"].get("metadata") or {}
    mark = _pick(named.get("annotations") or {}, (POD_TEMPLATE,))
    containers = {
        kind: [_of_container(container) for container in pod[kind]]
        for kind in ("initContainers", "containers")
        if kind in pod
    }
    return {
        "metadata": metadata,
        "spec": {
            **_pick(obj["spec"], ("replicas", "strategy")),
            "template": {
                "metadata": _pick(named, ("labels",)) | ({"annotations": mark} if mark else {}),
                "spec": {**containers, **_claim_volumes(pod), **_pick(pod, _READ_OF_TEMPLATE)},
            },
        },
        "status": {
            # Until a pod is ready, nothing follows from the numbers.
            **(_pick(status, _REPLICA_COUNTS) if status.get("readyReplicas") else {}),
            "conditions": _conditions(status, _DEPLOYMENT_CONDITIONS),
        },
    }


def _of_claim(obj: Obj) -> Obj:
    """Return a ResourceClaim with its pod and its devices: those of the whole cluster are kept."""
    allocation = (obj.get("status") or {}).get("allocation") or {}
    names = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "deletionTimestamp")
    results = [
        _pick(result, ("driver", "pool", "device", "adminAccess"))
        for result in (allocation.get("devices") or {}).get("results") or ()
    ]
    kept: Obj = {"allocation": {"devices": {"results": results}}} if results else {}
    return {"metadata": _pick(obj["metadata"], names), "status": kept}


def _of_container(container: Obj) -> Obj:
    """Return what decides whether a later template restarts a pod."""
    kept = _pick(container, ("name", "resources", "restartPolicy"))
    arguments: list[str] = container.get("args") or []
    if DRAIN_OPTION in arguments:
        place = arguments.index(DRAIN_OPTION)
        kept["args"] = arguments[place : place + 2]
    return kept


def _applied_spec(obj: Obj) -> Obj:
    """Return an object with the fields of its spec that we applied, and without its status."""
    kept = _managed_by_us(obj)
    owned = {
        name for entry in kept["metadata"]["managedFields"] for name in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    spec = {name: value for name, value in obj.get("spec", {}).items() if f"f:{name}" in owned}
    return {**{name: value for name, value in kept.items() if name != "status"}, "spec": spec}


_PARTS: Final[Mapping[Resource, Callable[[Obj], Obj]]] = {
    PODS: _of_pod,
    DEPLOYMENTS: _of_deployment,
    **dict.fromkeys(
        (SERVICES, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS, RESOURCE_CLAIM_TEMPLATES), _applied_spec
    ),
    METAL_PROCESSES: _of_process,
    JOBS: _of_job,
    RESOURCE_CLAIMS: _of_claim,
    **dict.fromkeys((PVCS, ENDPOINT_SLICES, RESOURCE_SLICES, NODE_FITNESSES), _unmanaged),
    **dict.fromkeys((INFERENCE_SERVICES, MODELS, METAL_HOSTS, ACCELERATOR_POOLS, ROLES, ROLE_BINDINGS), _managed_by_us),
}
