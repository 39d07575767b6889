"""What clients and engines do wrong, on purpose or not, and the certificate; through the real process."""

import asyncio
import contextlib
import io
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy import exchange, forward, listeners
from gateway.proxy.bodies import Bodies
from gateway.proxy.config import Backend, ProxyConfig, Tls
from gateway.proxy.exchange import upstream_session
from gateway.proxy.listeners import Listeners
from tests.eventually import eventually
from tests.unit.gateway.proxy_process import AUTHORIZED, CHAT, LAST, Gated, ProxyProcess, asks, run, service, upstream

CERTIFICATES = Path(__file__).parent / "certificates"
"""Of 127.0.0.1, each signed by itself and good until 2126; made with `openssl req -x509 -newkey ec ... -days 36500`."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret-token\r\n"


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await request.read())


async def send(url: str, *parts: bytes) -> bytes:
    """Send bytes as they are, part by part, and return the first answer with its body."""
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
async def test_a_request_that_nobody_can_mean_is_refused_and_reaches_no_engine(
    proxy: ProxyProcess, request_: bytes
) -> None:
    never = Gated()
    async with upstream(never) as backend:
        answer = await send(await proxy.serve(backend), request_)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert (await proxy.client.state()).services[0].stats.in_flight == 0
    assert not never.arrived.is_set()


async def test_a_packed_body_is_refused_by_name(proxy: ProxyProcess) -> None:
    async with upstream(echo) as backend:
        answer = await send(
            await proxy.serve(backend), HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b"
        )
    assert answer.startswith(b"HTTP/1.1 415 ")


async def test_a_body_in_chunks_arrives_whole(proxy: ProxyProcess) -> None:
    async with upstream(echo) as backend:
        parts = (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n", b'7;ext=1\r\n"a": 1}\r\n', b"0\r\n\r\n")
        reader_body = await send(await proxy.serve(backend), *parts)
    assert reader_body.startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_stops_in_the_middle_of_its_body_holds_no_place(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(forward, "BODY_PAUSE_SECONDS", 0.05)
    async with upstream(echo) as backend, inside(structs.replace(backend, concurrency=1)) as (_, url):
        answer = await send(url, HEAD + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        async with asks(http, url) as response:
            assert response.status == 200


async def test_bodies_that_wait_take_no_more_memory_than_there_is_for_them(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(listeners, "Bodies", lambda: Bodies(4000))
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

    async with upstream(slow) as backend, inside(backend) as (_, url):
        waits = asyncio.create_task(ask(3000))
        await arrived.wait()
        refused = await ask(3000)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert (await ask(5000)).status == 503
        small = asyncio.create_task(ask(10))
        answer.set()
        assert [(await each).status for each in (waits, small)] == [200, 200]
        assert (await ask(3000)).status == 200, "what is answered is held no more"


async def test_pipelined_requests_are_answered_in_their_order(proxy: ProxyProcess) -> None:
    async def which(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=f"<{json.loads(await request.read())['n']}>")

    async with upstream(which) as backend:
        url = await proxy.serve(backend)
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        for number in range(3):
            writer.write(HEAD + b'Content-Length: 7\r\n\r\n{"n":%d}' % number)
        got = b""
        while b"<2>" not in got:
            got += await reader.read(1000)
        writer.close()
        await writer.wait_closed()
    assert got.index(b"<0>") < got.index(b"<1>") < got.index(b"<2>")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret-token\x01\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nmy secret prompt\r\n",
        HEAD + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nX: my secret \x00 prompt\r\n\r\n",
    ],
)
async def test_nothing_of_a_request_that_is_not_http_comes_into_the_log(
    tmp_path_factory: pytest.TempPathFactory, sent: bytes
) -> None:
    with run(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as proxy:
        assert b" 400 " in await send(await proxy.serve(), sent)
        await eventually(lambda: any("not HTTP" in line for line in proxy.log))
        assert not any("secret" in line or "s3cret" in line for line in proxy.log)


# Engines


@asynccontextmanager
async def raw(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]],
) -> AsyncIterator[Backend]:
    """Serve `talk` as a backend, byte by byte; leaves no connection open, whatever the proxy has closed by then."""
    talks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks[asyncio.create_task(talk(reader, writer))] = writer

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        yield Backend("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for writer in talks.values():
        writer.transport.abort()
    await asyncio.gather(*talks)


async def test_an_engine_that_answers_before_it_has_read_is_heard(
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

    async with raw(hasty) as backend:
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
        b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_an_engine_that_breaks_off_or_talks_nonsense_is_a_502(
    proxy: ProxyProcess, http: aiohttp.ClientSession, said: bytes
) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.transport.abort() if not said else writer.close()

    async with raw(say) as backend, asks(http, await proxy.serve(backend)) as response:
        assert response.status == 502
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert "Location" not in response.headers


@asynccontextmanager
async def inside(*backends: Backend, tls: Tls | None = None) -> AsyncIterator[tuple[Listeners, str]]:
    """The proxy's listeners in this process, with the service `ns/tiny`; gives them and where it listens."""
    async with upstream_session() as session, asyncio.TaskGroup() as tasks:
        all_ = Listeners(session, tasks)
        await all_.configure(ProxyConfig((service(*backends),), tls=tls))
        (state,) = all_.state()
        assert state.error == ""
        yield all_, f"{'https' if tls else 'http'}://127.0.0.1:{state.port}"
        await all_.drain(1)


async def test_a_connection_to_an_engine_is_used_again_but_not_kept(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(exchange, "_KEPT_SECONDS", 0.5)
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

    async with raw(engine) as backend, inside(backend) as (_, url):
        for _ in range(2):
            async with asks(http, url) as response:
                assert await response.json() == {}
        assert connections == 1
        await asyncio.wait_for(closed.wait(), 10)


# The certificate


def certify(folder: Path, name: str) -> Tls:
    """Put the certificate and key `name` of this folder's fixtures in place, as a renewal does: the key last."""
    tls = Tls(str(folder / "tls.crt"), str(folder / "tls.key"))
    shutil.copy(CERTIFICATES / f"{name}.crt", tls.certificate)
    shutil.copy(CERTIFICATES / f"{name}.key", tls.key)
    return tls


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATES / f"{name}.crt"))


async def test_with_a_certificate_nobody_is_served_in_the_clear(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with upstream(echo) as backend, inside(backend, tls=certify(tmp_path, "first")) as (_, url):
        async with http.post(f"{url}/v1/completions", json=CHAT, headers=AUTHORIZED, ssl=trusting("first")) as response:
            assert (response.status, await response.read()) == (200, json.dumps(CHAT).encode())
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{url}/health", ssl=trusting("second"))
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"{url.replace('https', 'http')}/health")


async def test_a_renewed_certificate_is_served_to_who_comes_and_breaks_off_nobody(tmp_path: Path) -> None:
    gated = Gated()
    async with (
        upstream(gated) as backend,
        inside(backend, tls=certify(tmp_path, "first")) as (_, url),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting("first"))) as before,
        asks(before, url) as stream,
    ):
        certify(tmp_path, "second")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting("second"))) as after,
            after.get(f"{url}/health") as response,
        ):
            assert response.status == 200
        gated.end()
        assert await stream.read() == LAST


async def test_files_that_do_not_fit_together_leave_the_last_certificate_in_use(tmp_path: Path) -> None:
    async with upstream(echo) as backend, inside(backend, tls=certify(tmp_path, "first")) as (_, url):
        shutil.copy(CERTIFICATES / "second.crt", tmp_path / "tls.crt")
        connector = aiohttp.TCPConnector(ssl=trusting("first"), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            for _ in range(2):
                async with http.get(f"{url}/health") as response:
                    assert response.status == 200
            (tmp_path / "tls.key").unlink()
            async with http.get(f"{url}/health") as response:
                assert response.status == 200


async def test_a_certificate_that_cannot_be_read_opens_no_port(proxy: ProxyProcess, tmp_path: Path) -> None:
    config = ProxyConfig((service(),), tls=Tls(str(tmp_path / "no.crt"), str(tmp_path / "no.key")))
    (state,) = (await proxy.client.configure(config)).services
    assert state.error.startswith(f"cannot use certificate {tmp_path}/no.crt with its key: ")
    assert "No such file" in state.error
    tls = certify(tmp_path, "first")
    shutil.copy(CERTIFICATES / "second.key", tls.key)
    (state,) = (await proxy.client.configure(structs.replace(config, tls=tls))).services
    assert "mismatch" in state.error.lower()
    certify(tmp_path, "second")
    (state,) = (await proxy.client.configure(structs.replace(config, tls=tls))).services
    assert state.error == ""
