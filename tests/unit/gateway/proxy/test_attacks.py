"""Attacks over raw sockets on the running proxy: the engine sees no request that the proxy did not authorize and frame.

The kinds of ambiguous messages are those that parsers of HTTP are published to differ in. What reaches the engine is
recorded; that is what counts, whatever the attacker is answered.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.proxy import paths
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.recording_engine import RecordingEngine, recording_engine
from tests.unit.gateway.proxy.running_proxy import ProxyProcess

LINE = b"POST /v1/completions HTTP/1.1\r\n"
TOKEN = b"Authorization: Bearer s3cret-token\r\n"
START = LINE + b"Host: x\r\n" + TOKEN
BODY = b'{"n":1}'
GOOD = START + b"Content-Length: 7\r\n\r\n" + BODY
INNER = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\nContent-Length: 15\r\n\r\n" + b'{"smuggled": 1}'
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"7\r\n" + BODY + b"\r\n0\r\n\r\n"
LIMIT_SECONDS = 20.0
"""For the end of a connection whose client has sent all that it will send."""
QUIET_SECONDS = 0.5
"""A client hangs up if so long nothing comes. Any time is right: it may hang up at any moment."""

REFUSED = {
    # two lengths
    "length and chunks": START + b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + INNER,
    "chunks and length": START + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": START + b"Content-Length: 7\r\nContent-Length: 0\r\n\r\n" + BODY + INNER,
    "list of lengths": START + b"Content-Length: 7, 7\r\n\r\n" + BODY + INNER,
    "length with sign": START + b"Content-Length: +7\r\n\r\n" + BODY + INNER,
    "negative length": START + b"Content-Length: -7\r\n\r\n" + BODY + INNER,
    "hexadecimal length": START + b"Content-Length: 0x7\r\n\r\n" + BODY + INNER,
    "length with underscore": START + b"Content-Length: 1_0\r\n\r\n" + BODY + INNER,
    "length of other digits": START + "Content-Length: \N{FULLWIDTH DIGIT SEVEN}\r\n\r\n".encode() + BODY + INNER,
    "empty length": START + b"Content-Length: \r\n\r\n" + BODY + INNER,
    "length beyond 64 bits": START + b"Content-Length: 18446744073709551623\r\n\r\n" + BODY + INNER,
    "length with blanks": START + b"Content-Length: 7 7\r\n\r\n" + BODY + INNER,
    # transfer codings
    "two codings": START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + CHUNKS + INNER,
    "chunked twice": START + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKS + INNER,
    "chunked not last": START + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS + INNER,
    "other coding": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS + INNER,
    "unknown coding": START + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS + INNER,
    "quoted coding": START + b'Transfer-Encoding: "chunked"\r\n\r\n' + CHUNKS + INNER,
    "coding after vertical tab": START + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS + INNER,
    "blank before colon": START + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS + INNER,
    "tab before colon": START + b"Content-Length\t: 7\r\n\r\n" + BODY + INNER,
    "folded coding": START + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS + INNER,
    "folded field": START + b"X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + INNER,
    "chunks in HTTP/1.0": START.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + INNER,
    # lines and bytes
    "bare line feeds": GOOD.replace(b"\r\n", b"\n"),
    "bare line feed": START + b"X-A: b\nContent-Length: 7\r\n\r\n" + BODY,
    "bare carriage return": START + b"X-A: b\rContent-Length: 7\r\n\r\n" + BODY,
    "carriage returns": GOOD.replace(b"\r\n", b"\r"),
    "end of head without carriage return": START + b"Content-Length: 7\r\n\n" + BODY,
    "NUL in a value": START + b"X-A: b\x00c\r\nContent-Length: 7\r\n\r\n" + BODY,
    "NUL in a name": START + b"X\x00A: b\r\nContent-Length: 7\r\n\r\n" + BODY,
    "control byte": START + b"X-A: \x1b\r\nContent-Length: 7\r\n\r\n" + BODY,
    "no colon": START + b"X-A\r\nContent-Length: 7\r\n\r\n" + BODY,
    "no name": START + b": b\r\nContent-Length: 7\r\n\r\n" + BODY,
    "bracket in a name": START + b"X(A: b\r\nContent-Length: 7\r\n\r\n" + BODY,
    "blank first": b" " + GOOD,
    "blank line within": LINE + b" Host: x\r\n" + TOKEN + b"Content-Length: 7\r\n\r\n" + BODY,
    # request line and host
    "no host": LINE + TOKEN + b"Content-Length: 7\r\n\r\n" + BODY,
    "two hosts": START + b"Host: y\r\nContent-Length: 7\r\n\r\n" + BODY,
    "host with blank": GOOD.replace(b"Host: x", b"Host: x y"),
    "asterisk": GOOD.replace(b"/v1/completions", b"*"),
    "authority": GOOD.replace(b"/v1/completions", b"127.0.0.1:80"),
    "connect": GOOD.replace(b"POST /v1/completions", b"CONNECT 127.0.0.1:80"),
    "two blanks": GOOD.replace(b"POST ", b"POST  "),
    "tab": GOOD.replace(b"POST ", b"POST\t"),
    "lower case": GOOD.replace(b"POST", b"post"),
    "NUL in the path": GOOD.replace(b"/v1/", b"/v1\x00/"),
    "line feed in the path": GOOD.replace(b"/v1/completions", b"/v1/completions\nX: y"),
    "version 0.9": b"POST /v1/completions\r\n\r\n" + INNER,
    "version 1.2": GOOD.replace(b"HTTP/1.1", b"HTTP/1.2"),
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + GOOD,
    "version in lower case": GOOD.replace(b"HTTP/1.1", b"http/1.1"),
    "other protocol": GOOD.replace(b"HTTP/1.1", b"RTSP/1.1"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + GOOD,
    # chunks
    "negative chunk": CHUNKED + b"-7\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "prefixed chunk": CHUNKED + b"0x7\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "chunk without size": CHUNKED + b"\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "chunk of other digits": CHUNKED + b"g\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "chunk beyond 64 bits": CHUNKED + b"10000000000000007\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "chunk longer than it says": CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "chunk with line feeds": CHUNKED + CHUNKS.replace(b"\r\n", b"\n") + INNER,
    "extension with line feed": CHUNKED + b"7;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n" + INNER,
    "endless extension": CHUNKED + b"7;" + b"a" * 100_000,
    "endless trailers": CHUNKED + b"7\r\n" + BODY + b"\r\n0\r\n" + b"X-A: b\r\n" * 10_000,
    "length as a trailer": CHUNKED + b"7\r\n" + BODY + b"\r\n0\r\nContent-Length: 50\r\n\r\n" + INNER,
    "many tiny chunks with extensions": CHUNKED + (b"1;" + b"a" * 60 + b"\r\n \r\n") * 5_000,
    # sizes
    "huge head": START + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "huge target": GOOD.replace(b"/v1/completions", b"/v1/completions?" + b"a" * 100_000),
    "many fields": START + b"".join(b"X-%d: a\r\n" % number for number in range(1000)) + b"\r\n",
    "body that is no object": START + b"Content-Length: 1\r\n\r\n[",
    "head as a body": START + b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER,
}
PASSED = {
    "as it is": GOOD,
    "blank lines first": b"\r\n" + GOOD,
    "chunks": CHUNKED + CHUNKS,
    "chunks with extensions": CHUNKED + b'7;a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n",
    "leading zeros": CHUNKED + b"0007\r\n" + BODY + b"\r\n000\r\n\r\n",
    "trailers": CHUNKED + b"7\r\n" + BODY + b"\r\n0\r\nAuthorization: Bearer x\r\nHost: y\r\nX-Smuggled: 1\r\n\r\n",
    "coding in upper case": CHUNKED.replace(b"chunked", b"CHUNKED") + CHUNKS,
    "absolute form": GOOD.replace(b"/v1/", b"http://10.0.0.1/v1/"),
    "fields of a hop": START + b"Connection: close, X-A\r\nX-A: b\r\nTE: a\r\nContent-Length: 7\r\n\r\n" + BODY,
    "length of a hop": START + b"Connection: Content-Length\r\nContent-Length: 7\r\n\r\n" + BODY,
    "upgrade": START + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 7\r\n\r\n" + BODY,
    "followed by another": GOOD + INNER,
    "followed by garbage": GOOD + b"\x00\r\n\r\n",
}


ANSWER = re.compile(
    rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n(?:[^\r\n]+\r\n)*?content-length: (\d+)\r\n(?:[^\r\n]+\r\n)*\r\n", re.IGNORECASE
)


def statuses(received: bytes) -> list[int]:
    """Return the statuses of the whole answers; there are no other bytes before the last of them ends."""
    codes = []
    while answer := ANSWER.match(received):
        end = answer.end() + int(answer[2])
        if len(received) < end:
            break
        codes.append(int(answer[1]))
        received = received[end:]
    return codes


async def ask(url: str, data: bytes, *, answers: int = 1, pause_at: int = 0) -> list[int]:
    """Send bytes and return the statuses of so many answers, or of all until the proxy closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        for part in (data[:pause_at], data[pause_at:]):
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(statuses(received)) < answers and (piece := await reader.read(1 << 16)):
                received += piece
    except ConnectionError:
        pass  # the proxy has closed while it was sent more
    finally:
        writer.transport.abort()
    return statuses(received)


async def attack(url: str, data: bytes, *, pause_at: int = 0) -> list[int]:
    """Send bytes and return the statuses of all answers; hang up in an orderly way if nothing more comes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        for part in (data[:pause_at], data[pause_at:]):
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        for limit_seconds in (QUIET_SECONDS, LIMIT_SECONDS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_seconds):
                    while piece := await reader.read(1 << 16):
                        received += piece
                    return statuses(received)
            if writer.can_write_eof():
                writer.write_eof()
        raise AssertionError(f"the proxy keeps the connection of {data[:200]!r}")
    except ConnectionError:
        return statuses(received)
    finally:
        writer.transport.abort()


def check_engine(engine: RecordingEngine) -> None:
    """Check that all that the engine saw was authorized, and framed by the proxy."""
    assert engine.faults == []
    for request in engine.requests:
        assert request.path in paths.INFERENCE
        names = [name for name, _ in request.fields]
        assert {name: names.count(name) for name in (b"host", b"content-length")} == {b"host": 1, b"content-length": 1}
        assert not {b"authorization", b"x-smuggled", b"connection", b"te", b"trailer", b"upgrade"} & set(names)
        assert "smuggled" not in json.loads(request.body)


@pytest.mark.parametrize("kind", REFUSED)
async def test_ambiguous_request_is_refused_and_does_not_reach_the_engine(proxy: ProxyProcess, kind: str) -> None:
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        answers = await attack(url, REFUSED[kind])
        assert len(answers) <= 1, "what follows is no request"
        assert all(400 <= status < 500 for status in answers)
        assert engine.requests == []
        assert engine.faults == []
        assert await ask(url, GOOD) == [200]


@pytest.mark.parametrize("kind", PASSED)
@pytest.mark.parametrize("split", [False, True])
async def test_clear_request_reaches_the_engine_once_in_the_form_of_the_proxy(
    proxy: ProxyProcess, kind: str, split: bool
) -> None:
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        data, pause_at = PASSED[kind], len(PASSED[kind]) // 2 if split else 0
        answers = await ask(url, data, answers=2 if kind.startswith("followed") else 1, pause_at=pause_at)
        assert answers[0] == 200
        assert all(status in {400, 401} for status in answers[1:])
        check_engine(engine)
        (request,) = engine.requests
        assert request.body == BODY
        assert request.values(b"host") == [backend.url.removeprefix("http://").encode()]
        assert request.values(b"content-length") == [b"7"]
        assert request.values(b"x-a") == []


async def test_pipelined_requests_reach_the_engine_in_order_and_only_with_a_token(proxy: ProxyProcess) -> None:
    sent = b"".join(START + b"Content-Length: 7\r\n\r\n" + b'{"n":%d}' % number + INNER for number in range(4))
    async with recording_engine() as (engine, backend):
        answers = await ask(await proxy.serve(backend), sent, answers=8)
        assert answers == [200, 401] * 4
        check_engine(engine)
        assert [json.loads(request.body)["n"] for request in engine.requests] == list(range(4))


# Random changes of valid and of invalid requests

SHORT_REFUSED = [request for request in REFUSED.values() if len(request) < 1000]
SEEDS = [*PASSED.values(), *SHORT_REFUSED, INNER + GOOD, GOOD + INNER + GOOD]
BYTES = st.sampled_from(
    [
        *(b"\r\n", b"\r", b"\n", b"\r\n\r\n", b" ", b"\t", b"\x00", b":", b",", b";", b"0", b"7", b"-", b"+", b"\xff"),
        *(b"0\r\n\r\n", b"Content-Length: 7\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n"),
        *(b"{}", b"POST ", b"GET /v1/models HTTP/1.1\r\n\r\n", b"HTTP/1.0", INNER),
    ]
) | st.binary(min_size=1, max_size=4)


@st.composite
def changed(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return a request with some bytes changed, and a place at which its sender pauses."""
    data = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        removed = draw(st.sampled_from([0, 0, 1, 2, 20]))
        data = data[:place] + draw(BYTES | st.just(b"")) + data[place + removed :]
    return data, draw(st.integers(0, len(data)))


@settings(max_examples=8)
@given(attacks=st.lists(changed(), min_size=20, max_size=20))
async def test_changed_requests_reach_the_engine_only_if_authorized(
    proxy: ProxyProcess, attacks: list[tuple[bytes, int]]
) -> None:
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        await asyncio.gather(*(attack(url, data, pause_at=place) for data, place in attacks))
        check_engine(engine)
        assert await ask(url, GOOD) == [200]
        assert (await proxy.client.state()).services[0].stats.in_flight == 0


# Clients that occupy connections


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("sent", [b"", b"P", LINE, START, CHUNKED, CHUNKED + b"7\r\n{", GOOD[:-1]])
async def test_many_clients_that_send_no_whole_request_hinder_no_other(proxy: ProxyProcess, sent: bytes) -> None:
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        with contextlib.ExitStack() as open_connections:
            for _ in range(300):
                open_connections.enter_context(connect(url)).sendall(sent)
            assert await ask(url, GOOD) == [200]
            assert (await proxy.client.state()).services[0].stats.in_flight == 0
        assert len(engine.requests) == 1
        assert engine.faults == []


@pytest.mark.parametrize("reset", [False, True])
async def test_client_may_hang_up_at_any_byte(proxy: ProxyProcess, reset: bool) -> None:
    sent = GOOD + CHUNKED + CHUNKS
    places = random.Random(1).sample(range(len(sent)), 60)  # noqa: S311 - any places
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        for place in places:
            with connect(url) as connection:
                connection.sendall(sent[:place])
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        async def nothing_is_left() -> bool:
            stats = (await proxy.client.state()).services[0].stats
            return stats.in_flight == stats.queued == 0

        await eventually(nothing_is_left)
        assert await ask(url, sent, answers=2) == [200, 200]
        assert all(request.body == BODY for request in engine.requests)


async def test_clients_that_never_read_hinder_no_other(proxy: ProxyProcess) -> None:
    """Each sends requests whose answers it does not read, far more than the buffers of the system hold."""
    async with recording_engine() as (engine, backend):
        url = await proxy.serve(backend)
        with contextlib.ExitStack() as open_connections:
            for _ in range(20):
                client = open_connections.enter_context(connect(url))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.send(GOOD * 2_000)
            assert await ask(url, GOOD) == [200]
            assert (await proxy.client.state()).pid == proxy.process.pid
        check_engine(engine)
