"""Requests that make a backend suspect, and the reports of its health."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from gateway.proxy.config import BackendHealth, ProxyConfig
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    ProxyProcess,
)


@contextlib.asynccontextmanager
async def collected_reports(proxy: ProxyProcess) -> AsyncIterator["asyncio.Queue[BackendHealth]"]:
    """Collect what the control API reports, from an empty configuration on."""
    await proxy.client.configure(ProxyConfig())
    queue: asyncio.Queue[BackendHealth] = asyncio.Queue()

    async def collect() -> None:
        async for health in proxy.client.watch_health():
            queue.put_nowait(health)

    task = asyncio.create_task(collect())
    yield queue
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def next_report(reports: "asyncio.Queue[BackendHealth]") -> BackendHealth:
    return await asyncio.wait_for(reports.get(), 60)


async def ask(http: aiohttp.ClientSession, url: str, *prompts: str, path: str = "/v1/completions") -> int:
    status = 0
    for prompt in prompts:
        body = CHAT | {"prompt": prompt}
        async with http.post(f"{url}{path}", json=body, headers=AUTHORIZED) as response:
            status = response.status
            await response.read()
    return status


def answer_after(answers: asyncio.Event) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Return an engine's handler that answers while `answers` is set."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        await answers.wait()
        return web.json_response({"choices": []})

    return answer
