"""A test of the proxy is over when its connections are."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio


@pytest_asyncio.fixture(autouse=True)
async def ended_connections() -> AsyncIterator[None]:
    """Break off what a test left half open on purpose: the next test would get the warning of its sockets."""
    loop = asyncio.get_running_loop()
    yield
    for transport in list(loop._transports.values()):  # type: ignore[attr-defined] # asyncio tells of them in no other way
        transport.abort()
    await asyncio.sleep(0)  # for the callbacks that close the sockets
