"""A Node object and its heartbeat, which the scheduler and the node controller read."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import LEASES, NODES
from tests.controlplane.kubelet.api import NodeAPI
from tests.controlplane.kubelet.pods import rfc3339

Obj = dict[str, Any]

LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS = 40
RENEW_SECONDS = 5.0
"""A kubelet takes 10 s; here a node is lost after 15 s, and a busy machine may run none of this for many of them."""
RETRY_SECONDS = 1.0
KUBELET_PORT = 10250
VERSION = "v1.35.4"

log = structlog.get_logger()


@dataclass(frozen=True)
class NodeSpec:
    """A node's report of itself: name, address, labels, and its allocatable resources as quantities."""

    name: str
    address: str
    capacity: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)


def conditions(now: datetime, since: datetime) -> list[Obj]:
    """Return the conditions of a node that is healthy since `since`."""
    times = {"lastHeartbeatTime": rfc3339(now), "lastTransitionTime": rfc3339(since)}
    healthy = [
        {"type": kind, "status": "False", "reason": f"KubeletHasNo{kind}", "message": "not measured", **times}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    return [*healthy, {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready", **times}]


def status(node: NodeSpec, now: datetime, since: datetime) -> Obj:
    """Return the Node's status."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    info = {
        "architecture": machine,
        "bootID": "",
        "containerRuntimeVersion": "process://1",
        "kernelVersion": os.uname().release,
        "kubeProxyVersion": "",
        "kubeletVersion": VERSION,
        "machineID": node.name,
        "operatingSystem": "linux",
        "osImage": "processes of this machine",
        "systemUUID": node.name,
    }
    return {
        "addresses": [{"type": "InternalIP", "address": node.address}, {"type": "Hostname", "address": node.name}],
        "allocatable": dict(node.capacity),
        "capacity": dict(node.capacity),
        "conditions": conditions(now, since),
        "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
        "nodeInfo": info,
    }


def manifest(node: NodeSpec, report: Obj) -> Obj:
    """Return the Node to create, with the status `report`."""
    machine = report["nodeInfo"]["architecture"]
    own = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": machine}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {**own, **node.labels}},
        "status": report,
    }


async def heartbeat(api: NodeAPI, node: NodeSpec) -> None:
    """Register the node, then write its status and renew its Lease every 5 s, for ever.

    The status is written each time, so that a node that was considered dead is Ready again at once.
    """
    since = datetime.now(UTC)
    while True:
        try:
            await _register(api, node, since)
            await _renew(api, node.name)
        except (ApiError, Unreachable) as error:
            log.warning("heartbeat failed", node=node.name, error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            await asyncio.sleep(RENEW_SECONDS)


async def _register(api: NodeAPI, node: NodeSpec, since: datetime) -> None:
    now = datetime.now(UTC)
    report = status(node, now, since)
    try:
        await api.patch_status(NODES, {"metadata": {"name": node.name}}, report)
    except NotFound:
        await api.client.create(NODES, manifest(node, report))
        log.info("node registered", node=node.name)


async def _renew(api: NodeAPI, name: str) -> None:
    spec = {
        "holderIdentity": name,
        "leaseDurationSeconds": LEASE_SECONDS,
        "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    try:
        await api.patch_merge(LEASES, name, LEASE_NAMESPACE, {"spec": spec})
    except NotFound:
        metadata = {"name": name, "namespace": LEASE_NAMESPACE}
        lease = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
        await api.client.create(LEASES, lease)
