"""A forwarded port carries bytes both ways, and refusals of the API server are raised at once.

The messages are those of a kubelet; tests/cluster/cli tries the same through a real API server.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from kube.credentials import Credentials, StaticToken
from kube.errors import Forbidden, Unreachable
from kube.port_forward import forward_port

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


async def echo(request: web.Request) -> web.StreamResponse:
    assert request.path == "/api/v1/namespaces/team/pods/chat-1/portforward"
    assert request.query["ports"] == "8080"
    assert request.headers["Authorization"] == "Bearer hunter2"
    socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await socket.prepare(request)
    for channel in (b"\x00", b"\x01"):
        await socket.send_bytes(channel + (8080).to_bytes(2, "little"))
    async for message in socket:
        if message.data[1:] == b"break":
            await socket.send_bytes(b"\x01connection refused")
        else:
            await socket.send_bytes(b"\x00" + message.data[1:].upper())
    return socket


async def test_bytes_pass_in_both_directions_on_several_connections(serve: Serve) -> None:
    credentials = Credentials(await serve(echo), StaticToken("hunter2"))
    async with forward_port(credentials, "team", "chat-1", 8080) as path:
        for text in (b"one", b"x" * 200_000):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(text)
            assert await reader.readexactly(len(text)) == text.upper()
            writer.close()
        assert path.parent.stat().st_mode & 0o077 == 0, "no other user reaches the port"
    assert not path.exists()


async def test_connection_ends_when_the_kubelet_reports_an_error(serve: Serve) -> None:
    credentials = Credentials(await serve(echo), StaticToken("hunter2"))
    async with forward_port(credentials, "team", "chat-1", 8080) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"break")
        assert await reader.read() == b""
        writer.close()


async def test_missing_right_is_named(serve: Serve) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=403)

    credentials = Credentials(await serve(refuse), StaticToken("hunter2"))
    with pytest.raises(Forbidden, match="get and create pods/portforward"):
        async with forward_port(credentials, "team", "chat-1", 8080):
            pass


async def test_server_that_is_away_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="port-forward pods team/chat-1"):
        async with forward_port(Credentials("http://127.0.0.1:9", StaticToken(None)), "team", "chat-1", 8080):
            pass
