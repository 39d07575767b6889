"""The certificate of the listeners: TLS only, renewed without a break, and refused when its files do not fit."""

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
from gateway.proxy.config import ProxyConfig, Tls
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
