"""Requests through the real process: authorized, forwarded unchanged, streamed, and sent to the right backend."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.config import Backend
from gateway.proxy.inference_request import BODY_LIMIT_BYTES
from tests.support import llama_server
from tests.support.tiny_models import tiny_gguf
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    post_chat,
)


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    body = await request.read()
    seen = {"method": request.method, "target": request.raw_path, "headers": dict(request.headers)}
    return web.json_response(
        seen | {"body": body.decode()}, headers={"Connection": "X-Hop", "X-Hop": "1", "X-Kept": "2"}
    )


# Real tokens


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    model = tmp_path_factory.mktemp("model") / "endless.gguf"
    tiny_gguf.write(model, loop=True, n_ctx=1 << 17)
    with llama_server.serve(model, context_length=1 << 17) as server:
        yield Backend(uid="engine", url=server.url)


async def test_completion_of_a_real_engine_is_forwarded(
    proxy: ProxyProcess, http: aiohttp.ClientSession, engine: Backend
) -> None:
    url = await proxy.serve(engine)
    async with http.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 3}, headers=AUTHORIZED) as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["choices"][0]["message"]["content"] == "Hello from a"
    assert answer["usage"]["completion_tokens"] == 3


async def test_stream_of_a_real_engine_is_forwarded_unchanged(
    proxy: ProxyProcess, http: aiohttp.ClientSession, engine: Backend
) -> None:
    async def words(url: str) -> list[str]:
        body = CHAT | {"max_tokens": 20, "stream": True}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
            assert response.content_type == "text/event-stream"
            events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]\n"
        return [choice["delta"].get("content") for event in events for choice in json.loads(event)["choices"]]

    assert await words(await proxy.serve(engine)) == await words(engine.url)


async def test_client_that_hangs_up_stops_a_real_engine(
    proxy: ProxyProcess, http: aiohttp.ClientSession, engine: Backend
) -> None:
    url = await proxy.serve(engine)
    endless = CHAT | {"max_tokens": 1 << 17, "stream": True}
    async with http.post(f"{url}/v1/chat/completions", json=endless, headers=AUTHORIZED) as response:
        await response.content.readline()
        response.close()
    # The only slot is free again long before the endless answer could have ended.
    short = CHAT | {"max_tokens": 1}
    async with (
        asyncio.timeout(10),
        http.post(f"{url}/v1/chat/completions", json=short, headers=AUTHORIZED) as response,
    ):
        assert response.status == 200
    assert await proxy.client.wait_idle("engine", 20)


# Authorization and forwarded headers


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer wrong", "Bearer ", "Basic s3cret-token", "s3cret-token", "Bearer s3cret-tokenn", "ü"],
)
async def test_request_without_the_token_does_not_reach_the_engine(
    proxy: ProxyProcess, http: aiohttp.ClientSession, authorization: str | None
) -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend:
        url = await proxy.serve(backend)
        headers = {"Authorization": authorization} if authorization else {}
        async with http.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert error_code(await response.json()) == "invalid_api_key"
    assert not never.arrived.is_set()


async def test_health_needs_no_token_and_reports_a_missing_backend(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(echo) as backend, http.get(f"{await proxy.serve(backend)}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    async with http.get(f"{await proxy.serve()}/health") as response:
        assert response.status == 503


async def test_request_is_forwarded_without_connection_headers_and_token(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    headers = {"X-Mine": "1", "Connection": "X-Secret-Hop", "X-Secret-Hop": "1", "Cookie": "a=b", "X-Api-Key": "mine"}
    async with fake_engine(echo) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url, headers=headers) as response:
            seen = await response.json()
            assert response.headers["X-Kept"] == "2"
            assert "X-Hop" not in response.headers
    assert (seen["method"], seen["target"], json.loads(seen["body"])) == ("POST", "/v1/chat/completions", CHAT)
    assert seen["headers"]["X-Mine"] == "1"
    assert "Cookie" not in seen["headers"]
    assert not {"Authorization", "X-Secret-Hop", "X-Api-Key"} & set(seen["headers"])
    assert seen["headers"]["Host"] == backend.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", b"200"), ("/v1/../secret", b"404"), ("//v1/completions", b"404")]
)
async def test_absolute_request_target_does_not_reach_another_host(
    proxy: ProxyProcess, path: str, status: bytes
) -> None:
    async with fake_engine(echo) as backend:
        url = await proxy.serve(backend)
        head = f"POST http://10.0.0.1{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
        answer = await send_raw(url, f"{head}Authorization: Bearer s3cret-token\r\n\r\n{{}}".encode())
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_expect_100_continue_is_answered_only_with_the_token(proxy: ProxyProcess) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
    async with fake_engine(echo) as backend:
        url = await proxy.serve(backend)
        assert (await send_raw(url, head + b"\r\n")).startswith(b"HTTP/1.1 401 ")
        allowed = await send_raw(url, head + b"Authorization: Bearer s3cret-token\r\n\r\n")
    assert allowed == b"HTTP/1.1 100 Continue\r\n\r\n"


async def send_raw(url: str, request: bytes) -> bytes:
    """Send raw bytes and return the head of the first answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head


async def test_body_with_a_content_length_over_the_limit_is_refused_unread(proxy: ProxyProcess) -> None:
    async with fake_engine(echo_unlimited) as backend:
        url = await proxy.serve(backend)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_LIMIT_BYTES + 1}\r\n"
        answer = await send_raw(url, f"{head}Authorization: Bearer s3cret-token\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_chunked_body_over_the_limit_is_refused(proxy: ProxyProcess) -> None:
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    async with fake_engine(echo_unlimited) as backend:
        host, port = (await proxy.serve(backend)).removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        writer.write(head + b"Authorization: Bearer s3cret-token\r\n\r\n")
        for _ in range(BODY_LIMIT_BYTES // (1 << 20) + 1):
            writer.write(chunk)
            await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_large_body_reaches_the_engine_with_another_model(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def measure(request: web.BaseRequest) -> web.StreamResponse:
        body = b"".join([piece async for piece in request.content.iter_any()])
        return web.json_response({"bytes": len(body), "length": request.content_length, "begin": body[:20].decode()})

    padding = "x" * (8 << 20)
    async with fake_engine(measure) as backend:
        url = await proxy.serve(structs.replace(backend, model="weights"))
        body = json.dumps({"adapters": "/etc", "model": "tiny", "prompt": padding}).encode()
        async with http.post(f"{url}/v1/completions", data=io.BytesIO(body), headers=AUTHORIZED) as response:
            seen = await response.json()
    size_bytes = len('{"model":"weights","prompt": ""}') + len(padding)
    assert seen == {"bytes": size_bytes, "length": size_bytes, "begin": '{"model":"weights","'}


async def test_long_json_response_is_passed_on_before_it_has_ended(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    ends = asyncio.Event()
    begin, data, end = b'{"model": "weights", "data": [', b"0.5, " * (1 << 18), b'1], "usage": {"prompt_tokens": 7}}'

    async def embed(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(begin + data)
        await ends.wait()
        await response.write(end)
        return response

    async with fake_engine(embed) as backend:
        url = await proxy.serve(backend)
        before = (await proxy.stats()).tokens_in
        body = {"model": "tiny", "input": "a"}
        async with http.post(f"{url}/v1/embeddings", json=body, headers=AUTHORIZED) as response:
            received = await response.content.readexactly(1 << 20)
            ends.set()
            received += await response.read()
    assert received == (begin + data + end).replace(b"weights", b"tiny")
    assert (await proxy.stats()).tokens_in == before + 7


async def test_image_at_a_url_is_refused(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    never = GatedEngine()
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    async with fake_engine(never) as backend:
        url = await proxy.serve(backend)
        body = {"messages": [{"role": "user", "content": [image]}]}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
            assert response.status == 400
            assert error_code(await response.json()) == "remote_media"
    assert not never.arrived.is_set()


async def echo_unlimited(request: web.BaseRequest) -> web.StreamResponse:
    async for _ in request.content.iter_any():
        pass
    return web.Response()


# Streams


async def test_stream_is_forwarded_chunk_by_chunk(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as response:  # only the head has arrived
            for chunk in (b"data: one\n\n", b"data: two\n\n"):
                gated.release(chunk)
                assert await response.content.readany() == chunk
            gated.end()
            assert await response.content.read() == DONE_EVENT


@pytest.mark.parametrize("answering", [True, False])
async def test_client_that_hangs_up_cancels_the_request_to_the_engine(
    proxy: ProxyProcess, http: aiohttp.ClientSession, answering: bool
) -> None:
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def work(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        if answering:
            await response.prepare(request)
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return response

    async def ask(url: str) -> None:
        async with post_chat(http, url) as response:
            await response.read()

    async with fake_engine(work) as backend:
        client = asyncio.create_task(ask(await proxy.serve(backend)))
        await arrived.wait()
        client.cancel()
        await asyncio.wait_for(cancelled.wait(), 30)
        assert await proxy.client.wait_idle(backend.uid, 30)


@pytest.mark.parametrize("content_length", [None, 100])
async def test_response_that_the_engine_breaks_off_does_not_look_complete(
    proxy: ProxyProcess, http: aiohttp.ClientSession, content_length: int | None
) -> None:
    gated = GatedEngine(content_length=content_length, kind="text/plain")
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as response:
            gated.release(b"half\n")
            assert await response.content.readany() == b"half\n"
            gated.release(b"CUT")
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


@pytest.mark.parametrize("content_length", [None, 100])
async def test_stream_that_the_engine_breaks_off_ends_with_an_error_event(
    proxy: ProxyProcess, http: aiohttp.ClientSession, content_length: int | None
) -> None:
    gated = GatedEngine(content_length=content_length)
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        errors = (await proxy.stats()).errors
        async with post_chat(http, url) as response:
            gated.release(b'data: "half"\n\ndata: {"choi')
            assert await response.content.readany() == b'data: "half"\n\n'
            gated.release(b"CUT")
            event = (await response.read()).removeprefix(b"data: ")
            assert error_code(json.loads(event)) == "upstream_failed"
        assert (await proxy.stats()).errors == errors + 1


@asynccontextmanager
async def asked_over_http_1_0(url: str, gated: GatedEngine) -> AsyncIterator[asyncio.StreamReader]:
    """Yield what a client gets of the body of a response that the engine breaks off."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer s3cret-token\r\nContent-Length: 2\r\n\r\n{}")
    await reader.readuntil(b"\r\n\r\n")
    gated.release(b"CUT")
    yield reader
    writer.close()


async def test_http_1_0_client_sees_a_broken_response_as_a_reset(proxy: ProxyProcess) -> None:
    gated = GatedEngine(kind="text/plain")
    async with fake_engine(gated) as backend, asked_over_http_1_0(await proxy.serve(backend), gated) as reader:
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_http_1_0_client_sees_a_broken_stream_by_its_last_event(proxy: ProxyProcess) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend, asked_over_http_1_0(await proxy.serve(backend), gated) as reader:
        assert (await reader.read()).startswith(b'data: {"error":{"message":"service ns/tiny: its engine broke')


async def test_slow_client_slows_the_engine_instead_of_filling_memory(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    sent = 0
    stalled = asyncio.Event()

    async def pour(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 64 << 20:
            try:
                await asyncio.wait_for(response.write(bytes(1 << 20)), 0.5)
            except TimeoutError:
                stalled.set()
                assert request.transport
                request.transport.abort()  # close() would wait until the unread data is written
                raise
            sent += 1 << 20
        return response

    async with fake_engine(pour) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as response:
            await asyncio.wait_for(stalled.wait(), 60)
            response.close()
    assert sent < 32 << 20  # the size of the kernel's buffers between them


# Choice of the backend


async def test_service_without_backend_answers_503_with_retry_after(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with post_chat(http, await proxy.serve()) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert error_code(await response.json()) == "service_unavailable"


async def test_dead_backend_is_skipped(proxy: ProxyProcess, http: aiohttp.ClientSession, refused_port: int) -> None:
    dead = Backend(uid="dead", url=f"http://127.0.0.1:{refused_port}")
    async with fake_engine(echo, "alive") as alive, post_chat(http, await proxy.serve(dead, alive)) as response:
        assert (response.status, json.loads((await response.json())["body"])) == (200, CHAT)


async def test_backend_that_does_not_accept_is_skipped_after_two_seconds(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        hung = Backend(uid="hung", url=f"http://127.0.0.1:{full.getsockname()[1]}")
        started = asyncio.get_running_loop().time()
        async with post_chat(http, await proxy.serve(hung)) as response:
            assert response.status == 503
        assert 1.5 < asyncio.get_running_loop().time() - started < 15


async def test_backend_that_breaks_off_before_its_response_is_a_502_without_retry(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    asked = 0

    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        assert request.transport
        request.transport.abort()
        return web.Response()

    async with (
        fake_engine(break_off, "a") as a,
        fake_engine(break_off, "b") as b,
        post_chat(http, await proxy.serve(a, b)) as response,
    ):
        assert response.status == 502
        assert error_code(await response.json()) == "upstream_failed"
    assert asked == 1


@pytest.mark.parametrize("status", [200, 204])
async def test_success_without_a_body_is_a_502(proxy: ProxyProcess, http: aiohttp.ClientSession, status: int) -> None:
    async def say_nothing(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, content_type="application/json")

    async with fake_engine(say_nothing) as backend:
        url = await proxy.serve(backend)
        errors = (await proxy.stats()).errors
        for _ in range(2):  # over one connection, on which nothing may follow the first response
            async with post_chat(http, url) as response:
                assert response.status == 502
                assert error_code(await response.json()) in {"upstream_failed", "engine_error"}
        assert (await proxy.stats()).errors == errors + 2


async def test_least_busy_backend_gets_the_next_request(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    first, second = GatedEngine(), GatedEngine()
    async with fake_engine(first, "a") as a, fake_engine(second, "b") as b:
        url = await proxy.serve(a, b)
        async with (
            post_chat(http, url) as one,
            post_chat(http, url) as two,
        ):
            assert first.arrived.is_set()
            assert second.arrived.is_set()
            state = await proxy.client.state()
            assert {b.uid: b.in_flight for b in state.services[0].backends} == {"a": 1, "b": 1}
            first.end()
            second.end()
            assert await one.read() == await two.read() == DONE_EVENT
