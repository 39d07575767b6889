"""A running proxy for tests, as a process or in this one, with a client and fake engines."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from gateway.http.limits import ConnectionTimes
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import Backend, ProxyConfig, ServiceListener, ServiceStats, Tls
from gateway.proxy.control_client import ProxyClient
from gateway.proxy.listeners import Listeners

TOKEN = "s3cret-token"
DONE_EVENT = b"data: [DONE]\n\n"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ProxyProcess(NamedTuple):
    """A running proxy, its client, and the log lines it has written so far."""

    process: subprocess.Popen[str]
    client: ProxyClient
    log: list[str]
    reader: Thread

    async def wait(self) -> int:
        """Return the exit code of a process that ends, once `log` is complete."""
        code = await asyncio.to_thread(self.process.wait, 60)
        await asyncio.to_thread(self.reader.join, 60)
        return code

    async def serve(self, *backends: Backend) -> str:
        """Configure the one service `ns/tiny` and return the base URL of its listener."""
        state = await self.client.configure(ProxyConfig((make_service(*backends),)))
        assert state.services[0].error == ""
        return f"http://127.0.0.1:{state.services[0].port}"

    async def stats(self) -> ServiceStats:
        """Return the counts of the first service."""
        return (await self.client.state()).services[0].stats


def post_chat(
    http: aiohttp.ClientSession, url: str, **more: Any
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a chat completion to the service at `url`, with its token."""
    return http.post(f"{url}/v1/chat/completions", json=CHAT, headers=AUTHORIZED | more.pop("headers", {}), **more)


def error_code(answer: object) -> str:
    """Return the code of an error in OpenAI's form, which has these fields and no other."""
    assert isinstance(answer, dict)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return str(answer["error"]["code"])


def make_service(*backends: Backend, name: str = "ns/tiny", port: int = 0) -> ServiceListener:
    return ServiceListener(name=name, address="127.0.0.1", port=port, token=TOKEN, backends=backends)


@contextmanager
def run_proxy(
    socket: Path, *arguments: str, module: str = "cli.main", soft_descriptors: int | None = None
) -> Iterator[ProxyProcess]:
    """Start the proxy and wait until it listens; kill it at the end if it still runs."""
    command = [sys.executable, "-m", module, "proxy", "--socket", str(socket), *arguments]
    if soft_descriptors:
        command = ["sh", "-c", f'ulimit -Sn {soft_descriptors}; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        log = [process.stderr.readline()]
        assert "proxy_started" in log[0], log[0] + process.stderr.read()
        reader = Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            yield ProxyProcess(process, ProxyClient(socket), log, reader)
        finally:
            process.kill()
            process.wait()
            reader.join()


@asynccontextmanager
async def fake_engine(handler: Handler, uid: str = "a", *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Backend]:
    """Serve `handler` as an engine; a client that hangs up cancels it, as in llama-server."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield Backend(uid=uid, url=f"{'https' if tls else 'http'}://127.0.0.1:{site.port}")
    finally:
        await site.stop()
        # A proxy that runs on may connect just now; the runner closes what the loop has accepted, some turns later.
        for _ in range(5):
            await asyncio.sleep(0)
        await runner.cleanup()


class GatedEngine:
    """An engine that streams one chunk for each `release`, with events for arrival and cancellation of a request."""

    def __init__(self, *, content_length: int | None = None, kind: str = "text/event-stream") -> None:
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._content_length = content_length
        self._kind = kind
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    def release(self, chunk: bytes) -> None:
        """Send `chunk`; b"CUT" breaks the stream off."""
        self._chunks.put_nowait(chunk)

    def end(self) -> None:
        """Complete the stream."""
        self.release(DONE_EVENT)
        self._chunks.put_nowait(None)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": self._kind})
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


@asynccontextmanager
async def raw_engine(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]],
) -> AsyncIterator[Backend]:
    """Serve `talk` as an engine that controls each byte; closes every connection at the end."""
    talks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks[asyncio.create_task(talk(reader, writer))] = writer

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        yield Backend("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for writer in talks.values():
        writer.transport.abort()
    await asyncio.gather(*talks)


@asynccontextmanager
async def proxy_in_process(
    *backends: Backend,
    tls: Tls | None = None,
    times: ConnectionTimes | None = None,
    idle_seconds: float = 2,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Listeners, str]]:
    """Run the proxy's listeners in this process, with the service `ns/tiny`; yield the listeners and the URL."""
    async with UpstreamPool(trust, idle_seconds=idle_seconds) as pool, asyncio.TaskGroup() as tasks:
        all_ = Listeners(pool, tasks, times)
        await all_.configure(ProxyConfig((make_service(*backends),), tls=tls))
        (state,) = all_.service_states()
        assert state.error == ""
        yield all_, f"{'https' if tls else 'http'}://127.0.0.1:{state.port}"
        await all_.drain(1)
