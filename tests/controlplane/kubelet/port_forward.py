"""The endpoint of a kubelet that forwards ports, which `pomona` reaches by way of the API server, over WebSockets.

The messages are those of a kubelet: the first byte is the channel, and each channel begins with the port. A kubelet
connects to loopback of the pod; this one connects to the address of the pod, at which the port of a Service is served.
As with containerd, the end of the pod's connection reaches the client a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

PROTOCOL = "v4.channel.k8s.io"
CHUNK_BYTES = 1 << 16
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
            await socket.send_bytes(ERROR + f"error forwarding port {port} to pod {names['pod']}: {error}".encode())
            await socket.close()
            return socket
        await _pass_on(socket, reader, writer)
        return socket

    return handle


def refuse_with(find_address: FindAddress) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of what kubectl asks for, SPDY by way of the API server: a refusal with the way out."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        address = await find_address(request.match_info["namespace"], request.match_info["pod"])
        message = f"this process kubelet speaks no SPDY, which kubectl asks for: ask the pod at its address {address}"
        # kubectl prints the message of a Status, and nothing of a plain text.
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": 501}
        return web.json_response(status, status=501)

    return refuse


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
