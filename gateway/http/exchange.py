"""One request of a client and the response to it.

The connection gives the request's body to a receiver, piece by piece, as it comes. The response is sent whole with
`respond`, or piece by piece with `start`, `write` and `finish`; who writes stops while the exchange `is_blocked`.
Everything is a plain call: a task for each request would cost as much as its parsing.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from gateway.http.limits import SEND_TOGETHER_BYTES
from gateway.http.request_head import InvalidRequestError, RequestHead

if TYPE_CHECKING:
    from gateway.http.server_connection import ServerConnection

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE: Final = b"connection: close\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class BodyTimeoutError(Exception):
    """The next piece of the request body did not come in time."""


class RequestReceiver(Protocol):
    """The work on one request, as the connection of its client sees it; nothing is called after `hang_up`."""

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Take a piece of the request body; the last one may be empty."""

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Note that the rest of the request body will not come."""

    def resume_writing(self) -> None:
        """Go on, because the client has read most of what was written; a response that is sent whole needs nothing."""
        return

    def stop(self) -> None:
        """Tell the client that the server stops, if there is a way; a response that goes on then is broken off."""
        return

    def hang_up(self) -> None:
        """End the work, because the client is gone or nothing more can be sent to it."""


class Exchange:
    """A request, and the state of its response."""

    def __init__(self, head: RequestHead, content_length: int | None, connection: "ServerConnection") -> None:
        # The request. The connection sets `receiver` and, with the end of the body, `body_complete`.
        self.head = head
        self.connection = connection
        self.content_length = content_length
        """The size of the body in bytes; None: it is chunked."""
        self.receiver: RequestReceiver | None = None
        """Gets the pieces of the body; None: the response is complete, or the connection was given up."""
        self.body_complete = False
        self.keep_alive = head.keep_alive
        """The connection takes another request after this one."""
        self.is_replaceable = False
        """The connection may be closed for a new one in spite of this request: anybody may ask, such as for metrics."""
        self.further_fields = b""
        """The lines of header fields that the response has besides its own, whatever it is."""

        # The state of the response, set by the methods below.
        self.started = False
        """The head of the response was sent."""
        self.ended = False
        """The response was sent whole, or broken off."""
        self._chunked = False  # `start` decides it

    def send_continue(self) -> None:
        """Ask the client for the body, if it waits for that."""
        if not self.body_complete and not self.started and self.head.expects_continue:
            self.connection.write(_CONTINUE)

    def respond(self, status: int, fields: bytes, body: bytes) -> None:
        """Send the whole response; `fields` has a line for each header field."""
        head = self._begin(status, fields)
        self.ended = True
        head += b"content-length: %d\r\n\r\n" % len(body)
        if self.head.method == "HEAD":
            self.connection.write(head)
        elif len(body) <= SEND_TOGETHER_BYTES:
            self.connection.write(head + body)
        else:
            self.connection.write(head)
            self.connection.write(body)  # not copied: clients that do not read it share one object
        self.connection.end_exchange()

    def start(self, status: int, fields: bytes, data: bytes = b"") -> None:
        """Send the head of a response whose length is not known, and a first piece; `fields` has a line for each field.

        Both are sent at once, because each write wakes the client.
        """
        head = self._begin(status, fields)
        self._chunked = not self.head.is_http_1_0  # HTTP/1.0 has no chunks: there the response ends with the connection
        head = head + _CHUNKED + b"\r\n" if self._chunked else head + b"\r\n"
        self.connection.begin_stream(head + self._frame(data))  # as a chunk, or as it is

    def write(self, data: bytes) -> None:
        """Send a piece of the response."""
        if framed := self._frame(data):
            self.connection.write(framed)

    @property
    def is_blocked(self) -> bool:
        """True while the client does not read what was written."""
        return self.connection.is_blocked

    def finish(self, data: bytes = b"") -> None:
        """Send the last piece of the response and its end, in one write."""
        framed = self._frame(data)
        if self._chunked and self.head.method != "HEAD":
            framed += _LAST_CHUNK  # without chunks, the end of the connection is the end of the response
        if framed:
            self.connection.write(framed)
        self.ended = True
        self.connection.end_exchange()

    def break_off(self) -> None:
        """Close the connection, so that the client sees that the response is not whole."""
        self.ended = True
        # A chunked response shows by itself that it ended early; without chunks only a reset does.
        self.connection.break_off(reset=self.started and not self._chunked)

    def _frame(self, data: bytes) -> bytes:
        """Return a piece of the response as it is sent: as a chunk if it is chunked, empty in answer to HEAD."""
        if not data or self.head.method == "HEAD":
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _begin(self, status: int, fields: bytes) -> bytes:
        """Note that the response has begun, decide whether the connection is kept, and return the first lines."""
        self.started = True
        # What is left of a body that was not read would be taken for the next request.
        self.keep_alive = self.keep_alive and self.body_complete
        lines = _status_line(status, int(time.time())) + fields + self.further_fields
        return lines if self.keep_alive else lines + _CLOSE


@dataclass(frozen=True, slots=True)
class RequestHandling:
    """The work of a server on its requests.

    Args:
        begin: begins the work on a request, whose head has come, and returns the receiver of its body; None if the
            response was sent at once.
        render_error: returns the lines of the header fields and the body of a response to bytes that are no request,
            or that the server failed to answer: of a status and a reason.
    """

    begin: Callable[[Exchange], RequestReceiver | None]
    render_error: Callable[[int, str], tuple[bytes, bytes]]


@functools.lru_cache(maxsize=64)
def _status_line(status: int, unix_seconds: int) -> bytes:
    """Return the first line of a response and its Date."""
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(unix_seconds))
    return f"HTTP/1.1 {status} {phrase}\r\nDate: {date}\r\n".encode()
