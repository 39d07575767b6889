"""A request whose body is received whole before it is answered at once, and the memory that such bodies may take.

For servers whose answers are made from memory: nobody waits, so nothing is read again and no writer is stopped.
"""

from collections.abc import Callable
from typing import NamedTuple

from gateway.http.exchange import BodyTimeoutError, Exchange, RequestReceiver
from gateway.http.request_head import InvalidRequestError


class BodyLimits(NamedTuple):
    """The most bytes of one body, and of all that are being received."""

    body_bytes: int
    held_bytes: int


class WholeBodies:
    """The bodies of one server that are being received.

    Args:
        render_error: returns the lines of the header fields and the body of a failure: of a status and a reason.
    """

    def __init__(self, render_error: Callable[[int, str], tuple[bytes, bytes]]) -> None:
        self.held_bytes = 0
        self.render_error = render_error

    def receive(
        self, exchange: Exchange, limits: BodyLimits, answer: Callable[[bytes | bytearray], None]
    ) -> "WholeBody | None":
        """Begin to receive a body, and call `answer` with it when it is whole.

        None: refused, as this body or all bodies together would be too large.
        """
        length = exchange.content_length or 0
        if length > limits.body_bytes:
            exchange.respond(413, *self.render_error(413, f"the body is larger than {limits.body_bytes >> 10} KiB"))
            return None
        if self.held_bytes + length > limits.held_bytes:
            self.refuse_for_all(exchange)
            return None
        exchange.send_continue()
        return WholeBody(self, exchange, limits, answer)

    def refuse_for_all(self, exchange: Exchange) -> None:
        """Refuse a body that may come later, once the others are answered."""
        exchange.respond(503, *self.render_error(503, "too many large requests at once"))


class WholeBody(RequestReceiver):
    """A body that is being received."""

    def __init__(
        self,
        bodies: WholeBodies,
        exchange: Exchange,
        limits: BodyLimits,
        answer: Callable[[bytes | bytearray], None],
    ) -> None:
        self._bodies, self._exchange, self._limits, self._answer = bodies, exchange, limits, answer
        self._pieces = bytearray()
        """Pieces before the last one; a body that comes at once is never copied."""

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Take a piece, and answer after the last one."""
        if is_last and not self._pieces:
            self._answer(piece)
            return
        self._pieces += piece
        self._bodies.held_bytes += len(piece)
        if len(self._pieces) > self._limits.body_bytes:
            self.hang_up()
            self._exchange.respond(413, *self._bodies.render_error(413, "the body is too large"))
        elif self._bodies.held_bytes > self._limits.held_bytes:
            self.hang_up()
            self._bodies.refuse_for_all(self._exchange)
        elif is_last:
            body = self._pieces
            self.hang_up()
            self._answer(body)

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Refuse a request whose body does not come."""
        self.hang_up()
        self._exchange.respond(400, *self._bodies.render_error(400, f"the body did not come: {error}"))

    def hang_up(self) -> None:
        """Free the body."""
        self._bodies.held_bytes -= len(self._pieces)
        self._pieces = bytearray()
