"""One connection to an upstream server: it carries one request and response at a time.

A response is given to its receiver in pieces, as it comes. A receiver whose own reader is slow pauses the upstream's
socket, so that the upstream stops instead of filling memory.
"""

import asyncio
import functools
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

import httptools

from gateway.event_log import log
from gateway.http.headers import Field, Headers
from gateway.http.limits import HEAD_BYTES, HEADER_COUNT, SEND_TOGETHER_BYTES
from gateway.http.peer_probes import GONE, SILENCE_SECONDS, limit_silence, probe_peer

if TYPE_CHECKING:
    from gateway.http.upstream_pool import UpstreamPool

_FIRST_FINAL_STATUS: Final = 200
_LARGE_BYTES: Final = 256 << 10
_LONGEST_CACHED_BYTES: Final = 4 << 10
_NO_CONTENT: Final = frozenset({204, 304})
_STALE_SECONDS: Final = 1.0
"""An upstream that closed a kept connection without an answer so soon had closed it before the request came."""


BodyPieces: TypeAlias = Sequence[bytes | bytearray | memoryview]
"""The body of a request; it is not copied together."""


class UpstreamBrokeOffError(Exception):
    """The upstream closed its connection, or sent no HTTP, before its response was whole."""

    def __init__(self, reason: str, *, was_stale: bool = False, is_gone: bool = False) -> None:
        super().__init__(reason)
        self.is_gone = is_gone
        """Its machine does not answer, so no new connection would be made either."""
        self.was_stale = was_stale
        """It had closed a kept connection as idle, before the request came: the request may be sent again."""


class ResponseReceiver(Protocol):
    """The reader of one response; nothing is called after `end`, `fail`, or the end of the call by `abort`."""

    def take_head(self, status: int, headers: Headers, piece: bytes) -> None:
        """Take the head, and what came with it of the body."""

    def take_response(self, piece: bytes) -> None:
        """Take what one read of the socket brought of the body."""

    def end_response(self) -> None:
        """Note the end of the response; its connection is free for another request."""

    def fail_response(self, error: UpstreamBrokeOffError) -> None:
        """Note that the rest of the response will not come."""


class UpstreamConnection(asyncio.Protocol):
    """A connection of `pool`, which gets it back when it is ready for another request."""

    def __init__(self, url: str, pool: "UpstreamPool") -> None:
        self.url = url
        self.idle_since = 0.0
        """The time at which the pool got it back."""
        self._has_carried_response = False
        """It was kept after a response, so the upstream may be closing it as idle while a request is sent."""
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._probed: socket.socket | None = None
        """The socket, if the kernel probes the peer; None: that is on this machine."""
        self._readable_poll = select.poll()
        """Tells whether data or the end of the connection waits in the socket, which `connection_made` registers."""
        self._parser: httptools.HttpResponseParser | None = None
        self._paused = False
        self._on_closed: Callable[[], None] | None = None
        self._expect_response(None)

    def _expect_response(self, receiver: ResponseReceiver | None) -> None:
        """Begin a new response: reset the state of the last one, and let `receiver` get this one.

        None: no response is expected, and data closes the connection.
        """
        self._receiver = receiver
        self._sent_at = time.monotonic()  # by it `_fail` recognizes a stale connection
        self._has_received = False  # any byte of the response

        # The head, while it is parsed; `_head`, its status and fields, waits until it is given to the receiver.
        self._in_head = True  # until the head of the final response has ended
        self._head_bytes = 0  # read while in the head, perhaps with the begin of the body
        self._fields: list[Field] = []  # the header fields parsed so far
        self._has_content_length = self._ends_with_close = False  # both by the header fields
        self._head: tuple[int, Headers] | None = None

        # The body, and its end.
        self._pieces: list[bytes] = []  # not yet given to the receiver
        self.is_response_complete = False
        """The whole response has been parsed; `end_response` is called right after its last piece."""
        self._is_reusable = False  # for another request, as known at the end of the response

    @property
    def is_open(self) -> bool:
        """True if the upstream has neither closed the connection nor sent anything that was not read yet.

        With TLS the end and anything else look alike in the socket, where they are encrypted. An upstream that waits
        for a request sends nothing else: session tickets come with the handshake, before the first response.
        """
        return self._transport is not None and not self._readable_poll.poll(0)

    def send(
        self,
        head: bytes,
        body: BodyPieces,
        receiver: ResponseReceiver,
        *,
        at_once: bool = False,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Send a request; `receiver` gets the response, or its failure if the connection is closed already.

        The pieces of the body must not change until they are sent. A short request waits for the end of the loop's
        pass, unless it is to be sent `at_once`. An upstream on another machine that acknowledges nothing for
        `silence_seconds` before its response begins is gone.
        """
        self._expect_response(receiver)
        if self._transport is None:
            self._fail("it closed the connection")
            return
        if self._probed:
            # The kernel also counts the time in which a peer has no room for more of a large body.
            is_large = sum(map(len, body)) > _LARGE_BYTES
            limit_silence(self._probed, SILENCE_SECONDS if is_large else silence_seconds)
        if len(body) == 1 and len(body[0]) <= SEND_TOGETHER_BYTES:
            # Copying a short body is faster than sending two buffers.
            self._pool.writes.write(self._transport, b"".join([head, *body]), at_once=at_once)
        else:
            self._transport.writelines([head, *body])

    def abort(self, on_closed: Callable[[], None] | None = None) -> None:
        """End the call: close the connection at once, so that the upstream stops its work.

        With `on_closed`, close this side only, and call it when the upstream has stopped, and closes the other side.
        TLS cannot close one side: then it is called when the connection is closed.
        """
        self._receiver, self._on_closed = None, on_closed
        if self._transport:
            self._pool.writes.drop(self._transport)
        if self._transport and on_closed and self._transport.can_write_eof():
            self.resume_reading()
            self._transport.write_eof()
        elif self._transport:
            self._transport.abort()
        elif on_closed:
            on_closed()

    def pause_reading(self) -> None:
        """Stop the upstream, because the reader of the response is slow."""
        if self._transport and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read the upstream's socket again."""
        if self._transport and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        connected = transport.get_extra_info("socket")
        self._readable_poll.register(connected.fileno(), select.POLLIN)
        self._probed = connected if probe_peer(connected) else None
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a response that lasts until the connection closes; break off any other, and leave the pool."""
        self._transport = None
        if self._ends_with_close and exc is None:
            self._end_response()
        # Without effect after `_end_response`: then no receiver expects a response.
        if isinstance(exc, OSError):
            self._fail(str(exc), is_gone=exc.errno in GONE)
        else:
            self._fail("it closed the connection")
        self._parser = None
        self._pool.forget(self)
        if self._on_closed:
            self._on_closed()

    def eof_received(self) -> bool:
        """Close the connection: an upstream that has sent its last byte is done."""
        if self._receiver is None:
            self._pool.forget(self)  # not only when it is closed: no request may take it until then
        return False

    def data_received(self, data: bytes) -> None:
        """Parse what has come of the response, give it to the receiver, and end or fail the response if that is due.

        The parser calls `on_header`, `on_headers_complete` and so on, which may fail the response themselves: then
        `_receiver` is None. The connection is closed if no response is expected, or if it cannot be used again.
        """
        receiver = self._receiver
        if receiver is None or self._parser is None:
            self._close()  # no response is expected
            return
        if self._probed and not self._has_received:
            limit_silence(self._probed, SILENCE_SECONDS)
        self._has_received = True
        if self._in_head:
            self._head_bytes += len(data)

        # 1. Parse: the callbacks collect head and body. Then pass both on, unless a callback has failed the response.
        try:
            self._parser.feed_data(data)
            if self._receiver is receiver:
                self._give_response(receiver)
        except httptools.HttpParserCallbackError:
            self._fail_relay()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # llhttp's words only: it quotes nothing of the response.
            self._fail(f"its response is not HTTP ({error})")
        except Exception:  # noqa: BLE001 - one response must not end the connections of all others
            self._fail_relay()

        # 2. End the response, or fail it. After a failure nobody expects it any more, so neither does anything.
        if self.is_response_complete:
            self._end_response()
        elif self._in_head and self._head_bytes > HEAD_BYTES:
            self._fail("the head of its response is too long")

        # 3. Close a connection whose response has ended or failed, and that cannot be used again.
        if self._receiver is None and not self._is_reusable:
            self._close()

    # Called by httptools

    def on_message_begin(self) -> None:
        """Note data behind the end of the response, which nobody asked for."""
        self._is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field. A trailer is dropped, and so is Content-Length: the proxy frames the body anew."""
        if self._in_head and len(self._fields) <= HEADER_COUNT:  # one too many is kept, and fails the response later
            if name.lower() == b"content-length":
                self._has_content_length = True
            else:
                self._fields.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Keep the head for the receiver; fail a response whose head is too long.

        The head of an interim response (status 1xx, such as `100 Continue`) is ignored, because the final one follows;
        so is one that comes behind the whole response.
        """
        status = self._parser.get_status_code() if self._parser else 0
        if status < _FIRST_FINAL_STATUS or self.is_response_complete:
            return  # `on_message_complete` drops the fields of an interim response

        # 1. Bound the head. `_head_bytes` may include a part of the body: only if it is beyond the limit, the fields
        #    are measured.
        self._in_head = False
        fields, self._fields = self._fields, []
        size_bytes = sum(len(name) + len(value) for name, value in fields) if self._head_bytes > HEAD_BYTES else 0
        if len(fields) > HEADER_COUNT or size_bytes > HEAD_BYTES:
            self._fail("the head of its response is too long")
            return

        # 2. Make the headers; equal ones of several responses are one object, unless they are long.
        is_cacheable = self._head_bytes <= _LONGEST_CACHED_BYTES
        headers = _cached_headers(tuple(fields)) if is_cacheable else Headers(fields)

        # 3. Decide how the body ends: without a length and without chunks, it lasts until the upstream closes the
        #    connection.
        self._ends_with_close = (
            not self._has_content_length and headers.value(b"transfer-encoding") is None and status not in _NO_CONTENT
        )
        if self._receiver:
            self._head = status, headers

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if not self.is_response_complete:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the response; the connection may be used again if both sides keep it."""
        if self._in_head:  # an interim response has ended, and the final one follows
            self._fields = []
            self._has_content_length = False
            return
        self.is_response_complete = True
        if self._receiver and self._parser and self._transport:
            # An upstream that answered before it had the whole request may not read the rest.
            is_sent = not self._transport.get_write_buffer_size() and not self._pool.writes.has(self._transport)
            self._is_reusable = is_sent and self._parser.should_keep_alive()

    def _give_response(self, receiver: ResponseReceiver) -> None:
        """Give the receiver what one read has brought, in one call: each write of the receiver wakes a client."""
        head, body = self._head, b"".join(self._pieces)
        self._pieces.clear()
        if head:
            self._head = None
            receiver.take_head(*head, body)
        elif body:
            receiver.take_response(body)

    def _end_response(self) -> None:
        """Free the connection for another request, or close it, and tell the receiver, if it still expects the end."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._is_reusable:
            self._has_carried_response = True
            self.resume_reading()
            self._pool.keep(self)
        else:
            self._close()
        receiver.end_response()

    def _fail_relay(self) -> None:
        log.exception("response_not_relayed")
        self._fail("its response could not be relayed")

    def _fail(self, reason: str, *, is_gone: bool = False) -> None:
        """Tell the receiver, if a response is expected, that its rest will not come, and expect none any more.

        A kept connection that ends very soon, without a byte of the answer, was stale: the upstream had closed it as
        idle and has not seen the request, so the receiver may send the request again.
        """
        receiver, self._receiver = self._receiver, None
        if receiver:
            failed_soon = time.monotonic() - self._sent_at <= _STALE_SECONDS
            was_stale = self._has_carried_response and not self._has_received and failed_soon
            receiver.fail_response(UpstreamBrokeOffError(reason, was_stale=was_stale, is_gone=is_gone))

    def _close(self) -> None:
        if self._transport and not self._on_closed:
            self._pool.writes.drop(self._transport)
            self._transport.abort()


@functools.lru_cache(maxsize=256)
def _cached_headers(fields: tuple[Field, ...]) -> Headers:
    """Return the headers of a response; most responses have the fields of an earlier one, but for the length."""
    return Headers(fields)
