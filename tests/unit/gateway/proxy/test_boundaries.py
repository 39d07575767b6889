"""Facts that must not cross the proxy, and changes of the configuration at bad moments."""

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.config import ProxyConfig
from gateway.proxy.listeners import DrainingError, ListenAddress, _explain_bind_error
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    CHAT,
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
    proxy_in_process,
    raw_engine,
)


async def test_fields_of_an_engine_that_concern_browsers_do_not_reach_clients(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def open_to_all(_: web.BaseRequest) -> web.StreamResponse:
        headers = {
            "Set-Cookie": "a=b",
            "Server": "llama.cpp",
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Credentials": "true",
            "X-Kept": "1",
        }
        return web.json_response({"choices": []}, headers=headers)

    async with fake_engine(open_to_all) as backend, post_chat(http, await proxy.serve(backend)) as response:
        names = {name.lower() for name in response.headers}
    assert names == {"content-type", "content-length", "date", "x-kept", "x-request-id", "x-pomona-service"}


async def test_client_cannot_have_the_engine_go_on_without_it(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    """llama-server generates to the end, for nobody, if a request has the id of a conversation."""
    names: list[str] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        names.extend(name.lower() for name in request.headers)
        return web.json_response({"choices": []})

    async with fake_engine(note) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url, headers={"X-Conversation-Id": "a", "X-Other": "b"}) as response:
            assert response.status == 200
    assert "x-conversation-id" not in names
    assert "x-other" in names


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
async def test_client_without_the_token_learns_no_name(
    proxy: ProxyProcess, http: aiohttp.ClientSession, path: str
) -> None:
    url = await proxy.serve()
    async with http.request("GET" if path == "/health" else "POST", url + path) as response:
        assert response.status in {401, 503}
        answer = await response.text()
    assert "tiny" not in answer
    assert "ns/" not in answer


async def test_slot_freed_by_a_stream_of_a_removed_service_wakes_the_queue_of_its_successor(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        one_slot = structs.replace(backend, concurrency=1)
        url = await proxy.serve(one_slot)
        async with post_chat(http, url) as stream:
            await proxy.client.configure(ProxyConfig())
            url = await proxy.serve(one_slot)
            waiting = asyncio.create_task(read_chat(http, url))

            async def is_queued() -> bool:
                return (await proxy.stats()).queued == 1

            await eventually(is_queued)
            gated.end()
            assert await stream.read() == DONE_EVENT
        gated.end()
        assert await asyncio.wait_for(waiting, 20) == DONE_EVENT


async def read_chat(http: aiohttp.ClientSession, url: str) -> bytes:
    async with post_chat(http, url) as response:
        return await response.read()


async def test_configuration_during_the_drain_is_refused(http: aiohttp.ClientSession) -> None:
    gated = GatedEngine()
    async with (
        fake_engine(gated) as backend,
        proxy_in_process(backend) as (listeners, url),
        post_chat(http, url) as stream,
    ):
        draining = asyncio.create_task(listeners.drain(20))
        await eventually(lambda: not listeners.sockets())
        with pytest.raises(DrainingError, match="the proxy is stopping"):
            await listeners.configure(ProxyConfig((make_service(backend),)))
        assert not listeners.sockets()
        gated.end()
        assert await stream.read() == DONE_EVENT
        await draining


def test_name_that_does_not_resolve_is_reported_as_such() -> None:
    macos = socket.gaierror(8, "nodename nor servname provided, or not known")
    error = _explain_bind_error(ListenAddress("no.such.host", 1), macos)
    assert error == "cannot listen on no.such.host port 1: nodename nor servname provided, or not known"


async def test_request_is_sent_again_over_a_new_connection_if_the_kept_one_was_stale(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    connections = 0

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request on each connection, and close at the second, as if the idle time had just run out."""
        nonlocal connections
        connections += 1
        for last in (False, True):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            if last:
                break
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with raw_engine(engine) as backend:
        url = await proxy.serve(backend)
        for _ in range(3):
            async with http.post(
                f"{url}/v1/completions", json=CHAT, headers={"Authorization": "Bearer s3cret-token"}
            ) as response:
                assert response.status == 200
    assert connections == 3
