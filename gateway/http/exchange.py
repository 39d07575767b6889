"""One request of a client and the response to it, as a handler sees them.

The body of the request is read in pieces, and a client that sends faster than the handler reads is stopped. The
response is sent whole with `respond`, or piece by piece with `start`, `write`, `drain` and `finish`. The handler's
task is cancelled when the client hangs up.
"""

import asyncio
import functools
import time
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Protocol

from gateway.http.headers import Field, encode_fields
from gateway.http.request_head import InvalidRequestError, RequestHead

_UNREAD_BODY_BYTES: Final = 256 << 10
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyTimeoutError(Exception):
    """The next piece of the request body did not come in time."""


class ClientConnection(Protocol):
    """The connection of the client, as the exchange uses it."""

    @property
    def is_blocked(self) -> bool:
        """True while the client does not read what was sent."""

    def write(self, data: bytes) -> None:
        """Send `data`, after what was sent before."""

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""

    def wait_for_body(self, *, waits: bool) -> None:
        """Begin or end to measure the pause between two pieces of the body."""

    def pause_body(self) -> None:
        """Stop reading from the client."""

    def resume_body(self) -> None:
        """Read from the client again."""

    def break_off(self, *, reset: bool) -> None:
        """Close the connection; with `reset`, so that it does not look like an orderly end."""


class Exchange:
    """A request, and the state of its response."""

    __slots__ = (
        "_body_error", "_chunked", "_connection", "_pieces", "_reader", "_unread_bytes",
        "body_complete", "finished", "head", "keep_alive", "peer", "started",
    )  # fmt: skip

    def __init__(self, head: RequestHead, connection: ClientConnection, peer: str) -> None:
        self.head = head
        self.peer = peer
        """The address of the client."""
        self.body_complete = False
        self.keep_alive = head.keep_alive
        """The connection takes another request after this one."""
        self.started = False
        """The head of the response was sent."""
        self.finished = False
        """The response was sent whole."""
        self._connection = connection
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._body_error: Exception | None = None
        self._chunked = False

    # The body of the request

    async def read(self) -> bytes:
        """Return the next piece of the request body; b"" at its end.

        Raises InvalidRequestError and BodyTimeoutError.
        """
        while not self._pieces:
            if self._body_error:
                raise self._body_error
            if self.body_complete:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            self._connection.wait_for_body(waits=True)
            try:
                await self._reader
            finally:
                self._reader = None
                self._connection.wait_for_body(waits=False)
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._unread_bytes > _UNREAD_BODY_BYTES:
            self._connection.resume_body()
        self._unread_bytes = 0
        return piece

    def send_continue(self) -> None:
        """Ask the client for the body, if it waits for that."""
        if self.head.expects_continue and not self.body_complete and not self.started:
            self._connection.write(_CONTINUE)

    # The response

    def respond(self, status: int, fields: Iterable[Field], body: bytes) -> None:
        """Send the whole response."""
        self._send_head(status, (*fields, (b"content-length", b"%d" % len(body))), body)
        self.finished = True

    def start(self, status: int, fields: Iterable[Field]) -> None:
        """Send the head of a response whose length is not known."""
        self._chunked = not self.head.is_http_1_0
        framing: tuple[Field, ...] = ((b"transfer-encoding", b"chunked"),) if self._chunked else ()
        self._send_head(status, (*fields, *framing))

    def write(self, data: bytes) -> None:
        """Send a piece of the response."""
        if not data or self.head.method == "HEAD":
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    @property
    def is_blocked(self) -> bool:
        """True while the client does not read what was written."""
        return self._connection.is_blocked

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        await self._connection.drain()

    def finish(self) -> None:
        """End the response."""
        if self._chunked and self.head.method != "HEAD":
            self._connection.write(b"0\r\n\r\n")
        self.finished = True

    def break_off(self) -> None:
        """Close the connection, so that the client sees that the response is not whole."""
        # A chunked response shows by itself that it ended early; without chunks only a reset does.
        self._connection.break_off(reset=self.started and not self._chunked)

    # Called by the connection

    def feed(self, piece: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(piece)
        before, self._unread_bytes = self._unread_bytes, self._unread_bytes + len(piece)
        if before <= _UNREAD_BODY_BYTES < self._unread_bytes:
            self._connection.pause_body()
        self._wake_reader()

    def end_body(self) -> None:
        """Note the end of the body."""
        self.body_complete = True
        self._wake_reader()

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Make the handler's next `read` raise `error`."""
        self._body_error = error
        self.keep_alive = False
        self._wake_reader()

    @property
    def waits_for_body(self) -> bool:
        """True while the handler waits for the next piece of the body."""
        return self._reader is not None

    def _wake_reader(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    def _send_head(self, status: int, fields: tuple[Field, ...], body: bytes = b"") -> None:
        self.started = True
        # What is left of a body that was not read would be taken for the next request.
        self.keep_alive = self.keep_alive and self.body_complete
        if not self.keep_alive:
            fields = (*fields, (b"connection", b"close"))
        head = encode_fields(_status_line(status, int(time.time())), fields)
        self._connection.write(head + body if self.head.method != "HEAD" else head)


@functools.lru_cache(maxsize=64)
def _status_line(status: int, unix_seconds: int) -> bytes:
    """Return the first line of a response and its Date."""
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {phrase}\r\nDate: {formatdate(unix_seconds, usegmt=True)}\r\n".encode()
