"""The server byte by byte: framing, order, limits in time and number, hang-ups, and its orderly end."""

import asyncio
import functools
import resource
import socket
from contextlib import AsyncExitStack, closing, suppress

import pytest

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestHandling
from gateway.http.limits import HEAD_BYTES, ConnectionCaps, ConnectionTimes, connection_caps
from gateway.http.listener import HttpListener
from gateway.http.request_head import InvalidRequestError
from tests.support.eventually import eventually
from tests.unit.gateway.http.http_server import GET, MANY, HttpServer, connect, echo, render_error, serve

POST = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"


class Waiting:
    """A handler that waits until it is released, and notes that it began or was cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.released = asyncio.Event()

    async def __call__(self, awaited: AwaitedExchange) -> None:
        self.began.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await echo(awaited)


# Framing


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with serve() as server, connect(server) as client:
        await client.send(GET + POST + b"\r\n" + GET)
        assert [(await client.answer())[1] for _ in range(3)] == [b"GET /a ", b"POST /b abc", b"GET /a "]


async def test_request_may_come_byte_by_byte() -> None:
    async with serve() as server, connect(server) as client:
        for byte in POST:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        head, body = await client.answer()
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"POST /b abc")


async def test_data_behind_a_chunked_body_ends_the_connection_after_the_response() -> None:
    async with serve() as server, connect(server) as client:
        head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head + b"1\r\na\r\n0\r\n\r\n" + GET)
        assert (await client.answer())[1] == b"POST /c a"
        assert await client.rest() == b""


async def test_chunked_request_keeps_the_connection() -> None:
    async with serve() as server, connect(server) as client:
        await client.send(b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await client.send(b"0\r\n\r\n")
        assert (await client.answer())[1] == b"POST /c a"
        await client.send(GET)
        assert (await client.answer())[1] == b"GET /a "


async def test_head_request_is_answered_without_a_body() -> None:
    async def stream(awaited: AwaitedExchange) -> None:
        awaited.exchange.start(200, b"")
        awaited.exchange.write(b"body")
        awaited.exchange.finish()

    async with serve() as server, connect(server) as client:
        await client.send(GET.replace(b"GET", b"HEAD") + GET)
        assert (await client.reader.readuntil(b"\r\n\r\n")).count(b"content-length: 8") == 1
        assert (await client.answer())[1] == b"GET /a "
    async with serve(stream) as server, connect(server) as client:
        await client.send(GET.replace(b"GET", b"HEAD").replace(b"Host", b"Connection: close\r\nHost"))
        assert (await client.rest()).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_stream_is_chunked_but_for_http_1_0(version: bytes) -> None:
    async def stream(awaited: AwaitedExchange) -> None:
        awaited.exchange.start(200, b"X: 1\r\n")
        awaited.exchange.write(b"one")
        awaited.exchange.write(b"")
        awaited.exchange.write(b"two")
        awaited.exchange.finish()

    async with serve(stream) as server, connect(server) as client:
        await client.send(GET.replace(b"1.1", version).replace(b"Host", b"Connection: close\r\nHost"))
        body = (await client.rest()).partition(b"\r\n\r\n")[2]
    assert body == (b"onetwo" if version == b"1.0" else b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_body_is_asked_for_only_when_the_handler_wants_it() -> None:
    async def refuse(awaited: AwaitedExchange) -> None:
        awaited.exchange.respond(401, b"", b"no")

    async def accept(awaited: AwaitedExchange) -> None:
        awaited.exchange.send_continue()
        await echo(awaited)

    request = b"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    async with serve(refuse) as server, connect(server) as client:
        await client.send(request)
        assert (await client.rest()).startswith(b"HTTP/1.1 401 "), "and closed, for the body may still come"
    async with serve(accept) as server, connect(server) as client:
        await client.send(request)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"ab")
        assert (await client.answer())[1] == b"POST /d ab"


async def test_response_before_the_end_of_the_body_reaches_a_client_that_still_sends() -> None:
    async def refuse(awaited: AwaitedExchange) -> None:
        await awaited.read()
        awaited.exchange.respond(413, b"", b"too much")

    async with serve(refuse) as server, connect(server) as client:
        await client.send(b"POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n")
        for _ in range(64):
            await client.send(bytes(1 << 20))
        assert (await client.answer())[1] == b"too much"


async def test_client_that_sends_faster_than_the_handler_reads_is_stopped() -> None:
    waiting = Waiting()
    async with serve(waiting) as server, connect(server) as client:
        client.writer.transport.set_write_buffer_limits(0)
        await client.send(b"POST /f HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n")
        client.writer.write(bytes(64 << 20))
        await waiting.began.wait()
        sending = asyncio.create_task(client.writer.drain())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sending), 0.5)
        waiting.released.set()
        await sending
        assert len((await client.answer())[1]) > 64 << 20


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        GET[:-2] + b"X: " + b"x" * HEAD_BYTES,
        GET[:-2] + b"X: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        GET.replace(b"\r\n\r\n", b"\r\nX: \0\r\n\r\n") + GET,
    ],
)
async def test_bytes_that_are_no_request_are_answered_once_and_the_connection_is_closed(sent: bytes) -> None:
    async with serve() as server, connect(server) as client:
        await client.send(sent)
        answers = await client.rest()
    assert answers.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answers.count(b"HTTP/1.1 4") == 1
    assert b"connection: close\r\n" in answers


async def test_empty_lines_are_no_request_but_for_one() -> None:
    """Taken away one by one, those of one read took half a second of the event loop."""
    async with serve() as server, connect(server) as client:
        await client.send(b"\r\n" * (64 << 10))
        assert (await client.answer())[0].startswith(b"HTTP/1.1 400")
        assert await client.rest() == b""


async def test_handler_that_fails_is_a_500_and_breaks_off_what_it_began() -> None:
    async def fail(awaited: AwaitedExchange) -> None:
        if awaited.exchange.head.method == "GET":
            awaited.exchange.start(200, b"")
            awaited.exchange.write(b"half")
        raise ValueError("a defect")

    async with serve(fail) as server:
        async with connect(server) as client:
            await client.send(POST)
            assert (await client.answer())[0].startswith(b"HTTP/1.1 500 ")
        async with connect(server) as client:
            await client.send(GET)
            assert (await client.rest()).endswith(b"4\r\nhalf\r\n")


# Hang-ups and times


@pytest.mark.parametrize("half", [False, True])
async def test_client_that_hangs_up_cancels_its_request(half: bool) -> None:
    waiting = Waiting()
    async with serve(waiting) as server, connect(server) as client:
        await client.send(POST)
        await waiting.began.wait()
        client.writer.write_eof() if half else client.writer.transport.abort()
        await asyncio.wait_for(waiting.cancelled.wait(), 30)
        await eventually(lambda: server.table.accepted == 0)


async def test_head_that_does_not_come_in_time_is_refused() -> None:
    times = ConnectionTimes(head_seconds=0.1, sweep_seconds=0.01)
    async with serve(times=times) as server:
        async with connect(server) as client:
            await client.send(b"GET / HTTP/1.1\r\n")
            assert (await client.answer())[0].startswith(b"HTTP/1.1 408 ")
            assert await client.rest() == b""
        async with connect(server) as client:
            assert await client.rest() == b"", "nothing sent at all"
        async with connect(server) as client:
            await client.send(b"\r\n")
            assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


async def test_idle_connection_is_closed_in_time_and_not_while_it_has_a_request() -> None:
    waiting = Waiting()
    times = ConnectionTimes(idle_seconds=0.1, head_seconds=0.1, body_pause_seconds=0.1, sweep_seconds=0.01)
    async with serve(waiting, times=times) as server, connect(server) as client:
        await client.send(POST)
        await waiting.began.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.5)
        waiting.released.set()
        assert (await client.answer())[1] == b"POST /b abc"
        assert await client.rest() == b""


@pytest.mark.parametrize("is_stream", [True, False])
async def test_client_that_never_reads_is_ended(is_stream: bool) -> None:
    ended = asyncio.Event()

    async def pour(awaited: AwaitedExchange) -> None:
        try:
            if not is_stream:
                awaited.exchange.respond(200, b"", bytes(64 << 20))
                return
            awaited.exchange.start(200, b"")
            while True:
                awaited.exchange.write(bytes(1 << 16))
                await awaited.drain()
        finally:
            ended.set()

    times = ConnectionTimes(write_seconds=0.2, linger_seconds=0.2, sweep_seconds=0.01)
    async with serve(pour, times=times) as server:
        with closing(socket.create_connection(("127.0.0.1", server.port))) as silent:
            silent.sendall(GET)
            await asyncio.wait_for(ended.wait(), 60)
            await eventually(lambda: server.table.accepted == 0)


async def test_client_that_reads_slowly_is_not_ended() -> None:
    async def pour(awaited: AwaitedExchange) -> None:
        awaited.exchange.respond(200, b"", bytes(16 << 20))

    times = ConnectionTimes(write_seconds=1.5, linger_seconds=1.5, idle_seconds=1.5, sweep_seconds=0.01)
    async with serve(pour, times=times) as server:

        async def is_read() -> bool:
            got = 0
            async with connect(server) as client:
                await client.send(GET.replace(b"Host", b"Connection: close\r\nHost"))
                with suppress(ConnectionError):
                    while data := await client.reader.read(1 << 20):
                        got += len(data)
                        await asyncio.sleep(0.05)
            return got > 16 << 20

        # A busy machine may stop the client for longer than it may pause.
        await eventually(is_read)


# Caps


async def test_idle_connections_of_one_address_make_room_for_its_next() -> None:
    async with serve(caps=ConnectionCaps(total=100, per_peer=3)) as server, AsyncExitStack() as stack:
        first, *_ = [await stack.enter_async_context(connect(server)) for _ in range(3)]
        await eventually(lambda: server.table.accepted == 3)
        async with connect(server) as client:
            await client.send(GET)
            assert (await client.answer())[1] == b"GET /a "
        assert await first.rest() == b"", "the longest idle is closed"


@pytest.mark.parametrize("caps", [ConnectionCaps(total=2, per_peer=9), ConnectionCaps(total=9, per_peer=2)])
async def test_connection_beyond_the_caps_is_refused_while_all_others_have_requests(caps: ConnectionCaps) -> None:
    waiting = Waiting()
    async with serve(waiting, caps=caps) as server, connect(server) as one, connect(server) as two:
        for client in (one, two):
            await client.send(POST)
        await waiting.began.wait()
        await eventually(lambda: server.table.accepted == 2)
        async with connect(server) as third:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await third.answer()
        waiting.released.set()
        assert (await one.answer())[1] == (await two.answer())[1] == b"POST /b abc"


def test_caps_keep_descriptors_back_for_engines_and_control() -> None:
    for limit in (64, 256, 1024, 10240, 1 << 20, 1 << 62):
        caps = connection_caps(limit)
        assert 2 * caps.total <= limit - min(1024, limit // 8)
        assert caps.per_peer == caps.total // 2
    assert connection_caps(10240) == (ConnectionCaps(4608, 2304, soft_total=4096))


async def test_listener_survives_a_lack_of_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serve() as server:
        clients = []
        with socket.socket() as probe:
            lowest = probe.fileno()
        try:
            clients = [socket.socket() for _ in range(3)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 4, limits[1]))
            for client in clients:
                client.connect(("127.0.0.1", server.port))
            await eventually(lambda: server.listener.paused)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with connect(server) as served:
            await served.send(GET)
            assert (await served.answer())[1] == b"GET /a "
        for each in clients:
            each.close()


# End


async def test_unbound_listener_ends_its_requests_and_closes_idle_connections() -> None:
    waiting = Waiting()
    async with serve(waiting) as server, connect(server) as busy, connect(server) as idle:
        await busy.send(POST)
        await waiting.began.wait()
        server.listener.unbind()
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        finishing = asyncio.create_task(server.listener.finish())
        waiting.released.set()
        head, body = await busy.answer()
        assert (b"connection: close" in head, body) == (True, b"POST /b abc")
        await asyncio.wait_for(finishing, 60)


async def test_connections_that_give_way_as_soon_as_they_are_accepted_leave_nothing_behind() -> None:
    """A flood beside requests that run for long: each takes the place of the one before, in one pass of the loop."""
    waiting = Waiting()
    async with serve(waiting, caps=ConnectionCaps(total=9, per_peer=2)) as server, connect(server) as busy:
        await busy.send(POST)
        await waiting.began.wait()
        flood = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        await eventually(lambda: server.table.accepted == 2)
        for client in flood:
            client.settimeout(0)
        for client in flood[:-1]:
            await eventually(functools.partial(is_closed, client))
            client.close()
        flood[-1].close()
        server.listener.unbind()
        waiting.released.set()
        assert (await busy.answer())[1] == b"POST /b abc"
        await asyncio.wait_for(server.listener.finish(), 10)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


class _LateAnswer:
    """Answers half a second after the end of the body, or at once that it did not come."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        del piece
        if is_last:
            asyncio.get_running_loop().call_later(0.5, self._exchange.respond, 200, b"", b"late")

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        self._exchange.respond(408, b"", type(error).__name__.encode())

    def resume_writing(self) -> None:
        """Do nothing: the answer is short."""

    def stop(self) -> None:
        """Do nothing: the answer comes soon."""

    def hang_up(self) -> None:
        """Do nothing: the answer is lost."""


async def test_whole_body_that_came_in_pieces_has_no_deadline() -> None:
    times = ConnectionTimes(sweep_seconds=0.01, body_pause_seconds=0.2)
    table = ConnectionTable(MANY, times.sweep_seconds)
    listener = HttpListener(RequestHandling(_LateAnswer, render_error), table, times)
    await listener.bind("127.0.0.1", 0)
    try:
        async with connect(HttpServer(listener, table, listener.port)) as client:
            await client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
            await eventually(lambda: table.accepted == 1)
            await asyncio.sleep(0.05)
            await client.send(b"b")
            head, body = await client.answer()
            assert (head.split()[1], body) == (b"200", b"late")
    finally:
        listener.unbind()
        await listener.finish()
