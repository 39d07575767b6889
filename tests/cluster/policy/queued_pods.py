"""Pods that wait in the queue, made by the real controllers of Deployments and ReplicaSets."""

from collections.abc import Mapping
from typing import Any

from controller.models.jobs import CONTAINER_SECURITY, POD_SECURITY
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, QUEUE_GATE
from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, PODS, Resource
from tests.support.eventually import eventually

REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
SECOND_GATE = "bank.example/licence"
"""A gate of somebody else."""
OWN_LABELS = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: "one"}


def build_pod(labels: Mapping[str, str], *, gates: tuple[str, ...] = (QUEUE_GATE,), **metadata: Any) -> Obj:
    """Return a pod, or the template of one, that waits for `gates`."""
    container = {"name": "main", "image": "pomona-test", "securityContext": CONTAINER_SECURITY}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "schedulingGates": [{"name": gate} for gate in gates],
        "initContainers": [{**container, "name": "before"}],
        "containers": [container],
    }
    return {"metadata": {"labels": dict(labels), **metadata}, "spec": spec}


def build_workload(namespace: str, name: str, template: Obj) -> Obj:
    """Return a Deployment, or a ReplicaSet, of one pod."""
    metadata = {"namespace": namespace, "name": name, "labels": template["metadata"]["labels"]}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}}
    labels = template["metadata"]["labels"] | {"app": name}
    spec["template"] = {**template, "metadata": template["metadata"] | {"labels": labels}}
    return {"metadata": metadata, "spec": spec}


async def start_workload(client: Client, resource: Resource, namespace: str, name: str, template: Obj) -> Obj:
    """Create a Deployment or ReplicaSet, and return its pod."""
    await client.create(resource, build_workload(namespace, name, template))
    return await find_pod(client, namespace, name)


async def find_pod(client: Client, namespace: str, name: str, *, other_than: str = "") -> Obj:
    """Return the pod of a workload once there is one; `other_than` is the uid of one that it replaces."""

    async def found() -> Obj:
        pods = (await client.list(PODS, namespace, label_selector=f"app={name}")).items
        return next((pod for pod in pods if pod["metadata"]["uid"] != other_than), {})

    return await eventually(found)


async def failure_of(client: Client, namespace: str, name: str) -> str:
    """Return why a Deployment gets no pods; empty if no reason is known."""
    status = (await client.get(DEPLOYMENTS, name, namespace)).get("status") or {}
    conditions = status.get("conditions") or ()
    return next((str(condition["message"]) for condition in conditions if condition["type"] == "ReplicaFailure"), "")
