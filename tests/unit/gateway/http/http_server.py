"""A server of `gateway.http` in the test's own process, and raw clients for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import Exchange, RequestHandling
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener

Answer = Callable[[AwaitedExchange], Awaitable[None]]
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
MANY = ConnectionCaps(total=100, per_peer=100)
PATIENT = ConnectionTimes(sweep_seconds=0.01)


class HttpServer(NamedTuple):
    """A listener, its address, and the table of its connections."""

    listener: HttpListener
    table: ConnectionTable
    port: int


async def echo(awaited: AwaitedExchange) -> None:
    """Answer with method, path and body of the request."""
    pieces = [f"{awaited.exchange.head.method} {awaited.exchange.head.path} ".encode()]
    while piece := await awaited.read():
        pieces.append(piece)
    awaited.exchange.respond(200, b"", b"".join(pieces))


def render_error(status: int, reason: str) -> tuple[bytes, bytes]:
    return b"", f"{status} {reason}".encode()


@asynccontextmanager
async def serve(
    answer: Answer = echo, *, caps: ConnectionCaps = MANY, times: ConnectionTimes = PATIENT
) -> AsyncIterator[HttpServer]:
    """Serve `answer` on a free port of 127.0.0.1."""

    def begin(exchange: Exchange) -> AwaitedExchange:
        return AwaitedExchange(exchange, answer)

    table = ConnectionTable(caps, times.sweep_seconds)
    listener = HttpListener(RequestHandling(begin, render_error), table, times)
    await listener.bind("127.0.0.1", 0)
    try:
        yield HttpServer(listener, table, listener.sockets[0].getsockname()[1])
    finally:
        listener.unbind()
        finishing = asyncio.create_task(listener.finish())
        _, late = await asyncio.wait({finishing}, timeout=1)
        for task in late:
            task.cancel()


class RawClient:
    """A connection that sends and receives bytes as the test gives them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[bytes, bytes]:
        """Return head and body of the next response, whose length its head states."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head, await self.reader.readexactly(int(length.partition(b":")[2]))

    async def rest(self) -> bytes:
        """Return what comes until the server closes the connection."""
        return await asyncio.wait_for(self.reader.read(), 20)


@asynccontextmanager
async def connect(server: HttpServer) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
