"""Clients of chat completions on bare uvloop: short requests back to back, streams of tokens, and large bodies.

They look for the end of a response and parse nothing else, so that one core of a client keeps a proxy's core busy.
"""

import asyncio
import itertools
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

TOKEN: Final = "benchmark"  # noqa: S105 - of a service that lives for a minute
_CHUNKED_END: Final = b"0\r\n\r\n"
_SENT: Final = re.compile(rb'"content":"(\d+)"')
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_HEAD: Final = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    "Content-Type: application/json\r\nContent-Length: "
).encode()


def chat_request(body: bytes) -> bytes:
    """Return a request with its head."""
    return b"%s%d\r\n\r\n%s" % (_HEAD, len(body), body)


SHORT_REQUEST: Final = chat_request(
    b'{"model":"tiny","messages":[{"role":"system","content":"You are a helpful assistant."},'
    b'{"role":"user","content":"Say hello in one word, please."}],"temperature":0.7,"max_tokens":16}'
)


class UnexpectedResponseError(Exception):
    """The response is no success, or the connection has ended within it."""


class _Client(asyncio.Protocol):
    """A connection on which one request is under way; `done` gets the end of the response or its failure."""

    def __init__(self) -> None:
        self._received = b""
        self._length_bytes = -1
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not its subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that is under way."""
        if not self.done.done():
            self.done.set_exception(UnexpectedResponseError(f"connection ended: {exc}"))
            self.done.exception()  # seen: a client that nobody waits for any more has nothing to say

    def _take_response(self, data: bytes) -> bytes | None:
        """Take data; return the response if it is complete."""
        self._received += data
        if self._length_bytes < 0:
            head, separator, _ = self._received.partition(b"\r\n\r\n")
            if not separator:
                return None
            if b" 200 " not in head[:13]:
                self.transport.abort()
                raise UnexpectedResponseError(self._received[:200].decode(errors="replace"))
            length = _LENGTH.search(head + b"\r\n")
            self._length_bytes = len(head) + 4 + int(length[1]) if length else 0
        if self._length_bytes:
            complete = len(self._received) >= self._length_bytes
        else:
            complete = self._received.endswith(_CHUNKED_END)
        if not complete:
            return None
        response, self._received, self._length_bytes = self._received, b"", -1
        return response


class RepeatedRequests(_Client):
    """Requests with short answers, each sent as soon as the last is answered."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        super().__init__()
        self.answered = 0
        self._requests = requests
        self._stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        super().connection_made(transport)
        self.transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Send the next request after a response."""
        if self._take_response(data) is None:
            return
        self.answered += 1
        if not self._stopping:
            self.transport.write(next(self._requests))
        elif not self.done.done():
            self.done.set_result(None)

    async def stop(self) -> None:
        """Send no more, wait for the last response, and close."""
        self._stopping = True
        await self.done
        self.transport.close()


class TokenStream(_Client):
    """One connection for streams; `on_token` gets the times of sending and of arrival of each token, in nanoseconds."""

    def __init__(self, on_token: Callable[[int, int], None]) -> None:
        super().__init__()
        self._on_token = on_token
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def request(self, tokens: int, *, idle: bool = False) -> None:
        """Request a stream of `tokens`, or one that is idle after its first."""
        self.done = asyncio.get_running_loop().create_future()
        stream = f'{{"model":"tiny","stream":true,"max_tokens":{tokens},"idle":{"true" if idle else "false"}}}'
        self.transport.write(chat_request(stream.encode()))

    def data_received(self, data: bytes) -> None:
        """Note the tokens in `data`."""
        now = time.monotonic_ns()
        for sent in _SENT.findall(data):
            self._on_token(int(sent), now)
        if not self.started.done():
            self.started.set_result(None)
        if self._take_response(data) is not None and not self.done.done():
            self.done.set_result(None)


async def open_stream(port: int, on_token: Callable[[int, int], None], address: str = "127.0.0.1") -> TokenStream:
    """Connect a client for streams from an address of this machine."""
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: TokenStream(on_token), "127.0.0.1", port, local_addr=(address, 0))
    return stream


async def send_short_requests(
    port: int, connections: int, seconds: float, requests: Sequence[bytes] = (SHORT_REQUEST,)
) -> int:
    """Send requests on many connections for `seconds`, one after the other, and return the number of responses."""
    loop = asyncio.get_running_loop()
    turns = itertools.cycle(requests)
    clients = [
        (await loop.create_connection(lambda: RepeatedRequests(turns), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    await asyncio.gather(*(client.stop() for client in clients))
    return sum(client.answered for client in clients)


def open_idle_connections(port: int, count: int) -> list[socket.socket]:
    """Open connections on which no request is sent, and return those that were accepted."""
    connections = []
    for _ in range(count):
        try:
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        except OSError:
            continue
    return connections


def send_body(port: int, body: bytes) -> int:
    """Send one request with `body` on a blocking socket, and return the status of the response."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        try:
            connection.sendall(_HEAD + b"%d\r\n\r\n" % len(body))
            connection.sendall(body)
        except ConnectionError:
            pass  # refused before it was read; the response says so
        head = b""
        while b"\r\n" not in head:
            data = connection.recv(1 << 16)
            if not data:
                return 0
            head += data
    return int(head.split(b" ", 2)[1])
