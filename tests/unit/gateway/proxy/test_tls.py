"""TLS of the listeners (no plain HTTP, renewed without a break, refused when its files do not fit) and of backends."""

import asyncio
import json
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from msgspec import structs

from gateway.http.limits import ConnectionTimes
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import ProxyConfig, Tls
from gateway.proxy.request_body import read_short_body
from gateway.proxy.tls import load_certificate
from gateway.proxy.token_lanes import UNKNOWN
from gateway.proxy.upstream_request import count_prompt
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
    proxy_in_process,
)

CERTIFICATES = Path(__file__).parent / "certificates"
"""Self-signed, for 127.0.0.1, valid until 2126; made with `openssl req -x509 -newkey ec ... -days 36500`."""


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await request.read())


def install_certificate(folder: Path, name: str) -> Tls:
    """Install the certificate and key `name` of this folder's fixtures as a renewal does: the key last."""
    tls = Tls(str(folder / "tls.crt"), str(folder / "tls.key"))
    shutil.copy(CERTIFICATES / f"{name}.crt", tls.certificate)
    shutil.copy(CERTIFICATES / f"{name}.key", tls.key)
    return tls


def trust(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATES / f"{name}.crt"))


async def test_listener_with_a_certificate_serves_no_plain_http(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        fake_engine(echo) as backend,
        proxy_in_process(backend, tls=install_certificate(tmp_path, "first")) as (_, url),
    ):
        async with http.post(f"{url}/v1/completions", json=CHAT, headers=AUTHORIZED, ssl=trust("first")) as response:
            assert (response.status, json.loads(await response.read())) == (200, CHAT)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{url}/health", ssl=trust("second"))
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"{url.replace('https', 'http')}/health")


async def test_renewed_certificate_is_used_for_new_connections_and_keeps_open_ones(tmp_path: Path) -> None:
    gated = GatedEngine()
    async with (
        fake_engine(gated) as backend,
        proxy_in_process(backend, tls=install_certificate(tmp_path, "first")) as (_, url),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust("first"))) as before,
        post_chat(before, url) as stream,
    ):
        install_certificate(tmp_path, "second")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust("second"))) as after,
            after.get(f"{url}/health") as response,
        ):
            assert response.status == 200
        gated.end()
        assert await stream.read() == DONE_EVENT


async def test_mismatched_files_leave_the_last_certificate_in_use(tmp_path: Path) -> None:
    async with (
        fake_engine(echo) as backend,
        proxy_in_process(backend, tls=install_certificate(tmp_path, "first")) as (_, url),
    ):
        shutil.copy(CERTIFICATES / "second.crt", tmp_path / "tls.crt")
        connector = aiohttp.TCPConnector(ssl=trust("first"), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            for _ in range(2):
                async with http.get(f"{url}/health") as response:
                    assert response.status == 200
            (tmp_path / "tls.key").unlink()
            async with http.get(f"{url}/health") as response:
                assert response.status == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "begin of a ClientHello"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_client_that_does_not_complete_its_handshake_is_disconnected_in_time(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], sent: bytes
) -> None:
    async def main() -> bytes:
        times = ConnectionTimes(head_seconds=0.2)
        async with proxy_in_process(tls=install_certificate(tmp_path, "first"), times=times) as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), 20)
            finally:
                writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == b""


async def test_unreadable_certificate_is_reported_and_binds_no_port(proxy: ProxyProcess, tmp_path: Path) -> None:
    config = ProxyConfig((make_service(),), tls=Tls(str(tmp_path / "no.crt"), str(tmp_path / "no.key")))
    (state,) = (await proxy.client.configure(config)).services
    assert state.error.startswith(f"cannot use certificate {tmp_path}/no.crt with its key: ")
    assert "No such file" in state.error
    tls = install_certificate(tmp_path, "first")
    shutil.copy(CERTIFICATES / "second.key", tls.key)
    (state,) = (await proxy.client.configure(structs.replace(config, tls=tls))).services
    assert "mismatch" in state.error.lower()
    install_certificate(tmp_path, "second")
    (state,) = (await proxy.client.configure(structs.replace(config, tls=tls))).services
    assert state.error == ""


async def test_backend_with_tls_is_asked_by_its_address(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    connections: set[object] = set()

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        connections.add(request.transport)
        return web.json_response({"host": request.headers["Host"]})

    certificate = load_certificate(install_certificate(tmp_path, "first"))
    async with (
        fake_engine(note, tls=certificate) as backend,
        proxy_in_process(backend, trust=trust("first")) as (_, url),
    ):
        for _ in range(3):
            async with post_chat(http, url) as response:
                assert await response.json() == {"host": backend.url.removeprefix("https://")}
    assert len(connections) == 1


async def test_backend_whose_certificate_is_not_trusted_gets_no_request(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    never = GatedEngine()
    certificate = load_certificate(install_certificate(tmp_path, "second"))
    async with (
        fake_engine(never, tls=certificate) as untrusted,
        fake_engine(echo, "b") as other,
        proxy_in_process(untrusted, trust=trust("first")) as (listeners, url),
    ):
        async with post_chat(http, url) as response:
            assert response.status == 503
        await listeners.configure(ProxyConfig((make_service(untrusted, other),)))
        (state,) = listeners.service_states()
        async with post_chat(http, f"http://127.0.0.1:{state.port}") as response:
            assert response.status == 200
    assert not never.arrived.is_set()


async def test_tokens_are_counted_by_a_backend_with_tls(tmp_path: Path) -> None:
    async def count(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"input_tokens": 7})

    body = read_short_body(json.dumps(CHAT).encode())
    assert body
    async with fake_engine(count, tls=load_certificate(install_certificate(tmp_path, "first"))) as backend:
        engine = structs.replace(backend, engine="llama.cpp")
        assert await count_prompt(UpstreamPool(trust("first")), engine, "chat", body) == 7
        assert await count_prompt(UpstreamPool(trust("second")), engine, "chat", body) == UNKNOWN
