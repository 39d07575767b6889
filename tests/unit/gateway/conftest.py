"""What the tests of the proxy have in common: a process of it for each module, and who asks it."""

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.unit.gateway.proxy_process import ProxyProcess, run


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with run(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as process:
        yield process


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
