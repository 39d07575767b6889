"""Clients that try a WebSocket first, as Codex does: they learn at once that there is none, and go on with HTTP."""

import asyncio
import json

import aiohttp
import pytest

from gateway.proxy.config import ProxyConfig, RouterListener
from tests.unit.gateway.proxy.running_proxy import (
    TOKEN,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
)

HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nOpenAI-Beta: responses_websockets=2026-02-06\r\n{more}\r\n"
)
BEARER = f"Authorization: Bearer {TOKEN}\r\n"
PATHS = ["/v1/responses", "/v1/realtime?model=tiny", "/health", "/metrics", "/v1/models", "/unknown"]


async def shake_hands(url: str, path: str, more: str = "", protocol: str = "websocket") -> tuple[bytes, dict[str, str]]:
    """Send the handshake; return the head of the answer and the error, once the server has closed the connection."""
    host = url.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(HANDSHAKE.format(path=path, host=host, more=more, protocol=protocol).encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    writer.close()
    return head, json.loads(body)["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", ["", BEARER, "Authorization: Bearer wrong\r\n"])
async def test_websocket_is_refused_on_any_path_with_the_way_to_go_on(
    proxy: ProxyProcess, path: str, more: str
) -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend:
        url = await proxy.serve(backend)
        head, error = await shake_hands(url, path, more)
        assert head.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
        assert b"\r\nconnection: close" in head
        assert b"upgrade:" not in head.lower()
        assert error["code"] == "websocket_not_served"
        assert error["message"] == "no WebSocket is served here: send the request by POST; with `stream` it is streamed"
        stats = await proxy.stats()
        assert (stats.requests, stats.errors) == (0, 0)
    assert not never.arrived.is_set()


async def test_router_without_a_token_refuses_a_websocket_too(proxy: ProxyProcess) -> None:
    state = await proxy.client.configure(ProxyConfig((make_service(),), RouterListener("127.0.0.1", 0)))
    assert state.router
    for protocol in ("WebSocket", "h2c, websocket"):
        head, _ = await shake_hands(f"http://127.0.0.1:{state.router.port}", "/v1/responses", protocol=protocol)
        assert head.startswith(b"HTTP/1.1 426 ")


async def test_other_offers_of_a_protocol_are_ignored(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = GatedEngine()
    gated.end()
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with http.get(f"{url}/health", headers={"Upgrade": "h2c", "Connection": "Upgrade"}) as response:
            assert response.status == 200
        # A POST is no handshake: the server may answer it as if nothing were offered.
        async with post_chat(http, url, headers={"Upgrade": "websocket", "Connection": "Upgrade"}) as response:
            assert response.status == 200
