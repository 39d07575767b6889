"""The sums of pods that are not ours stay right on a real API server, whatever becomes of a watch."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from controller.placement.cell_registry import CellRegistry
from controller.placement.foreign_pods import ForeignPods
from controller.placement.nodes import declare_nodes
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from devices.vendors import VENDORS
from kube import client as api
from kube import watch as reflection
from kube.client import Client, Obj
from kube.resources import NODES, PODS
from kube.store import Store
from kube.transport import Request, Response
from kube.watch import Selection, reflect
from tests.support.api_faults import Fault, FaultyTransport
from tests.support.background import running
from tests.support.eventually import eventually

NODE = "foreign-1"
GPU = "nvidia.com/gpu"
MANAGER = "pomona-test"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a reflection try again at once, and read lists in many pages."""
    monkeypatch.setattr(reflection, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(reflection, "LAST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(api, "PAGE", 1)


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

    def __init__(self, client: Client, watched: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._watched = watched
        self.foreign = ForeignPods()
        store = Store()
        declare_nodes(store, VENDORS)
        self.registry = CellRegistry(store, VENDORS, lambda _host: True, self.foreign)
        self._store = store

    def follow(self) -> Any:
        return running(self.foreign.follow(self._watched), reflect(self._client, self._store, Selection(NODES)))

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
def pods(client: Client, faulty: Client, namespace: str, node: str) -> Pods:
    assert node == NODE
    return Pods(client, faulty, namespace)


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


async def test_deletion_while_the_watch_is_cut_is_seen_when_it_is_back(pods: Pods, transport: FaultyTransport) -> None:
    await pods.create("one", 1)
    await pods.create("two", 2)
    refused = 0

    def refuse(_request: Request) -> Fault:
        nonlocal refused
        refused += 1
        return Fault.FAIL

    # Each watch is cut after the first event.
    transport.plan = lambda request: Fault.CUT if "watch" in request.query else None
    async with pods.follow():
        await pods.shows(5)
        transport.plan = refuse
        await pods.create("three", 3)
        await eventually(lambda: refused)
        await pods.delete("one")
        await pods.label("two", MANAGED_BY)
        lists = [request for request in transport.sent if "watch" not in request.query]
        transport.plan = lambda _request: None
        await pods.shows(5)
        assert lists == [request for request in transport.sent if "watch" not in request.query]


async def test_relist_drops_what_vanished(pods: Pods, transport: FaultyTransport) -> None:
    await pods.create("one", 1)
    await pods.create("two", 2)
    gone = Response(410, b'{"kind": "Status", "code": 410, "reason": "Expired"}')
    lists = 0

    def forget_version(request: Request) -> Response | None:
        """Refuse every watch, so that each try begins with a list."""
        nonlocal lists
        lists += "watch" not in request.query and "continue" not in request.query
        return gone if "watch" in request.query else None

    transport.plan = forget_version
    async with pods.follow():
        await pods.shows(5)
        await pods.delete("one")
        await pods.shows(6)
        await pods.end("two")
        await pods.shows(8)
        assert lists > 1
