"""The nodes of volumes, as a real API server binds them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from controller.placement import bound_volumes
from controller.placement.bound_volumes import BoundVolumes
from controller.placement.cell_registry import CellRegistry
from controller.placement.nodes import declare_nodes
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Leading
from devices.vendors import VENDORS
from kube import credentials
from kube.client import Client, Obj
from kube.events import EventRecorder
from kube.resources import NODES, PERSISTENT_VOLUMES, PVCS
from kube.store import Store
from kube.transport import AiohttpTransport
from tests.controlplane.plane import ControlPlane
from tests.support.background import running
from tests.support.eventually import eventually

CLAIM = "weights"


def build_volumes(client: Client, now: list[float]) -> tuple[BoundVolumes, Leading]:
    store = Store()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    for name in ("a", "b"):
        metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": {"kubernetes.io/hostname": name}}
        store.put(NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "1"}}})
    cells = CellRegistry(store, VENDORS, lambda _host: True)
    recorder = EventRecorder(client, "pomona.dev/controller", "test")
    return BoundVolumes(store, cells, lambda: now[0]), Leading(client, store, recorder, lambda *_: None)


def pod(namespace: str) -> Obj:
    volumes = [{"persistentVolumeClaim": {"claimName": CLAIM}}]
    return {"metadata": {"name": "w", "namespace": namespace, "uid": "w"}, "spec": {"volumes": volumes}}


@pytest_asyncio.fixture
async def volume(client: Client, namespace: str) -> AsyncIterator[None]:
    """A volume of node b, reserved for the claim of the namespace."""
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["b"]}
    spec: dict[str, Any] = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "local": {"path": "/nowhere"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
        "claimRef": {"namespace": namespace, "name": CLAIM},
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "none",
    }
    await client.create(PERSISTENT_VOLUMES, {"metadata": {"name": f"volume-{namespace}"}, "spec": spec})
    yield
    await client.delete(PERSISTENT_VOLUMES, f"volume-{namespace}")


async def create_claim(client: Client, namespace: str) -> None:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "none",
    }
    await client.create(PVCS, {"metadata": {"namespace": namespace, "name": CLAIM}, "spec": spec})


@pytest.mark.usefixtures("volume")
async def test_claim_of_a_user_is_read_until_it_is_bound(client: Client, namespace: str) -> None:
    now = [0.0]
    volumes, leading = build_volumes(client, now)
    waiting = pod(namespace)
    async with running(volumes.run(leading)):
        await eventually(lambda: volumes.find_nodes(waiting) is None)
        await create_claim(client, namespace)

        def is_bound_to_b() -> bool:
            now[0] += bound_volumes.UNBOUND_SECONDS
            return volumes.find_nodes(waiting) == frozenset({"b"})

        await eventually(is_bound_to_b)


async def test_volume_that_may_not_be_read_is_left_to_the_scheduler(plane: ControlPlane, namespace: str) -> None:
    transport = AiohttpTransport(credentials.load(await plane.service_account_kubeconfig(namespace, "default")))
    volumes, leading = build_volumes(Client(transport), [0.0])
    with capture_logs() as logs:
        async with running(volumes.run(leading)):
            await eventually(lambda: volumes.find_nodes(pod(namespace)) is None)
    assert {log["event"] for log in logs} == {"volume_refused"}  # one for each try, and a busy machine has two
    await transport.close()
