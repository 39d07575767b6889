"""A client of a real API server, and one with faults injected."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kube import credentials
from kube.client import Client
from kube.transport import AiohttpTransport
from tests.controlplane.plane import ControlPlane
from tests.support.api_faults import FaultyTransport


@pytest_asyncio.fixture
async def transport(plane: ControlPlane) -> AsyncIterator[FaultyTransport]:
    """The API as cluster administrator, with the faults that a test plans."""
    transport = FaultyTransport(AiohttpTransport(credentials.load(plane.kubeconfig())))
    yield transport
    await transport.close()


@pytest.fixture
def faulty(transport: FaultyTransport) -> Client:
    """The client on `transport`."""
    return Client(transport)
