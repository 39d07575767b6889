"""Simulated nodes with devices, an engine that answers for their pods, and a user who applies services."""

from collections.abc import AsyncIterator

import pytest_asyncio
from aiohttp import web

from kube.client import Client
from tests.cluster.queue.queue_user import QueueUser
from tests.cluster.shared_controller import SharedController
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.simulated_nodes import SimulatedNodes

ENGINE_PORT = 8080


@pytest_asyncio.fixture
async def engine(controller: Process) -> AsyncIterator[None]:
    """The server behind the address that all simulated pods have."""
    del controller  # that of the test before may still have the port

    async def complete(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, ENGINE_PORT).start()
    yield
    await runner.cleanup()


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """A controller that evicts what has run for a second only."""
    return await shared_controller.lend("--min-run=1s", "--metrics-bind-address=0")


@pytest_asyncio.fixture
async def simulated(plane: ControlPlane, client: Client) -> AsyncIterator[SimulatedNodes]:
    """Nodes to which a test adds, and which it removes."""
    async with SimulatedNodes(plane, client).running() as nodes:
        yield nodes


@pytest_asyncio.fixture
async def user(
    plane: ControlPlane, client: Client, namespace: str, controller: Process, engine: None
) -> AsyncIterator[QueueUser]:
    """A user of one namespace, whose services are gone before the nodes are."""
    del engine
    user = QueueUser(plane, client, namespace, controller)
    await user.make_model()
    yield user
    await user.delete_services()
