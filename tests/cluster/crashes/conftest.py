"""Worlds in which controllers crash or are disturbed, and the node and the engine that all of them share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Final

import pytest
import pytest_asyncio
from aiohttp import web

from controller import run
from controller.gateway.token_shards import TokenShards
from controller.hosts import reconciler as hosts_reconciler
from controller.placement import admission
from controller.reconcile import feed
from kube import credentials
from kube.client import Client, connect
from kube.errors import Unreachable
from kube.resources import NODES
from kube.time import rfc3339
from kube.transport import AiohttpTransport, Transport
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.support.background import running
from tests.support.crash_scenarios import LEASE_SECONDS
from tests.support.crash_world import DEVICES, CrashWorld
from tests.support.crash_world import NODES as WORLD_NODES
from tests.support.namespaces import open_namespace
from tests.support.scoped_transport import ScopedTransport
from tests.support.simulated_nodes import GPU
from tests.support.watched_controller import follow_by_watches

ENGINE_PORT: Final = 8080
BEAT_SECONDS: Final = 5.0
"""Pause between two heartbeats of the node, which is lost after 15 s."""

MakeWorld = Callable[..., contextlib.AbstractAsyncContextManager[CrashWorld]]
"""`make_world(undisturbed, disturb)`: its states must be those of the first, and `disturb` wraps the connection."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read Leases as often as the short ones of these tests need, and write in the same order each time.

    An API server that holds up no write needs no long wait for late ones. The Secrets of the gateway are left out: all
    worlds would write the same ones.
    """

    async def copy_no_token(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(TokenShards, "run", copy_no_token)
    monkeypatch.setattr(hosts_reconciler, "READ_SECONDS", LEASE_SECONDS / 8)
    monkeypatch.setattr(admission, "LATE_WRITE_SECONDS", 4.0)
    monkeypatch.setattr(run, "WORKERS", 1)
    monkeypatch.setattr(feed, "follow", follow_by_watches)


@pytest_asyncio.fixture(autouse=True)
async def engine() -> AsyncIterator[None]:
    """The server behind the address that all simulated pods have."""

    async def complete(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, ENGINE_PORT).start()
    yield
    await runner.cleanup()


@pytest_asyncio.fixture(autouse=True)
async def nodes(plane: ControlPlane, client: Client) -> AsyncIterator[None]:
    """Keep the nodes of the worlds ready, which have no kubelet.

    The worlds bind their pods themselves: a scheduler that refuses some of them first would decide where copies are.
    """
    await plane.scheduler.stop()
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(DEVICES)}
    for name in WORLD_NODES:
        await client.create(NODES, {"metadata": {"name": name}})
        operation = {"op": "add", "path": "/status", "value": {"allocatable": amounts, "capacity": amounts}}
        await client.patch_json(NODES, name, None, [operation], subresource="status")

    async def beat() -> None:
        while True:
            ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": rfc3339(datetime.now(UTC))}
            operation = {"op": "add", "path": "/status/conditions", "value": [ready]}
            for name in WORLD_NODES:
                # The API server may be too busy for one heartbeat: the next one comes before the node is lost.
                with contextlib.suppress(Unreachable):
                    await client.patch_json(NODES, name, None, [operation], subresource="status")
            await asyncio.sleep(BEAT_SECONDS)

    try:
        async with running(beat()):
            yield
    finally:
        plane.scheduler.start()
        for name in WORLD_NODES:
            await client.delete(NODES, name)


@pytest_asyncio.fixture
async def make_world(plane: ControlPlane) -> MakeWorld:
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)

    @contextlib.asynccontextmanager
    async def make(
        undisturbed: CrashWorld | None, disturb: Callable[[Transport], Transport] | None = None
    ) -> AsyncIterator[CrashWorld]:
        async with AsyncExitStack() as stack:
            name = await stack.enter_async_context(open_namespace(plane, "crash"))
            client = await stack.enter_async_context(connect(credentials.load(plane.kubeconfig())))
            connection = AiohttpTransport(credentials.load(kubeconfig))
            stack.push_async_callback(connection.close)
            transport = disturb(connection) if disturb else connection
            ledgers = AiohttpTransport(credentials.load(plane.kubeconfig()))
            stack.push_async_callback(ledgers.close)
            yield CrashWorld(plane, client, name, ScopedTransport(transport, name, ledgers), undisturbed)

    return make
