"""The floor of `benchmarks.scheduler_extender`: a server on the same listener that returns each body as it came.

`python -m benchmarks.servers.echo_server` prints its port, and ends when its standard input does.
"""

import asyncio
import sys

import uvloop

from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestHandling
from gateway.http.limits import ConnectionTimes, connection_caps
from gateway.http.listener import HttpListener
from gateway.http.request_head import InvalidRequestError


class _EchoedRequest:
    """A request whose body is returned."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._pieces: list[bytes] = []

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Take a piece, and return all after the last one."""
        self._pieces.append(piece)
        if is_last:
            self._exchange.respond(200, b"Content-Type: application/json\r\n", b"".join(self._pieces))

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Do nothing."""

    def resume_writing(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing: the request is broken off."""

    def hang_up(self) -> None:
        """Do nothing."""


async def main() -> None:
    """Serve until standard input ends."""
    times = ConnectionTimes()
    handling = RequestHandling(_EchoedRequest, lambda _status, reason: (b"", reason.encode()))
    listener = HttpListener(handling, ConnectionTable(connection_caps(1024), times.sweep_seconds), times)
    await listener.bind("127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    listener.unbind()


if __name__ == "__main__":
    uvloop.run(main())
