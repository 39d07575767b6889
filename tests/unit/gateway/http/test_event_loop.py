"""Both sides on uvloop, as the proxy runs: what is sent at once, and what is known before the loop has read it."""

import asyncio
import select
import socket
from collections.abc import Sequence
from contextlib import closing

import uvloop

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.headers import Headers
from gateway.http.upstream_connection import UpstreamBrokeOffError
from gateway.http.upstream_pool import UpstreamPool
from tests.unit.gateway.http.http_server import GET, serve

SECONDS = 20


def is_readable(sock: socket.socket) -> bool:
    """Wait for data or the end without the loop, which is blocked meanwhile."""
    return bool(select.select([sock], [], [], SECONDS)[0])


def test_piece_of_a_response_is_sent_before_the_call_returns() -> None:
    async def main() -> None:
        sent: asyncio.Future[tuple[bool, bytes]] = asyncio.get_running_loop().create_future()

        async def stream(awaited: AwaitedExchange) -> None:
            awaited.exchange.start(200, b"")
            awaited.exchange.write(b"token")
            sent.set_result((is_readable(client), client.recv(1 << 16)))
            awaited.exchange.finish()

        async with serve(stream) as server:
            with closing(socket.create_connection(("127.0.0.1", server.port))) as client:
                client.settimeout(SECONDS)
                client.sendall(GET)
                readable, received = await asyncio.wait_for(sent, SECONDS)
                assert readable
                assert received.startswith(b"HTTP/1.1 200 OK\r\n")

    uvloop.run(main())


class _Response:
    """A receiver that waits for the end."""

    def __init__(self) -> None:
        self.body = b""
        self.ended = asyncio.Event()

    def take_head(self, status: int, headers: Headers, piece: bytes) -> None:
        assert (status, headers.fields) == (200, [])
        self.body += piece

    def take_response(self, piece: bytes) -> None:
        self.body += piece

    def end_response(self) -> None:
        self.ended.set()

    def fail_response(self, error: UpstreamBrokeOffError) -> None:
        raise error


def test_kept_connection_that_the_upstream_has_closed_is_not_used_even_if_the_loop_has_not_read_that() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with UpstreamPool() as pool:
                connection = await pool.connect(url)
                accepted, _ = listening.accept()
                response = _Response()
                no_body: Sequence[bytes] = (b"",)
                connection.send(b"GET / HTTP/1.1\r\n\r\n", no_body, response, at_once=True)
                assert is_readable(accepted)
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await asyncio.wait_for(response.ended.wait(), SECONDS)
                assert response.body == b"ok"
                assert pool.take_idle(url) is connection
                connection.send(b"GET / HTTP/1.1\r\n\r\n", no_body, again := _Response(), at_once=True)
                assert is_readable(accepted)
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await asyncio.wait_for(again.ended.wait(), SECONDS)
                accepted.close()
                assert pool.take_idle(url) is None

    uvloop.run(main())
