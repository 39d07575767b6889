"""Connections that the transport cannot open."""

import socket
from typing import Any

import aiohttp
import pytest

from kube import transport
from kube.credentials import Credentials, StaticToken
from kube.errors import Unreachable
from kube.transport import AiohttpTransport, Request


async def test_server_that_accepts_no_connection_is_named_without_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.2)
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # one connection waits to be accepted, and the kernel answers no other one
        first.connect(server.getsockname())
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        client = AiohttpTransport(Credentials(url, StaticToken("token")))
        with pytest.raises(Unreachable) as caught:
            await client.request(Request("GET", "/api/v1/pods", query={"limit": "500"}))
        await client.close()
    assert str(caught.value) == "GET /api/v1/pods: no connection within 0.2 s"


async def test_descriptor_that_the_event_loop_refuses_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise RuntimeError("File descriptor 23 is used by transport <TCPTransport>")

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", refuse)
    client = AiohttpTransport(Credentials("http://127.0.0.1:1", StaticToken("token")))
    with pytest.raises(Unreachable, match="descriptor 23"):
        await client.request(Request("GET", "/api/v1/pods"))
    await client.close()
