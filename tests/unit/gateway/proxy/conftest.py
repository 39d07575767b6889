"""Fixtures of all tests of the proxy: a proxy process for each module, and an HTTP client."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from gateway.http import control_client
from gateway.proxy.config import BackendHealth
from tests.unit.gateway.proxy import impatient_proxy as impatient_proxy_module
from tests.unit.gateway.proxy.health_reports import collected_reports
from tests.unit.gateway.proxy.running_proxy import ProxyProcess, run_proxy


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with run_proxy(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as process:
        yield process


@pytest.fixture(autouse=True)
def patient_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the control API than an agent, which asks again: a busy machine may stop the proxy for 5 s."""
    monkeypatch.setattr(control_client, "_TIMEOUT_SECONDS", 60.0)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
async def reports(proxy: ProxyProcess) -> AsyncIterator["asyncio.Queue[BackendHealth]"]:
    async with collected_reports(proxy) as queue:
        yield queue


@pytest.fixture(scope="module")
def impatient_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    socket = tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock"
    with run_proxy(socket, module=impatient_proxy_module.__name__) as process:
        yield process
