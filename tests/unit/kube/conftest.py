"""A server on loopback that simulates faults of network and HTTP, but no decision of an API server."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio
from aiohttp import web

from kube.client import Client, connect
from kube.credentials import Credentials, StaticToken

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(handler)` returns the base URL."""
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest_asyncio.fixture
async def client_of(serve: Serve) -> AsyncIterator[Callable[[Handler], Awaitable[Client]]]:
    """`await client_of(handler)` returns a client of a server with that handler."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler) -> Client:
            credentials = Credentials(await serve(handler), StaticToken("hunter2"))
            return await stack.enter_async_context(connect(credentials))

        yield start
