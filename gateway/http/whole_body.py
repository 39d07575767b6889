"""A request whose body is received whole before it is answered at once, and the memory that such bodies may take.

For servers whose answers are made from memory: nobody waits, so nothing is read again and no writer is stopped.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.http.exchange import BodyTimeoutError, Exchange
from gateway.http.request_head import InvalidRequestError

_TEXT: Final = b"Content-Type: text/plain; charset=utf-8\r\n"


class BodyLimits(NamedTuple):
    """The most bytes of one body, and of all that are being received."""

    body_bytes: int
    held_bytes: int


class WholeBodies:
    """The bodies of one server that are being received."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def receive(
        self, exchange: Exchange, limits: BodyLimits, answer: Callable[[bytes | bytearray], None]
    ) -> "WholeBody | None":
        """Receive a body, with which `answer` is called; None: it was refused, since it is too large."""
        length = exchange.content_length or 0
        if length > limits.body_bytes:
            exchange.respond(413, _TEXT, b"the body is larger than %d MiB\n" % (limits.body_bytes >> 20))
            return None
        if self.held_bytes + length > limits.held_bytes:
            exchange.respond(503, _TEXT, b"too many large requests at once\n")
            return None
        exchange.send_continue()
        return WholeBody(self, exchange, limits, answer)


class WholeBody:
    """A body that is being received."""

    __slots__ = ("_answer", "_bodies", "_exchange", "_limits", "_pieces")

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
        if len(self._pieces) > self._limits.body_bytes or self._bodies.held_bytes > self._limits.held_bytes:
            self.hang_up()
            self._exchange.respond(413, _TEXT, b"the body is too large\n")
        elif is_last:
            body = self._pieces
            self.hang_up()
            self._answer(body)

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Refuse a request whose body does not come."""
        self.hang_up()
        self._exchange.respond(400, _TEXT, f"the body did not come: {error}\n".encode())

    def resume_writing(self) -> None:
        """Do nothing: the answer is sent whole."""

    def hang_up(self) -> None:
        """Free the body."""
        self._bodies.held_bytes -= len(self._pieces)
        self._pieces = bytearray()
