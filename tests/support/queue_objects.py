"""Pods of services in the queue, in the form in which the API server sends them, for tests of the queue."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controller.placement.queue_places import find_own_place, format_place
from crds.meta import ENQUEUED_AT, LABEL_SERVICE, POD_TEMPLATE, QUEUE_GATE
from kube.client import Obj
from tests.support.api_objects import NAMESPACE, NOW, service

GPU = "nvidia.com/gpu"
BORN = NOW - timedelta(hours=10)
"""Creation of services."""


def timestamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def queued_service(name: str = "chat", created: datetime = BORN, **spec: Any) -> Obj:
    queued = service(name, **{"hardware": {"accelerator": "nvidia"}, **spec})
    queued["metadata"]["creationTimestamp"] = timestamp(created)
    # Its units wait until the controller has decided about the service.
    queued["status"] = queued["status"] or {"observedGeneration": queued["metadata"]["generation"]}
    return queued


def deployment_of(service: str = "chat", name: str = "", mark: str = "") -> Obj:
    """Return a Deployment of a service, with the mark of its template if it has one."""
    owner = {"kind": "InferenceService", "name": service, "uid": f"uid-{service}", "controller": True}
    name = name or service
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-deployment-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "ownerReferences": [owner],
        },
        "spec": {
            "replicas": 1,
            "template": {"metadata": {"annotations": {POD_TEMPLATE: mark} if mark else {}}, "spec": {"containers": []}},
        },
    }


def queue_pod(
    name: str,
    *,
    service: str = "chat",
    template: str = "aaa",
    gated: bool = True,
    node: str = "",
    created: datetime = NOW,
    deleted: datetime | None = None,
    devices: int = 1,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    version: int = 1,
) -> Obj:
    """Return a pod of the service's Deployment; one with a node was bound a minute after its creation."""
    requests = {"cpu": "1500m", "memory": "4Gi"} | ({GPU: str(devices)} if devices else {})
    metadata: Obj = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": timestamp(created),
        "labels": {LABEL_SERVICE: service, "pod-template-hash": template, **(labels or {})},
        "ownerReferences": [{"kind": "ReplicaSet", "name": f"{service}-{template}", "uid": "rs", "controller": True}],
        "annotations": dict(annotations or {}),
    }
    if deleted is not None:
        metadata["deletionTimestamp"] = timestamp(deleted)
    spec: Obj = {"containers": [{"name": "engine", "resources": {"requests": requests}}]}
    if gated:
        spec["schedulingGates"] = [{"name": QUEUE_GATE}]
    conditions = []
    if node:
        spec["nodeName"] = node
        bound = timestamp(created + timedelta(minutes=1))
        conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": bound}]
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "conditions": conditions}}


def pinned(pod: Obj, *nodes: str) -> Obj:
    """Return an admitted pod that the queue has pinned to a node by each term of its affinity."""
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]} for node in nodes]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    annotations = {ENQUEUED_AT: format_place(find_own_place(pod)), **pod["metadata"]["annotations"]}
    metadata = {**pod["metadata"], "annotations": annotations}
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "affinity": {"nodeAffinity": required}}}
