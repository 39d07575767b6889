"""The endpoints of a kubelet that forward ports, by way of the API server: WebSockets for `pomona`, SPDY for kubectl.

The messages are those of a kubelet; over WebSockets the first byte is the channel, and each channel begins with the
port. A kubelet connects to loopback of the pod; this one connects to the address of the pod, at which the port of a
Service is served. As with containerd, the end of one direction ends the other a second later, if it is the pod's of a
WebSocket or the client's of SPDY.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from tests.controlplane.kubelet import spdy
from tests.controlplane.streams import CHUNK_BYTES, copy

PROTOCOL = "v4.channel.k8s.io"
END_SECONDS = 1.0
"""Time that the other direction has to end as well, after which all of it is closed."""
DATA, ERROR = b"\x00", b"\x01"

UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
    b"X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n"
)

FindAddress = Callable[[str, str], Awaitable[str]]
"""Returns the address of a pod, by its namespace and name. Raises LookupError."""


def handle_with(find_address: FindAddress) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of `/portForward/{namespace}/{pod}`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        names, port = request.match_info, int(request.query["port"])
        address = await find_address(names["namespace"], names["pod"])
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for channel in (DATA, ERROR):
            await socket.send_bytes(channel + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection(address, port)
        except OSError as error:
            await socket.send_bytes(ERROR + describe(error, port, names["pod"]))
            await socket.close()
            return socket
        await _pass_on(socket, reader, writer)
        return socket

    return handle


def upgrade_with(find_address: FindAddress) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of what kubectl asks for: an upgrade to SPDY, by way of the API server."""

    async def handle(request: web.Request) -> web.StreamResponse:
        pod = request.match_info["pod"]
        address = await find_address(request.match_info["namespace"], pod)
        transport, reader = request.transport, asyncio.StreamReader(CHUNK_BYTES)
        assert transport is not None
        # The connection is no longer one of HTTP, and aiohttp can take over none but those of WebSockets.
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        writer.write(UPGRADED)
        try:
            await SpdyForwarder(spdy.Connection(reader, writer), address, pod).run()
        finally:
            request.protocol.connection_lost(None)  # closes the connection, too
        return web.Response()

    return handle


class SpdyForwarder:
    """Connections to a pod, each of which is two streams: the first for an error, the second for the bytes.

    Args:
        connection: the streams.
        address: the pod's address.
        pod: its name, for errors.
    """

    def __init__(self, connection: spdy.Connection, address: str, pod: str) -> None:
        self._connection = connection
        self._address = address
        self._pod = pod
        self._error_streams: dict[str, int] = {}
        """By number of the request, until the second stream is opened."""
        self._forwarding: dict[int, tuple[asyncio.StreamReader, asyncio.Task[None]]] = {}
        """By second stream, what the client sends on it, and the task that passes it on."""

    async def run(self) -> None:
        """Forward until the client closes the connection."""
        async for frame in self._connection.read():
            if frame.kind == spdy.OPEN:
                self._open(frame)
            elif frame.stream in self._forwarding:
                sent, task = self._forwarding[frame.stream]
                if frame.kind == spdy.RESET:
                    task.cancel()
                    continue
                sent.feed_data(frame.payload)
                if frame.flags & spdy.LAST:
                    sent.feed_eof()
        for _, task in self._forwarding.values():
            task.cancel()

    def _open(self, frame: spdy.Frame) -> None:
        headers = self._connection.accept(frame)
        request, stream = headers["requestid"], frame.stream
        if headers["streamtype"] == "error":
            self._error_streams[request] = stream
            return
        sent = asyncio.StreamReader()
        forward = self._forward(sent, stream, self._error_streams.pop(request), int(headers["port"]))
        task = asyncio.create_task(forward)
        self._forwarding[stream] = sent, task
        task.add_done_callback(lambda _: self._forwarding.pop(stream))

    async def _forward(self, sent: asyncio.StreamReader, stream: int, error_stream: int, port: int) -> None:
        problem = b""
        try:
            reader, writer = await asyncio.open_connection(self._address, port)
            sending = asyncio.create_task(copy(sent, writer))
            # kubectl often says no more than this of a client that is gone.
            end, loop = writer.transport.abort, asyncio.get_running_loop()
            sending.add_done_callback(lambda _: loop.call_later(END_SECONDS, end))
            try:
                while data := await reader.read(CHUNK_BYTES):
                    await self._connection.send(stream, data)
            finally:
                sending.cancel()
                writer.close()
        except OSError as error:
            problem = describe(error, port, self._pod)
        with contextlib.suppress(ConnectionError):  # the client may be gone
            await self._connection.send(error_stream, problem, last=True)
            await self._connection.send(stream, last=True)


def describe(error: OSError, port: int, pod: str) -> bytes:
    """Return what the client is told of a connection that failed."""
    return f"error forwarding port {port} to pod {pod}: {error}".encode()


async def _pass_on(socket: web.WebSocketResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def answer() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await socket.send_bytes(DATA + data)
        await asyncio.sleep(END_SECONDS)
        await socket.close()

    answering = asyncio.create_task(answer())
    try:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY and message.data[:1] == DATA:
                writer.write(message.data[1:])
                await writer.drain()
    finally:
        answering.cancel()
        await asyncio.wait({answering})
        writer.close()
