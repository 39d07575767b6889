"""A gateway in this process, and a client."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.unit.gateway.cluster.running_gateway import RunningGateway, gateway_in_process


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with gateway_in_process() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session
