"""One connection of a client: requests are read from it one after the other, and answered in that order.

The next request is looked at when the response to the one before is sent and the client has read most of it; what a
client pipelines waits, and beyond a limit the client waits. A client that hangs up, also by half, cancels its request
at once, even while that is queued.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from typing import Final, cast

from gateway.event_log import log
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestHandling
from gateway.http.headers import Headers
from gateway.http.limits import HEAD_BYTES, SEND_AT_ONCE_BYTES, SEND_TOGETHER_BYTES, ConnectionTimes
from gateway.http.request_head import InvalidRequestError, RequestHead, RequestParser, read_cached_head

_HEAD_END: Final = b"\r\n\r\n"
_STEPS_AT_ONCE: Final = 4
"""Requests that a client pipelined, or pieces of a body, that are taken before other clients have their turn."""
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class ServerConnection(asyncio.Protocol):
    """The connection from `peer`; `on_end` is called when it is closed."""

    __slots__ = (  # they save 500 bytes of 2 KiB for each idle client
        *("_body_left_bytes", "_buffer", "_exchange", "_handling", "_is_advancing", "_is_draining", "_is_ending"),
        *("_is_tls", "_last_unsent_bytes", "_loop", "_on_end", "_parser", "_reading_paused", "_sends_at_once"),
        *("_table", "_times", "_transport"),
        *("deadline", "handshake", "head_bytes", "is_blocked", "is_idle", "peer", "request_deadline", "was_made"),
    )

    def __init__(
        self,
        peer: str,
        handling: RequestHandling,
        table: ConnectionTable,
        times: ConnectionTimes,
        on_end: Callable[["ServerConnection"], None],
    ) -> None:
        # For the table and the listener. The deadlines are times of the loop's clock after which the table calls
        # `expire`, infinite if there are none: for the next step of client or server, and for the request as a whole.
        self.peer = peer
        self.deadline = self.request_deadline = math.inf
        self.head_bytes = 0  # of a head that has not come whole, as the table counts them
        self.handshake: asyncio.Task[None] | None = None  # makes the connection; None: it is made, or never accepted
        self.was_made = False  # the handshake was complete: `connection_lost` takes the connection out of the table
        self._handling = handling  # begins the work on each request, and renders errors
        self._table = table
        self._times = times
        self._on_end = on_end  # called when the connection is lost
        self._loop = asyncio.get_running_loop()

        # The request that comes in, and its body.
        self._buffer = b""  # bytes from the client that are not yet taken
        self._exchange: Exchange | None = None  # the request in progress
        self._parser: RequestParser | None = None  # of a chunked body; None: the body has a length, or there is none
        self._body_left_bytes = 0  # of a body that has a length: what has not come yet
        self.is_idle = False  # no byte of the next request has come
        self._is_advancing = False  # `_advance` runs, which takes what comes meanwhile, too
        self._reading_paused = False

        # The responses that go out.
        self._transport: asyncio.Transport | None = None  # None before the handshake, and when the connection is lost
        self._is_tls = False
        self.is_blocked = False  # the client does not read what was sent
        self._last_unsent_bytes = 0  # in the write buffer when the deadline for the client to read was set
        self._sends_at_once = False  # a response is sent piece by piece, each at once

        # The end. While it is ending, no more requests are taken: the connection closes, or waits until the client has
        # read the last response. While it is draining, its listener is unbound: it closes after the response.
        self._is_ending = self._is_draining = False

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, limit its buffers, and wait for the first request, which has to come soon."""
        self._transport = cast("asyncio.Transport", transport)
        self.was_made = True
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(min(SEND_TOGETHER_BYTES, self._table.caps.buffered_bytes))
        if self._is_tls:  # the TLS layer has a buffer of its own, by default of 256 KiB
            transport.set_read_buffer_limits(self._table.caps.buffered_bytes)  # type: ignore[attr-defined]
        self._mark_idle()  # it sets `idle_seconds`, but the first request has to come sooner
        self.deadline = self._loop.time() + self._times.head_seconds

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request whose client hung up."""
        del exc
        self._transport = None
        self._is_ending = True
        self._table.remove(self)
        self._hang_up()
        self._on_end(self)

    def eof_received(self) -> bool:
        """Cancel the request, because the client has closed its side; the transport then closes the connection."""
        self._hang_up()
        return False

    def data_received(self, data: bytes) -> None:
        """Take data, for the body that is read or the next request."""
        if self._is_ending:
            return  # dropped: the connection stays open only until the client has read the last response
        was_idle, self.is_idle = self.is_idle, False
        self._buffer = self._buffer + data if self._buffer else data
        self._advance()  # sets `is_idle` again if it has answered all that came
        # With the first byte of a head that is not complete yet, its own time begins.
        if was_idle and not self.is_idle and self._exchange is None and not self._is_ending:
            self.deadline = self._loop.time() + self._times.head_seconds

    def pause_writing(self) -> None:
        """Begin to wait until the client reads."""
        self.is_blocked = True
        self._set_reading_deadline(self._times.write_seconds)

    def resume_writing(self) -> None:
        """Go on, as the client has read: let the receiver write more, or take requests that had to wait for that."""
        self.is_blocked = False
        self._set_deadline()
        if self._exchange is None:  # the last response was sent whole, and the next request may have come already
            self._resume_reading()
            self._go_on()
        elif self._exchange.receiver:
            self._guard(self._exchange.receiver.resume_writing)

    # The exchange's side

    def begin_stream(self, data: bytes) -> None:
        """Send the first piece of a stream; without TLS, this and all further pieces are sent at once when written."""
        if self._transport is None:
            return
        if not self._is_tls:
            self._sends_at_once = True
            self._transport.set_write_buffer_limits(SEND_AT_ONCE_BYTES)
        self._table.writes.write(self._transport, data, at_once=True)

    def write(self, data: bytes) -> None:
        """Send `data`, after what was sent before: a piece of a stream at once, else at the end of the loop's pass."""
        if self._transport:
            self._table.writes.write(self._transport, data, at_once=self._sends_at_once)

    def end_exchange(self) -> None:
        """Forget the request, whose response is sent; go on with the next one, or close the connection."""
        exchange, self._exchange = self._exchange, None
        self._parser = None
        if exchange is None:
            return
        exchange.receiver = None  # it refers to the exchange, which must not wait for the garbage collector
        if self._transport is None:
            return
        if self._sends_at_once:  # the response was a stream
            self._sends_at_once = False
            self._transport.set_write_buffer_limits(SEND_TOGETHER_BYTES)

        if self._is_ending or not exchange.body_complete:  # the client may still send, and reads only afterwards
            self._linger()
        elif not exchange.keep_alive:
            self._close()
        else:
            if self._reading_paused:
                self._resume_reading()
            if not self._buffer:  # nothing of a next request has come
                self._mark_idle()
                return
            self._table.mark_waiting(self)
            self._set_deadline()
            self._go_on()

    def pause_body(self) -> None:
        """Stop reading from the client."""
        self._pause_reading()
        self._set_deadline()

    def resume_body(self) -> None:
        """Read from the client again."""
        self._resume_reading()
        self._set_deadline()

    def break_off(self, *, reset: bool) -> None:
        """Close the connection; with `reset`, so that it does not look like an orderly end."""
        if self._exchange:
            self._exchange.receiver = None  # nothing more is reported to it
            self._exchange = None
        if (transport := self._transport) is None:
            return
        self._table.writes.flush(transport)
        if reset:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        else:
            self._close()

    # The table's and the listener's side

    @property
    def is_replaceable(self) -> bool:
        """True while another connection may take its place: it has no request, or that of a stranger."""
        return self._exchange is None or self._exchange.is_replaceable

    def expire(self) -> None:
        """End what took too long: a request as a whole, a head, a pause in a body, the idle time, or unread data.

        A client that has read some of the data in the write buffer since the deadline was set gets more time.
        """
        if (transport := self._transport) is None:
            return
        if self.request_deadline <= self._loop.time():
            self._expire_request(transport)
            return
        self.deadline = math.inf  # the one that has passed: of what the connection waits for
        if self._is_ending or self.is_blocked:  # the time to read the response is over
            unsent_bytes = transport.get_write_buffer_size()
            if 0 < unsent_bytes < self._last_unsent_bytes:  # the client reads, but slowly
                self._set_reading_deadline(self._times.write_seconds)
            else:
                transport.abort()
        elif self._exchange:  # the next piece of its body has not come
            self._fail_body(self._exchange, BodyTimeoutError())
        elif self.is_idle:  # no next request has come
            self._close()
        else:
            self._refuse(408, f"its head did not come within {self._times.head_seconds:g} s")

    def _expire_request(self, transport: asyncio.Transport) -> None:
        """End a request that took too long in all: fail its body if that still comes, else close the connection.

        After a failed body, the client has `linger_seconds` to get the response; then this ends what is not done.
        """
        self.request_deadline = math.inf
        exchange = self._exchange
        if exchange and not exchange.body_complete and not self._is_ending:
            self.request_deadline = self._loop.time() + self._times.linger_seconds  # then the other branch
            self._is_ending = True  # no more of it is read
            self._fail_body(exchange, BodyTimeoutError())
        elif exchange or transport.get_write_buffer_size():  # its response is not made, or not read
            self._hang_up()
            transport.abort()

    def give_way(self) -> None:
        """Close the connection at once, for another one; a whole response is sent before."""
        if self._transport:
            self._table.writes.flush(self._transport)
            self._hang_up()
            self._transport.abort()
        elif self.handshake:  # the connection is not made yet
            self.handshake.cancel()

    def drain_requests(self, *, close_idle: bool = True) -> None:
        """Close the connection after the request in progress; if there is none, at once or after the next."""
        self._is_draining = True
        if self._exchange:
            self._exchange.keep_alive = False
        elif close_idle:
            self._close()

    def abort(self) -> None:
        """End the request in progress, because the server stops; break off its response if it still goes on."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.receiver:
            try:
                exchange.receiver.stop()  # may answer with an error
            except Exception:  # noqa: BLE001 - one request must not keep the others from their end
                log.exception("stop_failed")
        if not exchange.ended:  # `stop` has sent no end of the response
            self._hang_up()
            exchange.break_off()

    # Requests

    def _advance(self) -> None:
        """Take from the buffer what is needed now: more of a body, or the next requests, a few steps at once.

        Then stop reading from the client if too much is left in the buffer, or set the deadline of the rest of a body.
        """
        # 1. Take what is there: a piece of the body of a request in progress, or else the next head.
        self._is_advancing = True
        try:
            for _ in range(_STEPS_AT_ONCE):
                has_more = self._take_body(self._exchange) if self._exchange else self._take_head()
                if not has_more:
                    break
            else:  # no `break`, so there is more; but other clients have their turn before the rest
                self._loop.call_soon(self._go_on)
        except Exception:  # noqa: BLE001 - a defect must not end the connections of all others
            self._fail_request()
        self._is_advancing = False

        # 2. Bound what is left.
        exchange = self._exchange
        if self._is_ending:
            return
        if exchange is None:  # what is left is a part of a head, or requests whose turn has not come
            if self._buffer:
                if len(self._buffer) > self._table.caps.buffered_bytes:
                    self._pause_reading()
                self._table.count_unfinished_head(self, len(self._buffer))
            return
        self._set_deadline()  # of the next piece of its body; none once that is complete
        if exchange.body_complete and len(self._buffer) > self._table.caps.buffered_bytes:
            self._pause_reading()

    def _go_on(self) -> None:
        """Take more from the buffer, unless this is called within `_advance`, which goes on itself."""
        if self._transport and not self._is_advancing:
            self._advance()

    def _take_head(self) -> bool:
        """Parse the next head in the buffer, and begin the work on its request; give it a body that has come whole.

        Return True if more is in the buffer; False also if the head is not complete or was refused, or if no request
        may be taken: the connection ends, or the client has to read the last response first.
        """
        if self._is_ending or self.is_blocked or self._transport is None or self._transport.is_closing():
            return False

        # 1. Find the end of the head, which is an empty line.
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):  # some clients send an empty line after a body
            buffer = self._buffer = buffer[2:]
        empty_line = buffer.find(_HEAD_END)
        if empty_line < 0 and len(buffer) < HEAD_BYTES:
            return False
        end = empty_line + len(_HEAD_END)
        if empty_line < 0 or end > HEAD_BYTES:
            self._refuse(400, f"its head is longer than {HEAD_BYTES} bytes")
            return False

        # 2. Parse the head. content_length: the size of the body; None: it is chunked, and the parser goes on with it
        parser = None
        try:
            cached = read_cached_head(buffer[:end])  # None: the head is not of the form that the cache takes
            if cached is None:
                parser = RequestParser()
                head, content_length = parser.parse_head(buffer[:end])
            else:
                head, content_length = cached
        except InvalidRequestError as error:
            self._refuse(400, str(error))
            return False

        # 3. Begin the request: the time for the head ends, and that for the whole request begins.
        exchange = self._exchange = Exchange(head, content_length, self)
        exchange.keep_alive = exchange.keep_alive and not self._is_draining
        self.deadline = math.inf
        if self.head_bytes:
            self._table.forget_unfinished_head(self)
        self.request_deadline = self._loop.time() + self._times.request_seconds

        # 4. Take the body if it has come whole; else `_take_body` gives it to the receiver, in pieces.
        body = b""
        if content_length is None:
            self._parser = parser
        elif len(buffer) >= end + content_length:
            body_end = end + content_length
            body, end = buffer[end:body_end], body_end
            exchange.body_complete = True
        else:
            self._body_left_bytes = content_length
        self._buffer = buffer[end:]
        receiver = exchange.receiver = self._handling.begin(exchange)
        if receiver and exchange.body_complete:
            receiver.take_body(body, is_last=True)
        return bool(self._buffer)

    def _take_body(self, exchange: Exchange) -> bool:
        """Give the receiver what has come of the body; return True if more is in the buffer, after the body.

        A chunked body that is invalid fails: its response is the last one of the connection.
        """
        buffer, receiver = self._buffer, exchange.receiver
        if not buffer or exchange.body_complete or receiver is None:
            return False
        if self._parser is None:  # the body has a length, of which `_body_left_bytes` have not come
            piece = buffer[: self._body_left_bytes]
            self._buffer = buffer[len(piece) :]
            self._body_left_bytes -= len(piece)
            exchange.body_complete = not self._body_left_bytes
        else:  # it is chunked: the parser takes all that has come
            self._buffer = b""
            try:
                piece = self._parser.parse_chunks(buffer)
            except InvalidRequestError as error:
                log.info("invalid_request", peer=self.peer, reason=str(error))
                self._is_ending = True
                self._fail_body(exchange, error)
                return False
            if self._parser.is_body_complete:
                # What came together with the end of the chunks is lost in the parser: the client sends it again.
                exchange.keep_alive = exchange.keep_alive and not self._parser.has_excess
                exchange.body_complete = True
        if piece or exchange.body_complete:
            receiver.take_body(piece, is_last=exchange.body_complete)
        return bool(self._buffer)

    def _fail_body(self, exchange: Exchange, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Tell the receiver that the rest of the body will not come; the connection takes no other request."""
        exchange.keep_alive = False
        if receiver := exchange.receiver:
            self._guard(lambda: receiver.fail_body(error))

    def _guard(self, work: Callable[[], None]) -> None:
        """Call `work` on a request, and answer 500 if it raises: other connections must not end by that."""
        try:
            work()
        except Exception:  # noqa: BLE001
            self._fail_request()

    def _fail_request(self) -> None:
        """Log a defect of the server, and answer its request with 500, or break off a response that has begun."""
        log.exception("request_failed")
        if exchange := self._exchange:
            self._hang_up()  # ends the receiver's work, and forgets the exchange
            self._exchange = exchange  # put back, because `respond` and `break_off` work on it
            if exchange.started:
                exchange.break_off()
            else:
                exchange.keep_alive = False
                exchange.respond(500, *self._handling.render_error(500, "the server failed to answer it"))

    def _refuse(self, status: int, reason: str) -> None:
        """Log bytes that are no request, answer them, and close the connection."""
        log.info("invalid_request", peer=self.peer, reason=reason)
        head = RequestHead("", "", "", Headers(), is_http_1_0=False)
        exchange = self._exchange = Exchange(head, 0, self)  # its body is not complete, so the response is the last
        exchange.respond(status, *self._handling.render_error(status, reason))

    # Ending

    def _linger(self) -> None:
        """Close our side only, so that a client that still sends can read the response; with TLS, close both."""
        self._is_ending = True
        self._buffer = b""
        self._table.mark_waiting(self)
        self._resume_reading()
        self._set_reading_deadline(self._times.linger_seconds)
        if self._transport and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection when what was written is sent; the client has `write_seconds` to read some of it."""
        self._is_ending = True
        self._buffer = b""
        self._table.mark_waiting(self)  # until then it may give way to another one
        if self._transport:
            self._set_reading_deadline(self._times.write_seconds)
            self._transport.close()

    def _mark_idle(self) -> None:
        """Note that no byte of the next request has come; the client has `idle_seconds` to begin it."""
        if not self.is_idle:
            self.is_idle = True
            self._table.mark_waiting(self)
            if not self.is_blocked:  # else the client has to read the last response first, in its own time
                self.deadline = self._loop.time() + self._times.idle_seconds

    def _set_reading_deadline(self, seconds: float) -> None:
        """Send what waits; give the client so many seconds to read some of it, and remember how much that is."""
        self._last_unsent_bytes = self._table.writes.flush(self._transport) if self._transport else 0
        self.deadline = self._loop.time() + seconds

    def _hang_up(self) -> None:
        """Forget the request in progress, and tell its receiver that nothing more can be sent to the client."""
        exchange, self._exchange = self._exchange, None
        if exchange and exchange.receiver:
            receiver, exchange.receiver = exchange.receiver, None
            try:
                receiver.hang_up()
            except Exception:  # noqa: BLE001 - one request must not end the connections of all others
                log.exception("hang_up_failed")

    def _set_deadline(self) -> None:
        """Set the deadline of what the connection waits for: a request, the rest of a head, or more of a body."""
        if self.is_blocked or self._is_ending:  # then the time to read, or that of the whole request, counts
            return
        seconds = math.inf
        if self._exchange is None:
            seconds = self._times.idle_seconds if self.is_idle else self._times.head_seconds
        elif not self._exchange.body_complete and not self._reading_paused:  # paused: we let the client wait
            seconds = self._times.body_pause_seconds
        self.deadline = self._loop.time() + seconds

    def _pause_reading(self) -> None:
        if self._transport and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport and self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
