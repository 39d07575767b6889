"""The endpoint of a kubelet that forwards ports over WebSockets, by way of the API server.

The messages are those of a kubelet: the first byte is the channel, and each channel begins with the port. A kubelet
connects to loopback of the pod; this one connects to the address of the pod, at which the port of a Service is served.
As with containerd, the end of the pod's direction ends the other a second later. kubectl speaks SPDY: it gets no port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from tests.controlplane.streams import CHUNK_BYTES

PROTOCOL = "v4.channel.k8s.io"
END_SECONDS = 1.0
"""Time that the other direction has to end as well, after which all of it is closed."""
DATA, ERROR = b"\x00", b"\x01"


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
            problem = f"error forwarding port {port} to pod {names['pod']}: {error}"
            await socket.send_bytes(ERROR + problem.encode())
            await socket.close()
            return socket
        await _pass_on(socket, reader, writer)
        return socket

    return handle


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
