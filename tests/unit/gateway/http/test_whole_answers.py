"""Servers that strangers reach: what a client may take of them, and which connection gives way to which."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import uvloop

from gateway.http.limits import UNFINISHED_HEAD_BYTES, ConnectionCaps, ConnectionTimes
from gateway.http.whole_answers import (
    AnswerServer,
    AskedQuestion,
    BodyLimits,
    PacedRendering,
    Route,
    WholeAnswer,
    create_listener,
    is_loopback,
)
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually
from tests.unit.gateway.http.http_server import HttpServer, RawClient, connect

CERTIFICATES = CHECKOUT / "tests" / "support" / "certificates"
FEW = ConnectionCaps(total=3, per_peer=3, buffered_bytes=16 << 10)
PATIENT = ConnectionTimes(sweep_seconds=0.01)
ASK = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
TEXT = b"x" * 5000


async def answer_never(_: AskedQuestion) -> WholeAnswer:
    await asyncio.Event().wait()
    raise AssertionError


async def answer_known_client(question: AskedQuestion) -> WholeAnswer:
    question.keep_connection()
    return await answer_never(question)


async def answer_soon(question: AskedQuestion) -> WholeAnswer:
    await asyncio.sleep(0)
    return WholeAnswer(200, bytes(question.body) + question.name.encode())


async def fail(_: AskedQuestion) -> WholeAnswer:
    raise RuntimeError("a defect")


ROUTES = {
    "/healthz": Route(lambda _: WholeAnswer(200, b"ok\n")),
    "/metrics": Route(lambda _: WholeAnswer(200, TEXT)),
    "/never": Route(answer_never),
    "/known": Route(answer_known_client),
    "/fails": Route(fail),
    "/names/": Route(answer_soon),
    "/sent": Route(answer_soon, "POST", BodyLimits(10, 20)),
}


@contextlib.asynccontextmanager
async def serve(
    caps: ConnectionCaps = FEW,
    times: ConnectionTimes = PATIENT,
    host: str = "127.0.0.1",
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[HttpServer]:
    listener = create_listener(AnswerServer(ROUTES), host, caps=caps, times=times, context=context)
    await listener.bind(host, 0)
    try:
        yield HttpServer(listener, listener._table, listener.sockets[0].getsockname()[1])
    finally:
        listener.unbind()
        for connection in list(listener._connections):
            connection.abort()


def load_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "host.crt", CERTIFICATES / "host.key")
    return context


async def ask(server: HttpServer, request: bytes) -> tuple[bytes, bytes]:
    async with connect(server) as client:
        await client.send(request)
        return await client.answer()


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (ASK % b"/healthz", b"200", b"ok\n"),
        (ASK % b"/healthz?verbose", b"200", b"ok\n"),
        (ASK % b"/names/a%2Fb", b"200", b"a/b"),
        (ASK % b"/names/", b"404", b"not found\n"),
        (ASK % b"/names", b"404", b"not found\n"),
        (ASK % b"/", b"404", b"not found\n"),
        (ASK % b"/sent", b"405", b"use POST\n"),
        (ASK % b"/fails", b"500", b""),
        (b"POST /sent HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody", b"200", b"body"),
        (b"POST /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405", b"use GET\n"),
    ],
)
async def test_routes(request_bytes: bytes, status: bytes, body: bytes) -> None:
    async with serve() as server:
        head, answer = await ask(server, request_bytes)
        assert (head.split()[1], answer) == (status, body)


async def test_body_is_refused_for_its_own_size_or_for_that_of_all() -> None:
    begin = b"POST /sent HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n"
    async with serve() as server, connect(server) as one, connect(server) as two, connect(server) as three:
        await one.send(begin)
        await two.send(begin)
        await three.send(begin)
        assert (await three.answer())[0].split()[1] == b"503", "its own is below the limit: it may come later"
        await one.send(b"2\r\n12\r\n")
        assert (await one.answer())[0].split()[1] == b"413"


async def test_head_is_answered_as_get_without_the_body() -> None:
    async with serve() as server, connect(server) as client:
        await client.send(b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await client.rest()
        assert b"content-length: 5000\r\n" in answer
        assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"Host: localhost:17999", b"200"),
        (b"Host: 127.0.0.1:1\r\nOrigin: http://localhost:3000", b"200"),
        (b"Host: [::1]", b"200"),
        (b"Host: evil.example:17999", b"403"),
        (b"Host: 127.0.0.1.evil.example", b"403"),
        (b"Host: localhost\r\nOrigin: https://evil.example", b"403"),
        (b"Host: localhost\r\nOrigin: null", b"403"),
    ],
)
async def test_web_page_in_a_browser_of_this_machine_reads_nothing_on_loopback(fields: bytes, status: bytes) -> None:
    async with serve() as server:
        head, body = await ask(server, b"GET /metrics HTTP/1.1\r\n%b\r\n\r\n" % fields)
        assert (head.split()[1], body == TEXT) == (status, status == b"200")


async def test_any_name_is_right_where_others_may_ask_too() -> None:
    async with serve(host="0.0.0.0") as server:
        assert (await ask(server, b"GET /healthz HTTP/1.1\r\nHost: node-7:9100\r\n\r\n"))[1] == b"ok\n"
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "", "0.0.0.0", "10.0.0.1", "mac")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]


SLOW = {
    "idle": b"",
    "half a head": b"GET /healthz HTTP/1.1\r\nX-",
    "half a body": b"POST /sent HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    "an answer that is awaited": ASK % b"/never",
    "an error that is not read": b"no request\r\n\r\n",
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
async def test_slow_strangers_keep_no_probe_out(sent: bytes) -> None:
    async with serve() as server, contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            client = await stack.enter_async_context(connect(server))
            await client.send(sent)
        await eventually(lambda: server.table.accepted == FEW.total)
        assert (await ask(server, ASK % b"/healthz"))[1] == b"ok\n"


async def test_client_that_is_known_gives_way_to_nobody() -> None:
    async with serve() as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(server)) for _ in range(3)]
        for client in clients:
            await client.send(ASK % b"/known")
        await eventually(lambda: not any(connection.is_replaceable for connection in server.listener._connections))
        async with connect(server) as late:
            assert await late.rest() == b""
        assert not any(client.reader.at_eof() for client in clients)


async def test_stranger_who_begins_no_handshake_keeps_nobody_out() -> None:
    async with serve(context=load_certificate()) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(connect(server))
        trusting = ssl._create_unverified_context()  # noqa: S323 - our own server
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
        client = RawClient(reader, writer)
        await client.send(ASK % b"/healthz")
        assert (await client.answer())[1] == b"ok\n"
        writer.transport.abort()


def attack_with_tls(port: int, data: bytes) -> int:
    """Send until the server has taken nothing for half a second, read nothing, and hang up; return the bytes sent."""
    trusting = ssl._create_unverified_context()  # noqa: S323 - our own server
    sent = 0
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain.connect(("127.0.0.1", port))
        with trusting.wrap_socket(plain) as client, contextlib.suppress(TimeoutError):
            client.settimeout(0.5)
            while sent < len(data):
                sent += client.send(data[sent : sent + 4096])
    return sent


@pytest.mark.parametrize("count", [300, 1 << 14])
def test_tls_client_that_reads_nothing_takes_little_memory_and_no_lines_of_the_log(
    caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """uvloop holds 256 KiB that are not decrypted yet, and logs what is written to a connection that was closed."""

    caps = ConnectionCaps(total=100, per_peer=100, buffered_bytes=16 << 10)

    async def main() -> None:
        async with serve(context=load_certificate(), caps=caps, host="0.0.0.0") as server:
            data = (ASK % b"/healthz") * count
            sent = await asyncio.gather(*(asyncio.to_thread(attack_with_tls, server.port, data) for _ in range(12)))
            assert max(sent) < 256 << 10
            await eventually(lambda: server.table.accepted == 0)

    uvloop.run(main())
    assert not caplog.records


@pytest.mark.parametrize(("host", "is_small"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_buffers_are_small_but_hold_a_packet_of_loopback(host: str, is_small: bool) -> None:
    async with serve(host=host) as server:
        size_bytes = server.listener.sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert (size_bytes < 64 << 10) == is_small


async def test_answers_that_are_not_read_are_not_made() -> None:
    """A client that pipelines requests and reads nothing has a few answers made, and not one for each."""
    made = 0

    def count(_: AskedQuestion) -> WholeAnswer:
        nonlocal made
        made += 1
        return WholeAnswer(200, TEXT)

    listener = create_listener(AnswerServer({"/metrics": Route(count)}), "0.0.0.0", caps=FEW, times=PATIENT)
    await listener.bind("0.0.0.0", 0)
    port = listener.sockets[0].getsockname()[1]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        requests = (ASK % b"/metrics") * 1000
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, requests))
        (connection,) = await eventually(lambda: listener._connections)
        await eventually(lambda: connection.is_blocked)
        seen = made
        for _ in range(50):
            await asyncio.sleep(0)
        assert made == seen < 100
        while made < 1000:  # who reads on gets them all
            assert await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        await sending
    listener.unbind()


async def test_request_takes_its_time_at_most_however_lively_its_client_is() -> None:
    times = ConnectionTimes(sweep_seconds=0.01, request_seconds=0.2, linger_seconds=0.2, body_pause_seconds=60)
    async with serve(times=times) as server, connect(server) as client:
        await client.send(b"POST /sent HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await client.send(b"1;x=y\r\n")
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await client.answer())[0].startswith(b"HTTP/1.1 400 ")
        dripping.cancel()
        await eventually(lambda: server.table.accepted == 0)
    async with serve(times=times) as server, connect(server) as client:
        await client.send(ASK % b"/never")
        assert await client.rest() == b""
    async with serve(times=times) as server, connect(server) as client:
        await client.send(ASK[:-2] % b"/never" + b"Content-Length: 5\r\n\r\n")
        assert await client.rest() == b"", "nobody reads the body, nor fails by its absence"


async def test_heads_that_do_not_end_take_little_memory_together() -> None:
    many = ConnectionCaps(total=4000, per_peer=4000)
    held = 16_000
    async with serve(caps=many) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(UNFINISHED_HEAD_BYTES // held):
            client = await stack.enter_async_context(connect(server))
            await client.send(b"GET /healthz HTTP/1.1\r\nX-A: ".ljust(held, b"a"))
        most = UNFINISHED_HEAD_BYTES // 2
        await eventually(lambda: most - held < server.table._all.head_bytes <= most)
        assert server.table.accepted <= most // held + 1, "half of all is for one address, and the oldest went"
        await client.send(b"\r\nHost: localhost\r\n\r\n")
        assert (await client.answer())[1] == b"ok\n"
        held_now = [connection.head_bytes for connection in server.listener._connections]
        assert sum(held_now) == server.table._all.head_bytes


async def test_new_connections_take_the_place_of_idle_ones_before_the_caps_are_reached() -> None:
    async with serve(caps=ConnectionCaps(100, 100, soft_total=5)) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            client = await stack.enter_async_context(connect(server))
            await client.send(ASK % b"/known")
        await eventually(
            lambda: [connection.is_replaceable for connection in server.listener._connections] == [False] * 3
        )
        for _ in range(20):
            await stack.enter_async_context(connect(server))
        await eventually(lambda: server.table.accepted == 5)


def test_text_is_rendered_ten_times_at_once_and_then_once_a_second() -> None:
    now, made = [0.0], [0]

    def render() -> bytes:
        made[0] += 1
        return b"%d" % made[0]

    rendering = PacedRendering(render, lambda: now[0])
    assert [rendering.read() for _ in range(1000)][-1] == b"10"
    now[0] += 0.5
    assert rendering.read() == b"10"
    now[0] += 0.5
    assert [rendering.read() for _ in range(3)] == [b"11"] * 3
    now[0] += 60
    assert [rendering.read() for _ in range(100)][-1] == b"21"


PRODUCT = (
    *("artifacts", "cli", "console", "controller", "crds", "devices", "extender", "fitness", "gateway", "kube"),
    *("launchd", "metal_agent", "node_agent", "runtimes", "standalone"),
)


def test_product_has_no_other_http_server() -> None:
    """A server without limits ended the controller: each port is one of `gateway.http`."""
    other = re.compile(r"HTTPServer\b|\baiohttp(\.| import )web\b|\bstart_server\(")
    files = [path for folder in PRODUCT for path in (CHECKOUT / folder).rglob("*.py")]
    assert len(files) > 500
    assert [str(path) for path in files if other.search(path.read_text())] == []
