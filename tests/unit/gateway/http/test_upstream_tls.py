"""Upstreams that speak TLS: whose certificates are trusted, which connections are kept, and slow readers."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial

import pytest
import uvloop

from gateway.http import upstream_pool
from gateway.http.headers import Headers
from gateway.http.upstream_connection import UpstreamBrokeOffError, UpstreamConnection
from gateway.http.upstream_pool import NotAcceptedError, UpstreamPool
from gateway.proxy.config import Tls
from gateway.proxy.tls import load_certificate
from tests.support import certificates
from tests.support.eventually import eventually

SECONDS = 20
GET = b"GET / HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Loop = Callable[[], asyncio.AbstractEventLoop]

ON_BOTH_LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run(new_loop: Loop, main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(3 * SECONDS):
            await main()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())


def trust(certificate: str = str(certificates.CA)) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


class Response:
    """A receiver that keeps all it gets; `pauses` lets it stop its upstream at the first piece."""

    def __init__(self, connection: UpstreamConnection, *, pauses: bool = False) -> None:
        self.body = b""
        self.ended = asyncio.Event()
        self.began = asyncio.Event()
        self.error: UpstreamBrokeOffError | None = None
        self._connection = connection
        self._pauses = pauses

    def take_head(self, status: int, headers: Headers, piece: bytes) -> None:
        del headers
        assert status == 200
        if self._pauses:
            self._connection.pause_reading()
        self.began.set()
        self.take_response(piece)

    def take_response(self, piece: bytes) -> None:
        self.body += piece

    def end_response(self) -> None:
        self.ended.set()

    def fail_response(self, error: UpstreamBrokeOffError) -> None:
        self.error = error
        self.ended.set()


async def ask(connection: UpstreamConnection) -> Response:
    connection.send(GET, (b"",), response := Response(connection))
    await response.ended.wait()
    return response


@asynccontextmanager
async def serve(talk: Talk, tls: Tls | None = certificates.HOST) -> AsyncIterator[str]:
    """Serve `talk` with a certificate, or without TLS; yield an https URL."""
    context = load_certificate(tls) if tls else None
    talks: set[asyncio.Task[None]] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError), closing(writer):
            await talk(reader, writer)

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(guarded(reader, writer)))

    async with await asyncio.start_server(begin, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(OK)


async def end_after_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)


@ON_BOTH_LOOPS
def test_idle_connection_is_used_again(new_loop: Loop) -> None:
    async def main() -> None:
        async with serve(answer) as url, UpstreamPool(trust()) as pool:
            connection = await pool.connect(url)
            for _ in range(3):
                assert (await ask(connection)).body == b"ok"
                assert pool.take_idle(url) is connection

    run(new_loop, main)


@ON_BOTH_LOOPS
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_idle_connection_that_the_server_closes_is_not_used_even_if_the_loop_has_not_read_that(
    new_loop: Loop, version: ssl.TLSVersion
) -> None:
    """The server works in this thread while the loop cannot: what it sends is only in the socket."""
    context = load_certificate(certificates.HOST)
    context.maximum_version = version

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"https://127.0.0.1:{listening.getsockname()[1]}"

            def shake() -> ssl.SSLSocket:
                accepted, _ = listening.accept()
                accepted.settimeout(SECONDS)
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return context.wrap_socket(accepted, server_side=True)

            async with UpstreamPool(trust()) as pool:
                connection, accepted = await asyncio.gather(pool.connect(url), asyncio.to_thread(shake))
                for _ in range(2):
                    connection.send(GET, (b"",), response := Response(connection))
                    await asyncio.to_thread(accepted.recv, 1 << 16)
                    await asyncio.to_thread(accepted.sendall, OK)
                    await response.ended.wait()
                    assert pool.take_idle(url) is connection
                pool.keep(connection)
                with contextlib.suppress(OSError):
                    accepted.settimeout(0)
                    accepted.unwrap()  # sends the alert that closes the connection, and does not wait for the answer
                assert pool.take_idle(url) is None
                accepted.close()

    run(new_loop, main)


@ON_BOTH_LOOPS
def test_idle_connection_that_the_server_closes_leaves_the_pool(new_loop: Loop) -> None:
    async def main() -> None:
        async with serve(end_after_an_answer) as url, UpstreamPool(trust(), idle_seconds=SECONDS) as pool:
            for _ in range(2):
                connection = await pool.connect(url)
                assert (await ask(connection)).body == b"ok"
                await eventually(lambda: not pool._all and not pool._idle.get(url))

    run(new_loop, main)


@ON_BOTH_LOOPS
@pytest.mark.parametrize(
    ("certificate", "trusted", "name", "reason"),
    [
        (certificates.HOST, certificates.LIBRARY.certificate, "127.0.0.1", "unable to get local issuer certificate"),
        (certificates.LIBRARY, str(certificates.CA), "127.0.0.1", "self-signed certificate"),
        (certificates.EXPIRED, str(certificates.CA), "127.0.0.1", "certificate has expired"),
        (certificates.HOST, str(certificates.CA), "localhost", "certificate is not valid for 'localhost'"),
    ],
)
def test_certificate_that_is_not_trusted_is_refused_with_the_reason(
    new_loop: Loop, certificate: Tls, trusted: str, name: str, reason: str
) -> None:
    async def main() -> None:
        async with serve(answer, certificate) as url, UpstreamPool(trust(trusted)) as pool:
            with pytest.raises(NotAcceptedError, match=f"^its certificate is not trusted: .*{reason}"):
                await pool.connect(url.replace("127.0.0.1", name))
            assert not pool._all

    run(new_loop, main)


@ON_BOTH_LOOPS
def test_without_a_trust_of_its_own_the_pool_trusts_the_system(new_loop: Loop) -> None:
    async def main() -> None:
        async with serve(answer) as url, UpstreamPool() as pool:
            with pytest.raises(NotAcceptedError, match="certificate is not trusted"):
                await pool.connect(url)

    run(new_loop, main)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.transport.abort()


async def speak_plain_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@ON_BOTH_LOOPS
@pytest.mark.parametrize(
    ("talk", "reason"),
    [(hang_up, "it broke off the connection while that was made"), (speak_plain_http, "(?i)wrong.version.number")],
)
def test_server_without_tls_accepts_no_request(new_loop: Loop, talk: Talk, reason: str) -> None:
    async def main() -> None:
        async with serve(talk, None) as url, UpstreamPool(trust()) as pool:
            with pytest.raises(NotAcceptedError, match=reason):
                await pool.connect(url)

    run(new_loop, main)


@ON_BOTH_LOOPS
@pytest.mark.interpreted
def test_server_that_is_silent_in_the_handshake_is_given_up_in_time(
    new_loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_pool, "CONNECT_SECONDS", 0.2)

    async def main() -> None:
        closed = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            closed.set()

        async with serve(say_nothing, None) as url, UpstreamPool(trust()) as pool:
            with pytest.raises(NotAcceptedError, match=r"no connection within 0\.2 s"):
                await pool.connect(url)
            await asyncio.wait_for(closed.wait(), SECONDS)

    run(new_loop, main)


@ON_BOTH_LOOPS
def test_slow_reader_stops_the_server_and_then_gets_all(new_loop: Loop) -> None:
    size = 32 << 20
    sent = 0

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        await reader.read()

    async def main() -> None:
        async with serve(stream) as url, UpstreamPool(trust()) as pool:
            connection = await pool.connect(url)
            connection.send(GET, (b"",), response := Response(connection, pauses=True))
            await response.began.wait()
            before = -1

            async def has_stopped() -> bool:
                nonlocal before
                stopped, before = before == sent, sent
                return stopped

            await eventually(has_stopped)
            # The kernel has some MiB of it, and the loop less than one.
            assert len(response.body) < 1 << 20
            assert sent < size
            connection.resume_reading()
            await response.ended.wait()
            assert (len(response.body), response.error) == (size, None)
            assert pool.take_idle(url) is connection

    run(new_loop, main)


@ON_BOTH_LOOPS
def test_large_request_reaches_the_server_whole(new_loop: Loop) -> None:
    body = [bytes(1 << 20) for _ in range(16)]

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        counted = 0
        while counted < 16 << 20:
            counted += len(await reader.read(1 << 20))
        writer.write(OK)
        await reader.read()

    async def main() -> None:
        async with serve(count) as url, UpstreamPool(trust()) as pool:
            connection = await pool.connect(url)
            connection.send(b"POST / HTTP/1.1\r\nContent-Length: 16777216\r\n\r\n", body, got := Response(connection))
            await got.ended.wait()
            assert got.body == b"ok"
            assert pool.take_idle(url) is connection

    run(new_loop, main)


@ON_BOTH_LOOPS
@pytest.mark.parametrize("waits", [False, True])
def test_request_that_is_aborted_ends_at_the_server(new_loop: Loop, *, waits: bool) -> None:
    async def main() -> None:
        noted, closed = asyncio.Event(), asyncio.Event()

        async def note_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\npiece")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            noted.set()

        async with serve(note_end) as url, UpstreamPool(trust()) as pool:
            connection = await pool.connect(url)
            connection.send(GET, (b"",), response := Response(connection))
            await response.began.wait()
            connection.abort(*([closed.set] if waits else []))
            await asyncio.wait_for(noted.wait(), SECONDS)
            if waits:
                await asyncio.wait_for(closed.wait(), SECONDS)
            assert not response.ended.is_set()

    run(new_loop, main)


@ON_BOTH_LOOPS
@pytest.mark.parametrize(
    ("sent", "body", "is_whole"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nall of it", b"all of it", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\na half", b"a half", False),
    ],
)
def test_response_ends_with_the_connection_only_if_it_has_no_length(
    new_loop: Loop, sent: bytes, body: bytes, *, is_whole: bool
) -> None:
    async def say(sent: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)

    async def main() -> None:
        async with serve(partial(say, sent)) as url, UpstreamPool(trust()) as pool:
            response = await ask(await pool.connect(url))
            assert (response.body, response.error is None) == (body, is_whole)

    run(new_loop, main)
