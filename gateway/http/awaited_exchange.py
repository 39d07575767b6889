"""A request that a coroutine answers, in a task of its own, which is cancelled when the client hangs up.

For calls that are few and may wait for long; requests for inference use `Exchange` itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.event_log import log
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestReceiver
from gateway.http.request_head import InvalidRequestError

_UNREAD_BODY_BYTES: Final = 256 << 10


class AwaitedExchange(RequestReceiver):
    """A request whose body is read in pieces; a client that sends faster than `answer` reads is stopped.

    Args:
        exchange: the request.
        answer: answers it.
        reads_body: False: `answer` reads no body, and none is kept.
    """

    def __init__(
        self, exchange: Exchange, answer: Callable[["AwaitedExchange"], Awaitable[None]], *, reads_body: bool = True
    ) -> None:
        """Start the task that runs `answer` with this object; it reads the body and sends the response.

        With `reads_body` False it reads no body, and `take_body` drops what comes.
        """
        self.exchange = exchange
        self._reads_body = reads_body
        self._unread = bytearray()
        """The pieces of the body that came and were not read yet."""
        self._body_error: Exception | None = None  # set by `fail_body`, and raised by the next `read`
        self._body_waiter: asyncio.Future[None] | None = None  # `read` waits here for more of the body
        self._drain_waiter: asyncio.Future[None] | None = None  # `drain` waits here for the client to read
        self._task = asyncio.get_running_loop().create_task(self._run(answer))

    async def read(self) -> bytes:
        """Wait for the next piece of the request body and return it; return b"" at the end of the body.

        After each piece the connection reads from the client again, if `take_body` has stopped that. Raises
        InvalidRequestError and BodyTimeoutError.
        """
        # Wait until `take_body` has put something into `_unread`, unless the body has ended or failed.
        while not self._unread:
            if self._body_error:  # `fail_body` has set it
                raise self._body_error
            if self.exchange.body_complete:
                return b""
            self._body_waiter = asyncio.get_running_loop().create_future()  # done by `take_body` or `fail_body`
            await self._body_waiter

        # Take all of it, and let the client send more.
        piece = bytes(self._unread)
        self._unread.clear()
        self.exchange.connection.resume_body()
        return piece

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        if self.exchange.is_blocked:
            self._drain_waiter = asyncio.get_running_loop().create_future()
            await self._drain_waiter

    # Called by the connection

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Keep a piece of the body until `read` returns it; stop reading from the client while too much is unread."""
        del is_last  # `read` finds the end of the body in `exchange.body_complete`
        if not self._reads_body:
            return  # nobody calls `read`, so the piece is dropped
        self._unread += piece
        if len(self._unread) > _UNREAD_BODY_BYTES:  # 256 KiB; `read` lets the connection read again
            self.exchange.connection.pause_body()
        _wake(self._body_waiter)  # a `read` that waits goes on

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Make the next `read` raise `error`."""
        self._body_error = error
        _wake(self._body_waiter)

    def resume_writing(self) -> None:
        """End the wait of `drain`."""
        _wake(self._drain_waiter)

    def hang_up(self) -> None:
        """Cancel the task."""
        self._task.cancel()

    async def _run(self, answer: Callable[["AwaitedExchange"], Awaitable[None]]) -> None:
        """Await the answer; answer 500 after a defect, and break off a response that was not ended."""
        try:
            await answer(self)
        except Exception:  # noqa: BLE001 - one request must not end the connections of all others
            log.exception("request_failed")
            if not self.exchange.started:
                self.exchange.respond(500, b"", b"")
        if not self.exchange.ended:
            self.exchange.break_off()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter and not waiter.done():
        waiter.set_result(None)
