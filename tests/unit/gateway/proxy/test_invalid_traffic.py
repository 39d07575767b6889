"""Clients and engines that break the rules, on purpose or not: each is answered, and harms no other."""

import asyncio
import contextlib
import io
import json

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.http.limits import ConnectionTimes
from gateway.proxy import listeners
from gateway.proxy.request_body import BodyBudget
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    post_chat,
    proxy_in_process,
    raw_engine,
    run_proxy,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret-token\r\n"


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await request.read())


async def send(url: str, *parts: bytes) -> bytes:
    """Send raw bytes, part by part, and return the first answer with its body."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
        return head + await reader.readexactly(int(length.partition(b":")[2]))
    finally:
        writer.transport.abort()


# Clients


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"X-Large: " + b"x" * 20_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: 1\r\n" % number for number in range(500)) + b"\r\n",
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\n\r\n[]",
        HEAD + b'Content-Length: 7\r\n\r\n{"a":1\xff',
        HEAD + b"Content-Length: 0\r\n\r\n",
    ],
)
async def test_invalid_request_is_refused_and_does_not_reach_the_engine(proxy: ProxyProcess, request_: bytes) -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend:
        answer = await send(await proxy.serve(backend), request_)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert (await proxy.client.state()).services[0].stats.in_flight == 0
    assert not never.arrived.is_set()


async def test_client_that_stalls_in_its_body_holds_no_slot(http: aiohttp.ClientSession) -> None:
    times = ConnectionTimes(body_pause_seconds=0.05, sweep_seconds=0.01)
    async with (
        fake_engine(echo) as backend,
        proxy_in_process(structs.replace(backend, concurrency=1), times=times) as (_, url),
    ):
        answer = await send(url, HEAD + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        async with post_chat(http, url) as response:
            assert response.status == 200


async def test_bodies_over_the_memory_budget_are_refused(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(listeners, "BodyBudget", lambda: BodyBudget(8000))
    arrived, answer = asyncio.Event(), asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        arrived.set()
        await answer.wait()
        return web.json_response({})

    async def ask(size_bytes: int) -> aiohttp.ClientResponse:
        body = {"prompt": "x" * size_bytes}
        async with http.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED) as response:
            await response.read()
            return response

    async with fake_engine(slow) as backend, proxy_in_process(backend) as (_, url):
        waits = asyncio.create_task(ask(3000))
        await arrived.wait()
        refused = await ask(3000)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert (await ask(5000)).status == 503
        small = asyncio.create_task(ask(10))
        answer.set()
        assert [(await task).status for task in (waits, small)] == [200, 200]
        assert (await ask(3000)).status == 200, "what is answered is held no more"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret-token\x01\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nmy secret prompt\r\n",
        HEAD + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nX: my secret \x00 prompt\r\n\r\n",
    ],
)
async def test_content_of_an_invalid_request_is_not_logged(
    tmp_path_factory: pytest.TempPathFactory, sent: bytes
) -> None:
    with run_proxy(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as proxy:
        reader, writer = await asyncio.open_connection(*(await proxy.serve()).removeprefix("http://").split(":"))
        writer.write(sent)
        answers = await reader.read()
        writer.close()
        assert b"HTTP/1.1 400 " in answers
        await eventually(lambda: any("invalid_request" in line for line in proxy.log))
        assert not any("secret" in line or "s3cret" in line for line in proxy.log)


# Engines


async def test_engine_that_responds_before_it_has_read_the_body_is_forwarded(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": "too much"}'
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()

    async with raw_engine(hasty) as backend:
        url = await proxy.serve(backend)
        large = CHAT | {"padding": "x" * (1 << 20)}
        body = io.BytesIO(json.dumps(large).encode())
        async with http.post(f"{url}/v1/completions", data=body, headers=AUTHORIZED) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (413, "too much")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"garbage\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"half":',
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"half":',
        b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_engine_that_breaks_off_or_sends_no_http_is_a_502(
    proxy: ProxyProcess, http: aiohttp.ClientSession, said: bytes
) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.transport.abort() if not said else writer.close()

    async with raw_engine(say) as backend, post_chat(http, await proxy.serve(backend)) as response:
        assert response.status == 502
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert "Location" not in response.headers


async def test_connection_to_an_engine_is_reused_but_soon_closed(http: aiohttp.ClientSession) -> None:
    connections = 0
    closed = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        closed.set()
        writer.close()

    async with raw_engine(engine) as backend, proxy_in_process(backend, idle_seconds=0.5) as (_, url):

        async def is_reused() -> bool:
            for _ in range(2):
                made = connections
                async with post_chat(http, url) as response:
                    assert await response.json() == {}
            return connections == made

        # A busy machine may take longer between two requests than the connection is kept.
        await eventually(is_reused)
        await asyncio.wait_for(closed.wait(), 60)
