"""One connection to an upstream server: it carries one request and response at a time.

A response is read in pieces; while its reader is slow, the upstream's socket is not read, so that the upstream stops
instead of filling memory.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

import httptools

from gateway.http.headers import Field, Headers
from gateway.http.limits import HEAD_BYTES, HEADER_COUNT

_UNREAD_BYTES: Final = 64 << 10
_FIRST_FINAL_STATUS: Final = 200
_NO_HEADERS: Final = Headers()
_NO_CONTENT: Final = frozenset({204, 304})

BodyPieces: TypeAlias = Sequence[bytes | memoryview]
"""The body of a request; it is not copied together."""


class UpstreamBrokeOffError(Exception):
    """The upstream closed its connection, or sent no HTTP, before its response was whole."""

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered
        """Some of the response had come."""


class UpstreamResponse:
    """A response, from the moment when its request is sent; `head` waits until `status` and `headers` are there."""

    __slots__ = ("_connection", "_error", "_pieces", "_unread_bytes", "_waiter", "complete", "headers", "status")

    def __init__(self, connection: "UpstreamConnection") -> None:
        self.status = 0
        self.headers = _NO_HEADERS
        self.complete = False
        """The whole response has come; some of it may not be read yet."""
        self._connection: UpstreamConnection | None = connection
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamBrokeOffError | None = None

    async def head(self) -> None:
        """Wait for the head. Raises UpstreamBrokeOffError."""
        while not self.status:
            await self._wait()

    def read_nowait(self) -> bytes:
        """Return what has come of the body."""
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._unread_bytes > _UNREAD_BYTES and self._connection:
            self._connection.resume_reading()
        self._unread_bytes = 0
        return data

    async def read(self) -> bytes:
        """Wait for the next piece of the body and return it; b"" at the end. Raises UpstreamBrokeOffError."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        return self.read_nowait()

    def close(self) -> None:
        """Break the connection off, so that the upstream stops its work, unless the response is complete."""
        if self._connection:
            self._connection.abort()
            self._connection = None

    # Called by the connection

    def feed(self, data: bytes) -> bool:
        """Take a piece of the body; return False if no more should be read for now."""
        self._pieces.append(data)
        self._unread_bytes += len(data)
        self._wake()
        return self._unread_bytes <= _UNREAD_BYTES

    def begin(self, status: int, headers: Headers) -> None:
        """Take the head."""
        self.status, self.headers = status, headers
        self._wake()

    def end(self) -> None:
        """Note the end of the body: the connection is free for another request."""
        self.complete = True
        self._connection = None
        self._wake()

    def fail(self, error: UpstreamBrokeOffError) -> None:
        """Note that the rest will not come."""
        self._error = error
        self._connection = None
        self._wake()

    async def _wait(self) -> None:
        if self._error:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """A connection; `on_free` is called when it is ready for another request, `on_end` when it is closed."""

    def __init__(
        self, on_free: Callable[["UpstreamConnection"], None], on_end: Callable[["UpstreamConnection"], None]
    ) -> None:
        self.idle_since = 0.0
        self.was_used = False
        """It has carried a whole response, so the upstream may be closing it as idle while a request is sent."""
        self._on_free = on_free
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._response: UpstreamResponse | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._fields: list[Field] = []
        self._head_bytes = 0
        self._in_head = True
        self._until_close = False
        self._answered = False
        self._message_ended = False
        self._keeps = False

    def send(self, head: bytes, body: BodyPieces) -> UpstreamResponse:
        """Send a request, whose body is kept by reference until it is sent, and return the response to come."""
        response = self._response = UpstreamResponse(self)
        if self._transport is None:
            self._fail("it closed the connection")
            return response
        self._fields = []
        self._head_bytes = 0
        self._in_head = True
        self._until_close = self._answered = self._message_ended = self._keeps = False
        self._transport.writelines([head, *body])
        return response

    def abort(self) -> None:
        """Close the connection at once."""
        self._response = None
        if self._transport:
            self._transport.abort()

    def resume_reading(self) -> None:
        """Read the upstream's socket again."""
        if self._transport:
            self._transport.resume_reading()

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End or break off the response."""
        self._transport = None
        if self._response and self._until_close and exc is None:
            self._end_response()
        self._fail(str(exc) if isinstance(exc, OSError) else "it closed the connection")
        self._parser = None
        self._on_end(self)

    def eof_received(self) -> bool:
        """Close the connection: an upstream that has sent its last byte is done."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the response."""
        if self._is_idle() or self._parser is None:
            self._close()  # nothing was asked
            return
        self._answered = True
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # llhttp's words only: it quotes nothing of the response.
            self._fail(f"its response is not HTTP ({error})")
        else:
            if self._in_head and self._head_bytes > HEAD_BYTES:
                self._fail("the head of its response is too long")
        if self._keeps:
            self.was_used = True
            self._on_free(self)
        elif self._is_idle():
            self._close()

    # Called by httptools

    def on_message_begin(self) -> None:
        """Note data behind the end of the response, which nobody asked for."""
        self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field; trailers are dropped."""
        if self._in_head and len(self._fields) <= HEADER_COUNT:
            self._fields.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Take the head, unless it is an interim response."""
        status = self._parser.get_status_code() if self._parser else 0
        if status < _FIRST_FINAL_STATUS or self._message_ended:
            return
        self._in_head = False
        fields, self._fields = self._fields, []
        if len(fields) > HEADER_COUNT or sum(len(name) + len(value) for name, value in fields) > HEAD_BYTES:
            self._fail("the head of its response is too long")
            return
        headers = Headers(fields)
        self._until_close = (
            headers.value(b"content-length") is None
            and headers.value(b"transfer-encoding") is None
            and status not in _NO_CONTENT
        )
        if self._response:
            self._response.begin(status, headers)

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if self._response and not self._message_ended and not self._response.feed(piece) and self._transport:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """End the response, and let the connection be used again if both sides keep it."""
        if self._in_head:
            self._fields = []  # of an interim response
            return
        self._message_ended = True
        if self._response and self._parser and self._transport:
            # An upstream that answered before it had the whole request may not read the rest.
            is_sent = not self._transport.get_write_buffer_size()
            self._keeps = is_sent and self._parser.should_keep_alive()
        self._end_response()

    def _is_idle(self) -> bool:
        return self._response is None

    def _end_response(self) -> None:
        response, self._response = self._response, None
        if response:
            response.end()

    def _fail(self, reason: str) -> None:
        response, self._response = self._response, None
        if response:
            response.fail(UpstreamBrokeOffError(reason, answered=self._answered))

    def _close(self) -> None:
        if self._transport:
            self._transport.abort()
