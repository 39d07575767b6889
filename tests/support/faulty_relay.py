"""A relay in front of a real engine that counts requests, and fails as engines and networks do, when a test says so."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from tests.unit.gateway.proxy.running_proxy import fake_engine

_NOT_RELAYED = {"host", "content-length", "transfer-encoding", "connection", "authorization", "x-request-id"}


class Fault(NamedTuple):
    """The faults of one request, in this order; without any of these it is relayed."""

    status: int = 0
    """The engine is not asked, and this error is the answer."""
    headers: Mapping[str, str] = {}
    delay_seconds: float = 0
    """Time before the engine is asked."""
    cut_after_events: int | None = None
    """The connection is closed after so many events of the stream."""


SOUND = Fault()


class RelayedRequest(NamedTuple):
    """A POST that has come to the relay."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    came_at: float
    """By the clock of the event loop."""


class FaultyRelay:
    """The relay to the engine at `url`; each POST takes the first of `faults`, and `lasting_fault` if there is none."""

    def __init__(self, url: str) -> None:
        self.engine_url = url
        self.url = ""
        """Its own address, once it is served."""
        self.faults: list[Fault] = []
        self.lasting_fault = SOUND
        self.requests: list[RelayedRequest] = []
        self._session: aiohttp.ClientSession | None = None

    def paths(self) -> list[str]:
        """Return the paths of all POSTs since the last call."""
        paths = [request.path for request in self.requests]
        self.requests.clear()
        return paths

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["FaultyRelay"]:
        """Serve it at a free port."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._session,
            fake_engine(self._relay) as backend,
        ):
            self.url = backend.url
            yield self

    async def _relay(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._session is not None
        body = await request.read()
        fault = SOUND
        if request.method == "POST":
            now = asyncio.get_running_loop().time()
            self.requests.append(RelayedRequest(request.path, dict(request.headers), body, now))
            fault = self.faults.pop(0) if self.faults else self.lasting_fault
        if fault.status:
            error: dict[str, Any] = {"error": {"message": "a fault of the test", "type": "server_error"}}
            return web.json_response(error, status=fault.status, headers=fault.headers)
        await asyncio.sleep(fault.delay_seconds)

        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_RELAYED}
        async with self._session.request(
            request.method, self.engine_url + request.raw_path, data=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            events = 0
            async for line in answer.content:
                await response.write(line)
                events += line == b"\n"
                if events == fault.cut_after_events:
                    assert request.transport
                    request.transport.abort()
                    break
            return response
