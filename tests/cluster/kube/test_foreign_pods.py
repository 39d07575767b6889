"""The sums of pods that are not ours follow the selectors of a real API server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from controller.placement.cell_registry import CellRegistry
from controller.placement.foreign_pods import ForeignPods
from controller.placement.nodes import declare_nodes
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from devices.vendors import VENDORS
from kube.client import Client, Obj
from kube.resources import NODES, PODS
from kube.store import Store
from kube.watch import Selection, reflect
from tests.support.background import running
from tests.support.eventually import eventually

NODE = "foreign-1"
GPU = "nvidia.com/gpu"
MANAGER = "pomona-test"


@pytest_asyncio.fixture
async def node(client: Client) -> AsyncIterator[str]:
    """A node with 8 devices and no kubelet, to which the scheduler binds nothing."""
    await client.create(NODES, {"metadata": {"name": NODE}, "spec": {"unschedulable": True}})
    devices = {GPU: "8", "cpu": "4", "pods": "110"}
    status = {"capacity": devices, "allocatable": devices}
    await client.apply(
        NODES, {"metadata": {"name": NODE}, "status": status}, field_manager=MANAGER, subresource="status"
    )
    yield NODE
    await client.delete(NODES, NODE)


class Pods:
    """Pods of one namespace, and what the registry counts of them."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self.foreign = ForeignPods()
        store = Store()
        declare_nodes(store, VENDORS)
        self.registry = CellRegistry(store, VENDORS, lambda _host: True, self.foreign)
        self._store = store

    def follow(self) -> Any:
        return running(self.foreign.follow(self._client), reflect(self._client, self._store, Selection(NODES)))

    def free(self) -> int | None:
        cell = self.registry.find_cell(f"node/{NODE}")
        return cell.free[GPU] if cell is not None and self.foreign.synced.is_set() else None

    async def shows(self, free: int) -> None:
        await eventually(lambda: self.free() == free)

    async def create(self, name: str, gpus: int, **spec: Any) -> None:
        devices = {GPU: str(gpus)}
        container = {"name": "c", "image": "none", "resources": {"limits": devices}}
        spec = {"nodeName": NODE, "containers": [container], "terminationGracePeriodSeconds": 0, **spec}
        await self._client.create(PODS, {"metadata": {"namespace": self._namespace, "name": name}, "spec": spec})

    async def label(self, name: str, value: str | None) -> None:
        patch = {"metadata": {"labels": {LABEL_MANAGED_BY: value}}}
        await self._client.patch_merge(PODS, name, self._namespace, patch, field_manager=MANAGER)

    async def end(self, name: str) -> None:
        pod: Obj = {"metadata": {"namespace": self._namespace, "name": name}, "status": {"phase": "Succeeded"}}
        await self._client.apply(PODS, pod, field_manager=MANAGER, subresource="status")

    async def delete(self, name: str) -> None:
        await self._client.delete(PODS, name, self._namespace)


@pytest.fixture
def pods(client: Client, namespace: str, node: str) -> Pods:
    assert node == NODE
    return Pods(client, namespace)


async def test_pod_counts_while_it_is_bound_has_not_ended_and_is_not_ours(pods: Pods) -> None:
    await pods.create("early", 1)
    async with pods.follow():
        await pods.shows(7)
        await pods.create("late", 2)
        await pods.shows(5)
        await pods.label("early", MANAGED_BY)
        await pods.shows(6)
        await pods.label("early", "helm")
        await pods.shows(5)
        await pods.create("unbound", 4, nodeName="", schedulingGates=[{"name": "example.com/wait"}])
        await pods.end("late")
        await pods.shows(7)
        await pods.delete("early")
        await pods.shows(8)
