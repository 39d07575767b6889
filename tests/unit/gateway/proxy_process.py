"""The proxy as its own process, and small upstreams that do what an engine does on a bad day."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from gateway.proxy.client import ProxyClient
from gateway.proxy.config import Backend, ProxyConfig, ServiceListener

TOKEN = "s3cret-token"
LAST = b"data: [DONE]\n\n"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ProxyProcess(NamedTuple):
    """A running proxy, its client, and the log lines it has written so far."""

    process: subprocess.Popen[str]
    client: ProxyClient
    log: list[str]

    async def serve(self, *backends: Backend) -> str:
        """Configure the one service `ns/tiny` and return the base URL of its listener."""
        state = await self.client.configure(ProxyConfig((service(*backends),)))
        assert state.services[0].error == ""
        return f"http://127.0.0.1:{state.services[0].port}"


def asks(http: aiohttp.ClientSession, url: str, **more: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Ask the service at `url` to chat, with its token."""
    return http.post(f"{url}/v1/chat/completions", json=CHAT, headers=AUTHORIZED | more.pop("headers", {}), **more)


def error_of(answer: object) -> str:
    """Return the code of an error in OpenAI's form, which has these fields and no other."""
    assert isinstance(answer, dict)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return str(answer["error"]["code"])


def service(*backends: Backend, name: str = "ns/tiny", port: int = 0) -> ServiceListener:
    return ServiceListener(name=name, address="127.0.0.1", port=port, token=TOKEN, backends=backends)


@contextmanager
def run(socket: Path, *arguments: str, soft_descriptors: int | None = None) -> Iterator[ProxyProcess]:
    """Start the proxy and wait until it says that it listens; killed at the end if it has not ended itself."""
    command = [sys.executable, "-m", "cli.main", "proxy", "--socket", str(socket), *arguments]
    if soft_descriptors:
        command = ["sh", "-c", f'ulimit -Sn {soft_descriptors}; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        log = [process.stderr.readline()]
        assert "proxy started" in log[0], log[0] + process.stderr.read()
        reader = Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            yield ProxyProcess(process, ProxyClient(socket), log)
        finally:
            process.kill()
            process.wait()
            reader.join()


@asynccontextmanager
async def upstream(handler: Handler, uid: str = "a") -> AsyncIterator[Backend]:
    """Serve `handler` as a backend; a client that hangs up cancels it, as in llama-server."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Backend(uid=uid, url=f"http://127.0.0.1:{site.port}")
    finally:
        await runner.cleanup()


class Gated:
    """An upstream that streams one chunk for each `release`, and tells when a request arrived or was cancelled."""

    def __init__(self, *, content_length: int | None = None) -> None:
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._content_length = content_length
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    def release(self, chunk: bytes) -> None:
        """Let the stream send `chunk`."""
        self._chunks.put_nowait(chunk)

    def end(self) -> None:
        """Let the stream end well."""
        self.release(LAST)
        self._chunks.put_nowait(None)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.content_length = self._content_length
        await response.prepare(request)
        self.arrived.set()
        try:
            while (chunk := await self._chunks.get()) is not None:
                if chunk == b"CUT":
                    assert request.transport
                    request.transport.close()
                    return response
                await response.write(chunk)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return response
