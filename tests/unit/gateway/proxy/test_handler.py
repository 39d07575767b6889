"""A request whose configuration changes while it runs, and the end of any."""

import asyncio
import gc
import json
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.server_connection import ServerConnection
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import Backend
from gateway.proxy.handler import handle_requests
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import InferenceRequest, SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.request_body import BodyBudget
from gateway.proxy.router import SingleServiceRouter
from gateway.proxy.service import Service
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    DONE_EVENT,
    fake_engine,
    make_service,
    post_chat,
    proxy_in_process,
    raw_engine,
)

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}],"model":"tiny"}\n\n'


async def hello(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def test_request_to_a_dead_engine_is_sent_to_its_replacement() -> None:
    class ReplacedMeanwhile(InFlight):
        def begin(self, uid: str, reserved: int = 0) -> None:
            super().begin(uid, reserved)
            tiny.config = structs.replace(dead, backends=(fresh,))

    in_flight = ReplacedMeanwhile(lambda _: None)
    dead = make_service(Backend(uid="dead", url="http://127.0.0.1:9"))
    tiny = Service(dead, in_flight)
    async with fake_engine(hello) as fresh, UpstreamPool() as pool, aiohttp.ClientSession() as client:
        shared = SharedResources(BodyBudget(), asyncio.Lock(), pool, HealthMonitor(), KeepAlive())
        table = ConnectionTable(ConnectionCaps(total=10, per_peer=10), sweep_seconds=1)
        listener = HttpListener(handle_requests(SingleServiceRouter(tiny), shared), table, ConnectionTimes())
        await listener.bind("127.0.0.1", 0)
        try:
            port = listener.sockets[0].getsockname()[1]
            async with post_chat(client, f"http://127.0.0.1:{port}") as response:
                assert (response.status, await response.text()) == (200, "hello")
        finally:
            listener.unbind()
            await listener.finish()


async def test_ended_request_does_not_wait_for_the_garbage_collector() -> None:
    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        if json.loads(await request.read()).get("n"):
            return web.Response(status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(DONE_EVENT)
        return response

    def remaining() -> int:
        return sum(isinstance(candidate, InferenceRequest) for candidate in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        async with (
            fake_engine(stream) as backend,
            proxy_in_process(backend) as (_, url),
            aiohttp.ClientSession() as client,
        ):
            for body in (CHAT, CHAT | {"n": 1}):
                async with client.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED) as response:
                    await response.read()
            await eventually(lambda: remaining() == 0)
    finally:
        gc.enable()


@pytest.mark.interpreted
async def test_last_piece_of_a_stream_is_sent_with_the_end(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    sent: list[bytes] = []

    def note(send: Callable[[ServerConnection, bytes], None]) -> Callable[[ServerConnection, bytes], None]:
        def noted(connection: ServerConnection, data: bytes) -> None:
            sent.append(data)
            send(connection, data)

        return noted

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + chunked(TOKEN))
        await first.wait()
        writer.write(chunked(DONE_EVENT) + b"0\r\n\r\n")

    def chunked(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    for name in ("begin_stream", "write"):
        monkeypatch.setattr(ServerConnection, name, note(getattr(ServerConnection, name)))
    first = asyncio.Event()
    async with (
        raw_engine(talk) as backend,
        proxy_in_process(backend) as (_, url),
        http.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True}, headers=AUTHORIZED) as response,
    ):
        assert (await response.content.readany()) == TOKEN
        first.set()
        assert await response.read() == DONE_EVENT
    assert sent[1:] == [chunked(DONE_EVENT) + b"0\r\n\r\n"], "each write wakes the client"
