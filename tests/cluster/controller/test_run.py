"""The running controller on a real control plane: its watches, its leadership, and the report of a refused write."""

import asyncio
import contextlib
import functools
import gc
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controller.reconcile.kopf_feed import follow
from kube import credentials
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import NotFound
from kube.resources import LEASES, MODELS, SERVICES, Resource
from kube.store import Store
from kube.watch import Selection
from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

LOCAL = {"source": "file:///models/big.gguf", "memoryBytes": 5}
"""A Model that the controller reconciles without a Job."""
SELECTOR = "pomona-test=yes"


async def make(client: Client, resource: Resource, namespace: str, name: str, **body: Any) -> Obj:
    labels = {"pomona-test": "yes"} if resource == SERVICES else {}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return await client.create(resource, {"metadata": metadata, **body})


@contextlib.asynccontextmanager
async def following(client: Client, store: Store, login: Credentials) -> AsyncIterator[asyncio.Event]:
    synced = asyncio.Event()
    watched = (Selection(MODELS), Selection(SERVICES, label_selector=SELECTOR))
    task = asyncio.create_task(follow(client, store, watched, lambda: login, synced))
    yield synced
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_feed_follows_creation_change_and_deletion(plane: ControlPlane, client: Client, namespace: str) -> None:
    store = Store()
    await make(client, MODELS, namespace, "old", spec=LOCAL)
    async with following(client, store, credentials.load(plane.kubeconfig())) as synced:
        await synced.wait()
        assert store.get(MODELS, "old", namespace), "complete when it says so"
        await make(client, MODELS, namespace, "new", spec=LOCAL)
        await make(client, SERVICES, namespace, "selected", spec={"ports": [{"port": 1}]})
        await client.create(
            SERVICES, {"metadata": {"name": "foreign", "namespace": namespace}, "spec": {"ports": [{"port": 1}]}}
        )
        await eventually(lambda: store.get(MODELS, "new", namespace) and store.get(SERVICES, "selected", namespace))
        change = [{"op": "add", "path": "/spec/memoryBytes", "value": 6}]
        await client.patch_json(MODELS, "new", namespace, change)
        await eventually(lambda: (store.get(MODELS, "new", namespace) or {})["spec"]["memoryBytes"] == 6)
        await client.delete(MODELS, "old", namespace)
        await eventually(lambda: store.get(MODELS, "old", namespace) is None)
        assert store.get(SERVICES, "foreign", namespace) is None
        model = await client.get(MODELS, "new", namespace)
        assert "annotations" not in model["metadata"]
        assert "finalizers" not in model["metadata"]


async def test_feed_survives_an_outage_and_misses_nothing(plane: ControlPlane, client: Client, namespace: str) -> None:
    store = Store()
    async with following(client, store, credentials.load(plane.kubeconfig())) as synced:
        await synced.wait()
        await make(client, MODELS, namespace, "before", spec=LOCAL)
        await eventually(lambda: store.get(MODELS, "before", namespace))
        await plane.stop_apiserver()
        await plane.start_apiserver()
        await make(client, MODELS, namespace, "after", spec=LOCAL)
        await eventually(lambda: store.get(MODELS, "after", namespace))
    gc.collect()  # unclosed resources warn here, and not in a later test


async def reason(client: Client, namespace: str, name: str, kind: str = "Ready") -> str:
    model = await client.get(MODELS, name, namespace)
    reasons: dict[str, str] = {condition["type"]: condition["reason"] for condition in model["status"]["conditions"]}
    return reasons.get(kind, "")


async def test_a_standby_takes_over_when_the_leader_leaves(
    plane: ControlPlane, client: Client, namespace: str, controller: Process, tmp_path: Path
) -> None:
    await make(client, MODELS, namespace, "first", spec=LOCAL)
    await eventually(lambda: reason(client, namespace, "first"))
    (tmp_path / "standby").mkdir()
    standby = await members.controller(plane, tmp_path / "standby")
    standby.start()
    try:
        await eventually(lambda: "store_complete" in standby.tail(20))
        assert "leadership_acquired" not in standby.tail(20)
        await controller.stop()
        await make(client, MODELS, namespace, "second", spec=LOCAL)
        await eventually(lambda: reason(client, namespace, "second"))
        assert standby.running
    finally:
        await standby.stop()


async def test_metrics_and_probes_are_served(
    plane: ControlPlane, client: Client, namespace: str, tmp_path: Path
) -> None:
    await make(client, MODELS, namespace, "first", spec=LOCAL)
    ports = ("--metrics-bind-address=127.0.0.1:18080", "--health-probe-bind-address=127.0.0.1:18081")
    alone = await members.controller(plane, tmp_path, "--no-leader-elect", *ports)
    alone.start()
    try:
        await eventually(lambda: answer("http://127.0.0.1:18081/readyz", "ok"))
        assert await answer("http://127.0.0.1:18081/healthz", "ok")
        await eventually(lambda: reason(client, namespace, "first"))
        for line in (
            'leader_election_master_status{name="pomona-controller"} 1.0',
            'controller_runtime_reconcile_total{controller="Model",result="',
            'rest_client_requests_total{code="200",resource="models",verb="apply"}',
            'pomona_objects{kind="Model",phase="Ready"}',
        ):
            await eventually(functools.partial(answer, "http://127.0.0.1:18080/metrics", line))
        with pytest.raises(NotFound):
            await client.get(LEASES, "pomona-controller", members.CONTROLLER_NAMESPACE)
    finally:
        await alone.stop()


async def answer(url: str, text: str) -> bool:
    """Return whether the answer is 200 and has the text."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url) as response:
                return response.status == HTTPStatus.OK and text in await response.text()
        except aiohttp.ClientError:
            return False
