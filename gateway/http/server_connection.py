"""One connection of a client: requests are read from it one after the other, and answered in that order.

The next request is looked at when the response to the one before is sent; what a client pipelines waits, and beyond
64 KiB the client waits. A client that hangs up, also by half, cancels its request at once, even while that is queued.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, cast

import structlog

from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import BodyTimeoutError, Exchange
from gateway.http.headers import Field, Headers
from gateway.http.limits import HEAD_BYTES, ConnectionTimes
from gateway.http.request_head import InvalidRequestError, RequestHead, RequestParser

_PIPELINED_BYTES: Final = 64 << 10
_HEAD_END: Final = b"\r\n\r\n"
_HIGH_WATER_BYTES: Final = 64 << 10
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RequestHandling:
    """The work of a server on its requests.

    Args:
        answer: answers a request; it is cancelled when the client hangs up.
        render_error: returns the fields and the body of a response to bytes that are no request: of a status and a
            reason.
    """

    answer: Callable[[Exchange], Awaitable[None]]
    render_error: Callable[[int, str], tuple[list[Field], bytes]]


class ServerConnection(asyncio.Protocol):
    """The connection from `peer`; `on_end` is called when it is closed."""

    def __init__(
        self,
        peer: str,
        handling: RequestHandling,
        table: ConnectionTable,
        times: ConnectionTimes,
        on_end: Callable[["ServerConnection"], None],
    ) -> None:
        self.peer = peer
        self.deadline = math.inf
        self._handling = handling
        self._table = table
        self._times = times
        self._on_end = on_end
        self.was_made = False
        """The handshake was complete; from then on the connection counts itself out when it is lost."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._parser = RequestParser()
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self._body_left_bytes = 0
        self._reading_paused = False
        self._idle = False
        self._unsent_bytes = 0
        self._ended = False
        self._draining = False
        self._writable: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True while a request is answered."""
        return self._exchange is not None

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self.was_made = True
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        self._table.add(self)
        self._mark_idle()
        self.deadline = self._loop.time() + self._times.head_seconds

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request whose client hung up."""
        del exc
        self._transport = None
        self._ended = True
        self._table.remove(self)
        self._cancel_request()
        self._on_end(self)

    def eof_received(self) -> bool:
        """Take half a hang-up for a whole one: a client that closes its connection sends nothing else."""
        self._cancel_request()
        return False

    def data_received(self, data: bytes) -> None:
        """Take data, for the body that is read or the next request."""
        if self._ended:
            return  # it lingers, until the client has read the last response
        if self._idle:
            self._idle = False
            self._table.mark_busy(self)
            self._set_deadline()
        self._buffer = self._buffer + data if self._buffer else data
        self._advance()

    def pause_writing(self) -> None:
        """Begin to wait until the client reads."""
        self._writable = self._loop.create_future()
        self._expect_reading(self._times.write_seconds)

    def resume_writing(self) -> None:
        """Go on writing."""
        if self._writable:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None
            self._set_deadline()

    # The exchange's side

    @property
    def is_blocked(self) -> bool:
        """True while the client does not read what was sent."""
        return self._writable is not None

    def write(self, data: bytes) -> None:
        """Send `data`, after what was sent before."""
        if self._transport:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""
        if self._writable:
            await self._writable

    def wait_for_body(self, *, waits: bool) -> None:
        """Begin or end to measure the pause between two pieces of the body."""
        del waits
        self._set_deadline()

    def pause_body(self) -> None:
        """Stop reading from the client."""
        self._pause_reading()

    def resume_body(self) -> None:
        """Read from the client again."""
        self._resume_reading()

    def break_off(self, *, reset: bool) -> None:
        """Close the connection; with `reset`, so that it does not look like an orderly end."""
        transport = self._transport
        if transport is None:
            return
        if reset:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        else:
            self._close()

    # The table's and the listener's side

    def expire(self) -> None:
        """End what took too long: a head, a pause in a body, the idle time, or a client that does not read."""
        self.deadline = math.inf
        transport = self._transport
        if transport is None:
            return
        if self._ended or self._writable:
            if 0 < transport.get_write_buffer_size() < self._unsent_bytes:
                self._expect_reading(self._times.write_seconds)  # it reads, but slowly
            else:
                transport.abort()
        elif self._exchange and self._exchange.waits_for_body:
            self._exchange.fail_body(BodyTimeoutError())
        elif self._exchange is None and not self._idle:
            self._refuse(408, f"its head did not come within {self._times.head_seconds:g} s")
        elif self._exchange is None:
            self._close()

    def close_idle(self) -> None:
        """Close the connection, which has no request."""
        if self._transport:
            self._transport.abort()

    def drain_requests(self, *, close_idle: bool = True) -> None:
        """Close the connection after the request in progress; if there is none, at once or after the next."""
        self._draining = True
        if self._exchange:
            self._exchange.keep_alive = False
        elif close_idle:
            self._close()

    def abort(self) -> None:
        """Break off the request in progress."""
        self._cancel_request()
        if self._exchange:
            self._exchange.break_off()

    # Requests

    def _advance(self) -> None:
        """Take from the buffer what is needed now: more of a body, or the next request."""
        exchange = self._exchange
        if exchange and not exchange.body_complete:
            self._take_body(exchange)
            exchange = self._exchange
        if exchange is None:
            self._take_head()
        elif len(self._buffer) > _PIPELINED_BYTES:
            self._pause_reading()

    def _take_head(self) -> None:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # some clients send an empty line after a body
            buffer = buffer[2:]
        self._buffer = buffer
        length = buffer.find(_HEAD_END)
        if length < 0 and len(buffer) < HEAD_BYTES:
            return
        end = length + len(_HEAD_END)
        if length < 0 or end > HEAD_BYTES:
            self._refuse(400, f"its head is longer than {HEAD_BYTES} bytes")
            return
        self._buffer = buffer[end:]
        self._parser = RequestParser()
        try:
            head = self._parser.parse_head(buffer[:end])
        except InvalidRequestError as error:
            self._refuse(400, str(error))
            return
        self._begin(head)

    def _begin(self, head: RequestHead) -> None:
        exchange = self._exchange = Exchange(head, self, self.peer)
        exchange.keep_alive = exchange.keep_alive and not self._draining
        self._body_left_bytes = head.content_length or 0
        self.deadline = math.inf
        self._take_body(exchange)
        if self._task is None:
            self._task = self._loop.create_task(self._answer_requests())
        elif self._next and not self._next.done():
            self._next.set_result(None)

    def _take_body(self, exchange: Exchange) -> None:
        buffer = self._buffer
        if exchange.head.content_length is not None:
            if buffer and self._body_left_bytes:
                piece = buffer[: self._body_left_bytes]
                self._buffer = buffer[len(piece) :]
                self._body_left_bytes -= len(piece)
                exchange.feed(piece)
            if not self._body_left_bytes:
                exchange.end_body()
        elif buffer:
            self._buffer = b""
            try:
                if content := self._parser.parse_chunks(buffer):
                    exchange.feed(content)
            except InvalidRequestError as error:
                self._log_refusal(str(error))
                exchange.fail_body(error)
                self._ended = True
                return
            if self._parser.complete:
                # What came together with the end of the chunks is lost in the parser: the client sends it again.
                exchange.keep_alive = exchange.keep_alive and not self._parser.excess
                exchange.end_body()
        if exchange.waits_for_body:
            self._set_deadline()

    async def _answer_requests(self) -> None:
        """Answer one request after the other; one task for all of them costs less than one for each."""
        try:
            while self._exchange or not self._ended:
                if exchange := self._exchange:
                    await self._answer(exchange)
                    self._end_exchange(exchange)
                else:
                    self._next = self._loop.create_future()
                    await self._next
        finally:
            if exchange := self._exchange:  # cancelled
                self._end_exchange(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handling.answer(exchange)
        except Exception:  # noqa: BLE001 - one request must not end the connections of all others
            _log.exception("request_failed")
            if not exchange.started:
                fields, body = self._handling.render_error(500, "the server failed to answer it")
                exchange.respond(500, fields, body)

    def _end_exchange(self, exchange: Exchange) -> None:
        """Go on with the next request, or close the connection."""
        if self._transport is None:
            self._exchange = None
            return
        if not exchange.finished:
            exchange.break_off()
            self._exchange = None
            return
        self._exchange = None
        if self._ended or not exchange.body_complete:
            self._linger()
            return
        if not exchange.keep_alive:
            self._close()
            return
        self._resume_reading()
        if self._buffer:
            self._set_deadline()
            self._advance()
        else:
            self._mark_idle()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer bytes that are no request, and close the connection."""
        self._log_refusal(reason)
        fields, body = self._handling.render_error(status, reason)
        exchange = Exchange(RequestHead("", "", "", Headers(), False, 0, False), self, self.peer)
        exchange.respond(status, fields, body)
        self._linger()

    def _log_refusal(self, reason: str) -> None:
        _log.info("invalid_request", peer=self.peer, reason=reason)

    # Ending

    def _linger(self) -> None:
        """Close the connection, but let a client that still sends read the response first: else it is reset."""
        self._ended = True
        self._buffer = b""
        self._resume_reading()
        self._expect_reading(self._times.linger_seconds)
        if self._transport and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection when what was written is sent."""
        self._ended = True
        self._buffer = b""
        if self._transport:
            self._expect_reading(self._times.write_seconds)
            self._transport.close()

    def _mark_idle(self) -> None:
        """Wait for a request."""
        self._idle = True
        self._table.mark_idle(self)
        self._set_deadline()

    def _expect_reading(self, seconds: float) -> None:
        """Give the client so many seconds to read some of what is buffered for it."""
        self._unsent_bytes = self._transport.get_write_buffer_size() if self._transport else 0
        self.deadline = self._loop.time() + seconds

    def _cancel_request(self) -> None:
        if self._task:
            self._task.cancel()

    def _set_deadline(self) -> None:
        """Set the deadline of what the connection waits for; what the client has to read first has its own."""
        if self._writable or self._ended:
            return
        seconds = math.inf
        if self._exchange is None:
            seconds = self._times.idle_seconds if self._idle else self._times.head_seconds
        elif self._exchange.waits_for_body:
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
