"""Objects of which the store keeps a part: whole ones take 45 KB of memory for a pod alone, most of it unread.

No decision may read a field that is dropped here. A change of dropped fields alone triggers no decision, because
triggers compare the parts. Of managedFields, our own entries are kept: they have what we applied, and in a MetalProcess
the time of the report. Objects that are only created and never applied keep none. Equal entries are kept once, and so
is each string.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from controller.reconcile.labels import LABEL_MANAGER
from controller.reconcile.plan import FIELD_MANAGER
from controller.reconcile.stamp import ANNOTATION_INPUTS, ANNOTATION_SERVED, ANNOTATION_STAMP, ANNOTATION_UPDATE
from crds.meta import DELETION_COST, DEVICE_NEED, ENQUEUED_AT, NOMINATED, POD_TEMPLATE, RESTORE_CONTAINER
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
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

Fields = Mapping[str, "Fields | None"]
"""Fields to keep, by name: None keeps a field whole, a mapping keeps these fields of it, or of each item of a list."""


def _only(*names: str, **nested: Fields) -> Fields:
    """Return fields that are kept whole, and fields of which a part is kept."""
    return {**dict.fromkeys(names), **nested}


_CONDITION: Final = _only("type", "status", "reason", "message", "lastTransitionTime")
_CLAIM_VOLUMES: Final = _only(persistentVolumeClaim=_only("claimName"))
"""Volumes of a pod that are PersistentVolumeClaims: a claim that is mounted is not deleted."""
_REQUESTS: Final = _only("restartPolicy", resources=_only("requests"))
_CONTAINER_STATUS: Final = _only("name", "state", "lastState", "started", "ready")
_POD_ANNOTATIONS: Final = _only(DELETION_COST, DEVICE_NEED, ENQUEUED_AT, NOMINATED, POD_TEMPLATE)
_POD_CONDITIONS: Final = frozenset({"Ready", "PodScheduled"})
_SELECTS_NODE: Final = ("nodeSelector", "tolerations", "affinity")
"""Fields of a pod's spec that are read of one that has no node yet."""
_POD_NAMES: Final = ("nodeName", "schedulingGates", "overhead", "priorityClassName", "resourceClaims", *_SELECTS_NODE)
_POD: Final = _only(
    "metadata",
    spec=_only(
        *_POD_NAMES,
        volumes=_CLAIM_VOLUMES,
        resources=_only("requests"),
        initContainers=_REQUESTS,
        containers=_REQUESTS,
    ),
    status=_only(
        "phase",
        "podIPs",
        conditions=_CONDITION,
        initContainerStatuses=_CONTAINER_STATUS,
        containerStatuses=_CONTAINER_STATUS,
    ),
)
_CONTAINER: Final = _only("name", "resources", "restartPolicy", "args")
"""Fields that decide whether a later template restarts a pod."""
_TEMPLATE_NAMES: Final = ("priorityClassName", "schedulingGates", "resourceClaims", GRACE_FIELD)
_TEMPLATE_SPEC: Final = _only(
    *_TEMPLATE_NAMES, volumes=_CLAIM_VOLUMES, initContainers=_CONTAINER, containers=_CONTAINER
)
_TEMPLATE: Final = _only(metadata=_only("labels", annotations=_only(POD_TEMPLATE)), spec=_TEMPLATE_SPEC)
_DEPLOYMENT: Final = _only(
    "metadata",
    spec=_only("replicas", "strategy", template=_TEMPLATE),
    status=_only("observedGeneration", "replicas", "updatedReplicas", "readyReplicas", conditions=_CONDITION),
)
"""Fields to keep of a Deployment; its stamp covers all others."""
_DEPLOYMENT_ANNOTATIONS: Final = _only(ANNOTATION_STAMP, ANNOTATION_INPUTS, ANNOTATION_UPDATE, ANNOTATION_SERVED)
_JOB_POD: Final = _only("imagePullSecrets", containers=_only("name"), volumes=_CLAIM_VOLUMES)
_JOB: Final = _only("metadata", spec=_only(template=_only(spec=_JOB_POD)), status=_only("conditions"))
"""Models keep the Job of each copy on a node as a record."""
_DEVICES: Final = _only(results=_only("driver", "pool", "device", "adminAccess"))
_CLAIM_NAMES: Final = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "deletionTimestamp")
_RESOURCE_CLAIM: Final = _only(metadata=_only(*_CLAIM_NAMES), status=_only(allocation=_only(devices=_DEVICES)))
"""Those of the whole cluster are kept, so nothing of them that others make long."""


class _SharedEntries:
    """The entries of managedFields that many objects have in common."""

    def __init__(self) -> None:
        self._shared: dict[bytes, Obj] = {}

    def reduce(self, part: Callable[[Obj], Obj], obj: Obj) -> Obj:
        """Return `part(obj)`, the part to keep, in little memory: what equals a part of another object is shared.

        This holds for short strings, and for entries of managedFields, which are the same in many objects.
        """
        reduced = part(obj)
        metadata = reduced["metadata"]
        entries = [self._share(entry) for entry in metadata.get("managedFields", ())]
        reduced["metadata"] = {name: value for name, value in metadata.items() if name != "managedFields"}
        # The entries are left out here: they are shared whole, and not string by string.
        kept: Obj = _intern(reduced)
        if entries:
            kept["metadata"]["managedFields"] = entries
        return kept

    def _share(self, entry: Obj) -> Obj:
        """Return an entry without its time, as the one object in memory for all equal ones."""
        if "manager" not in entry:  # of a MetalProcess: the time of its last report, which is read
            return entry
        timeless = {name: value for name, value in entry.items() if name != "time"}
        if len(self._shared) > _MOST_SHARED:
            self._shared.clear()  # begin anew: what is still in use is shared again
        return self._shared.setdefault(msgspec.json.encode(timeless), timeless)


def declare_partial_objects(store: Store) -> None:
    """Keep only the part of each object that decisions read."""
    shared = _SharedEntries()
    for resource, part in _PARTS.items():
        store.set_reduction(resource, functools.partial(shared.reduce, part))


def _intern(value: Any) -> Any:
    """Return the same JSON, in which equal strings are one object in memory."""
    if type(value) is str:
        return sys.intern(value) if len(value) <= _LONGEST_SHARED else value
    if type(value) is dict:
        return {sys.intern(name): _intern(child) for name, child in value.items()}
    if type(value) is list:
        return [_intern(child) for child in value]
    return value


def _keep(value: Any, fields: Fields | None) -> Any:
    """Return the fields of a JSON value that are kept, all if `fields` is None; of a list those of each item.

    An item without any is left out.
    """
    if fields is None or value is None:
        return value
    if isinstance(value, list):
        return [kept for item in value if (kept := _keep(item, fields))]
    return {name: _keep(value[name], nested) for name, nested in fields.items() if name in value}


def _drop_managed_fields(obj: Obj) -> Obj:
    return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name != "managedFields"}}


def _keep_our_managed_fields(obj: Obj) -> Obj:
    """Return the object with our entries of managedFields only, and without the copy of itself that kubectl adds."""
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


def _reduce_process(obj: Obj) -> Obj:
    """Return a MetalProcess with our entries of managedFields, and of those about its status the time.

    That is the time of its agent's last report, from which the back-off after a rejection counts.
    """
    kept = _keep_our_managed_fields(obj)
    entries = [entry for entry in obj["metadata"].get("managedFields", ()) if entry.get("subresource") == "status"]
    # Of each entry about the status, only these two fields.
    kept["metadata"]["managedFields"] += _keep(entries, _only("subresource", "time"))
    return kept


def _reduce_pod(obj: Obj) -> Obj:
    """Return a pod with the fields that decisions read."""
    kept: Obj = {"spec": {}, "status": {}, **_keep(_drop_managed_fields(obj), _POD)}
    spec, status = kept["spec"] or {}, kept["status"] or {}
    if spec.get("nodeName"):  # the fields that select a node are not read any more
        spec = {name: value for name, value in spec.items() if name not in _SELECTS_NODE}

    # A sidecar is an init container that runs on: a pod with one that has ended does not serve. So the statuses of init
    # containers are kept among those of the containers, but for one that does its work first.
    init = status.pop("initContainerStatuses", None) or ()
    init = [item for item in init if item["name"] != RESTORE_CONTAINER or "waiting" in item.get("state", {})]
    containers = [*init, *(status.get("containerStatuses") or ())]
    conditions = [condition for condition in status.get("conditions") or () if condition["type"] in _POD_CONDITIONS]
    status = {**status, "conditions": conditions, "containerStatuses": containers}
    return {"metadata": _keep_annotations(kept["metadata"], _POD_ANNOTATIONS), "spec": spec, "status": status}


def _keep_annotations(metadata: Obj, names: Fields) -> Obj:
    """Return metadata with these annotations and no others."""
    kept = {name: value for name, value in metadata.items() if name != "annotations"}
    if annotations := _keep(metadata.get("annotations") or {}, names):
        kept["annotations"] = annotations
    return kept


def _reduce_deployment(obj: Obj) -> Obj:
    """Return a new object: the Deployment with the fields that decisions read.

    Its stamp, the digest of what we applied, stands for all others.
    """
    kept: Obj = _keep(_keep_our_managed_fields(obj), _DEPLOYMENT)

    # Metadata. In managedFields, only entries about the spec are equal in all Deployments, and can be shared.
    kept["metadata"] = metadata = _keep_annotations(kept["metadata"], _DEPLOYMENT_ANNOTATIONS)
    metadata["managedFields"] = [
        {**entry, "fieldsV1": _keep(entry.get("fieldsV1", {}), _only("f:spec"))} for entry in metadata["managedFields"]
    ]

    # Status. Until a pod is ready, no decision depends on the numbers of replicas.
    status = kept.get("status") or {}
    conditions = [condition for condition in status.get("conditions") or () if condition["type"] == "ReplicaFailure"]
    kept_status = status if status.get("readyReplicas") else {}
    kept["status"] = {**kept_status, "conditions": conditions}

    # Containers: of all arguments, only the drain option and its value.
    pod_spec = kept["spec"]["template"]["spec"]
    for container in (*(pod_spec.get("initContainers") or ()), *(pod_spec.get("containers") or ())):
        arguments: list[str] = container.pop("args", None) or []
        if DRAIN_OPTION in arguments:
            option_index = arguments.index(DRAIN_OPTION)
            container["args"] = arguments[option_index : option_index + 2]
    return kept


def _keep_applied_spec(obj: Obj) -> Obj:
    """Return an object with those top-level fields of its spec that we applied, and without its status."""
    kept = _keep_our_managed_fields(obj)
    applied_names = {
        name for entry in kept["metadata"]["managedFields"] for name in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    spec = {name: value for name, value in obj.get("spec", {}).items() if f"f:{name}" in applied_names}
    return {**{name: value for name, value in kept.items() if name != "status"}, "spec": spec}


_PARTS: Final[Mapping[Resource, Callable[[Obj], Obj]]] = {
    PODS: _reduce_pod,
    DEPLOYMENTS: _reduce_deployment,
    **dict.fromkeys(
        (SERVICES, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS, RESOURCE_CLAIM_TEMPLATES), _keep_applied_spec
    ),
    METAL_PROCESSES: _reduce_process,
    JOBS: lambda job: _keep(_drop_managed_fields(job), _JOB),
    RESOURCE_CLAIMS: lambda claim: _keep(_drop_managed_fields(claim), _RESOURCE_CLAIM),
    **dict.fromkeys((PVCS, ENDPOINT_SLICES, RESOURCE_SLICES, NODE_FITNESSES), _drop_managed_fields),
    **dict.fromkeys(
        (INFERENCE_SERVICES, MODELS, METAL_HOSTS, ACCELERATOR_POOLS, GATEWAY_KEYS, MODEL_ROUTES, ROLES, ROLE_BINDINGS),
        _keep_our_managed_fields,
    ),
}
