"""Fixtures of all tests of the proxy: a proxy process for each module, and an HTTP client."""

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.unit.gateway.proxy.running_proxy import ProxyProcess, run_proxy


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with run_proxy(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as process:
        yield process


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
