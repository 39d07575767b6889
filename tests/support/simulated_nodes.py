"""Nodes with devices that run nothing: the API server, the scheduler and all controllers are real, kubelets are not.

Each pod that the real scheduler binds to such a node is reported as running and ready; one that is being deleted stays
until the test lets it end. Every state of the cluster is checked against the devices that a node has.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import NODES, PODS, ObjectKey, Resource, object_key
from kube.store import Store
from kube.time import rfc3339
from kube.watch import Selection, reflect
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane, NotThereError
from tests.support.background import running
from tests.support.eventually import eventually

GPU: Final = "nvidia.com/gpu"
BEAT_SECONDS: Final = 5.0
"""Pause between two heartbeats of a node, which is lost after 15 s."""
_CONDITIONS: Final = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
"""Conditions that are True of a pod that runs."""
_SINCE: Final = "2026-01-01T00:00:00Z"


class SimulatedNodes:
    """The nodes of one test."""

    def __init__(self, plane: ControlPlane, client: Client) -> None:
        self._plane, self._client = plane, client
        self._names: set[str] = set()
        self._ends = asyncio.Event()
        self._ends.set()
        self._store, self._changed = Store(), asyncio.Event()
        self._store.subscribe(self._follow)
        self._devices: dict[str, int] = {}
        self.booked: defaultdict[str, dict[ObjectKey, int]] = defaultdict(dict)
        """Devices of the pods that each node has now."""
        self.double_bookings: list[str] = []
        """Every moment at which a node had more devices given away than it has."""
        self.bound: list[ObjectKey] = []
        """Pods in the order in which the scheduler bound them."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["SimulatedNodes"]:
        """Keep the nodes ready and report their pods until the context ends, which deletes the nodes."""
        try:
            async with running(self._beat(), self._run_pods(), reflect(self._client, self._store, Selection(PODS))):
                yield self
        finally:
            for name in self._names:
                await self._plane.request("DELETE", NODES.path(None, name), accept={404})
        assert self.double_bookings == []

    async def add(self, name: str, devices: int = 8, *, memory: str = "512Gi", **labels: str) -> None:
        """Make a node that is ready."""
        self._devices[name] = devices
        product = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
        await self._client.create(NODES, {"metadata": {"name": name, "labels": product | labels}})
        amounts = {"cpu": "64", "memory": memory, "ephemeral-storage": "1Ti", "pods": "110", GPU: str(devices)}
        status = {"allocatable": amounts, "capacity": amounts, "conditions": [_ready()]}
        operations = [{"op": "add", "path": "/status", "value": status}]
        await self._client.patch_json(NODES, name, None, operations, subresource="status")
        self._names.add(name)

        async def accepts_pods() -> bool:
            return "taints" not in (await self._client.get(NODES, name))["spec"]

        await eventually(accepts_pods)

    async def remove(self, name: str) -> None:
        """Delete a node, as an autoscaler does."""
        self._names.discard(name)
        await self._client.delete(NODES, name)

    async def edit(self, name: str, *, spec: Obj) -> None:
        """Edit the spec of a node, as an administrator does."""
        await self._client.patch_merge(NODES, name, None, {"spec": spec}, field_manager="administrator")

    def hold_ends(self) -> None:
        """Hold the end of pods, as if each still answered its last requests."""
        self._ends.clear()

    def let_end(self) -> None:
        """End the pods that are being deleted, now and from now on."""
        self._ends.set()
        self._changed.set()

    def _follow(self, _resource: Resource, old: Obj | None, new: Obj | None) -> None:
        self._changed.set()
        pod = new or old
        assert pod is not None
        key, node = object_key(pod), pod["spec"].get("nodeName", "")
        if node not in self._devices:
            return
        if new is None or new.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
            self.booked[node].pop(key, None)
            return
        if key in self.booked[node]:
            return  # what runs may need more than is left after a device has vanished
        self.bound.append(key)
        self.booked[node][key] = count_devices(new)
        if sum(self.booked[node].values()) > self._devices[node]:
            self.double_bookings.append(f"{node}: {self.booked[node]}")

    async def _beat(self) -> None:
        while True:
            operation = {"op": "add", "path": "/status/conditions", "value": [_ready()]}
            for name in [*self._names]:
                with contextlib.suppress(Unreachable, ApiError):
                    await self._client.patch_json(NODES, name, None, [operation], subresource="status")
            await asyncio.sleep(BEAT_SECONDS)

    async def _run_pods(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for pod in self._store.list(PODS):
                if pod["spec"].get("nodeName") in self._devices:
                    with contextlib.suppress(ApiError, NotThereError):  # deleted or changed meanwhile
                        await self._report(pod)

    async def _report(self, pod: Obj) -> None:
        metadata = pod["metadata"]
        path = PODS.path(metadata["namespace"], metadata["name"])
        if "deletionTimestamp" in metadata:
            if self._ends.is_set():
                await self._plane.request("DELETE", path, {"gracePeriodSeconds": 0}, accept={404})
            return
        if pod["status"].get("phase") != "Pending":
            return
        container = pod["spec"]["containers"][0]["name"]
        running_since = {"running": {"startedAt": _SINCE}}
        status = {
            "phase": "Running",
            "podIP": ADDRESS,
            "podIPs": [{"ip": ADDRESS}],
            "conditions": [
                *(
                    condition
                    for condition in pod["status"].get("conditions", ())
                    if condition["type"] == "PodScheduled"
                ),
                *({"type": kind, "status": "True"} for kind in _CONDITIONS if kind != "PodScheduled"),
            ],
            "containerStatuses": [
                {
                    "name": container,
                    "image": "simulated",
                    "imageID": "",
                    "ready": True,
                    "started": True,
                    "restartCount": 0,
                    "state": running_since,
                }
            ],
        }
        operations = [{"op": "replace", "path": "/status", "value": status}]
        await self._client.patch_json(PODS, metadata["name"], metadata["namespace"], operations, subresource="status")


def count_devices(pod: Obj) -> int:
    """Return the GPUs that a pod requests: an engine is a sidecar, and so among the init containers."""
    spec = pod["spec"]
    containers = (*spec.get("initContainers", ()), *spec.get("containers", ()))
    return sum(int(container.get("resources", {}).get("requests", {}).get(GPU, 0)) for container in containers)


def _ready() -> Obj:
    now = rfc3339(datetime.now(UTC))
    return {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": _SINCE}
