"""The router of one machine in this process, as clients of Ollama's API reach it."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import ProxyConfig, RouterKey, RouterListener, ServiceListener
from gateway.proxy.listeners import Listeners


class RunningRouter:
    """A router, and a client without a library."""

    def __init__(self, listeners: Listeners, http: aiohttp.ClientSession, url: str) -> None:
        self.listeners = listeners
        self.http = http
        self.url = url

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the answer: an object, or a list of those of its lines."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        data = content and io.BytesIO(content)
        async with self.http.request(method, self.url + path, data=data, headers=headers) as response:
            text = await response.text()
            if response.content_type == "application/x-ndjson":
                return response.status, [json.loads(line) for line in text.splitlines()]
            is_json = response.content_type == "application/json" and text
            return response.status, json.loads(text) if is_json else text


@asynccontextmanager
async def serve_router(*services: ServiceListener, token: str = "") -> AsyncIterator[RunningRouter]:
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as http:
        listeners = Listeners(pool, tasks)
        keys = (RouterKey("app", hashlib.sha256(token.encode()).hexdigest()),) if token else ()
        await listeners.configure(ProxyConfig(services, router=RouterListener("127.0.0.1", 0, keys)))
        state = listeners.router_state()
        assert state
        yield RunningRouter(listeners, http, f"http://127.0.0.1:{state.port}")
        await listeners.drain(1)
