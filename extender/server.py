"""The HTTP server of the extender: the verbs of the scheduler, its health and its metrics.

Requests are answered within the pass of the event loop in which their body is complete: the scheduler waits for each,
and an answer reads what is in memory only.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Final

from devices.limits import descriptor_limit
from extender.answers import Answers
from extender.extender_metrics import CONTENT_TYPE, ExtenderMetrics, Verb
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import Exchange
from gateway.http.limits import ConnectionTimes, connection_caps
from gateway.http.listener import HttpListener
from gateway.http.server_connection import RequestHandling
from gateway.http.whole_body import BodyLimits, WholeBodies, WholeBody

MOST_BODY_BYTES: Final = 96 << 20
"""5,000 whole Nodes of 12.5 KB are 60 MiB; names alone are 150 KB."""
MOST_HELD_BYTES: Final = 192 << 20
"""All bodies that are being received."""
VERBS: Final[dict[str, Verb]] = {"/filter": "filter", "/prioritize": "prioritize", "/score": "prioritize"}
"""`/score` is the path of FlexInfer's scheduler."""
_JSON: Final = b"Content-Type: application/json\r\n"
_TEXT: Final = b"Content-Type: text/plain; charset=utf-8\r\n"
_TIMES: Final = ConnectionTimes(idle_seconds=3600.0)
"""A scheduler keeps its connections for 90 seconds without a request; to close one earlier could fail a request."""
_OK, _UNAVAILABLE = 200, 503


class ExtenderServer:
    """The routes of the extender.

    Args:
        answers: the answers of the verbs.
        metrics: the metrics of this process.
        is_ready: True once all lists are in.
    """

    def __init__(self, answers: Answers, metrics: ExtenderMetrics, is_ready: Callable[[], bool]) -> None:
        self.answers = answers
        self.bodies = WholeBodies()
        self._metrics = metrics
        self._is_ready = is_ready

    def begin(self, exchange: Exchange) -> WholeBody | None:
        """Begin to answer a request to the scheduler's port."""
        verb = VERBS.get(exchange.head.path)
        if verb is None:
            self.begin_read(exchange)
            return None
        if exchange.head.method != "POST":
            exchange.respond(405, _TEXT + b"Allow: POST\r\n", b"use POST\n")
            return None
        limits = BodyLimits(MOST_BODY_BYTES, MOST_HELD_BYTES)
        return self.bodies.receive(exchange, limits, functools.partial(self._respond, exchange, verb))

    def _respond(self, exchange: Exchange, verb: Verb, body: bytes | bytearray) -> None:
        status, answer = self.answers.answer(verb, body)
        exchange.respond(status, _JSON if status == _OK else _TEXT, answer)

    def begin_read(self, exchange: Exchange) -> None:
        """Answer health and metrics, and nothing else."""
        if exchange.head.method not in {"GET", "HEAD"}:
            exchange.respond(404, _TEXT, b"not found: /filter, /prioritize and /score take POST\n")
            return
        match exchange.head.path:
            case "/healthz":
                exchange.respond(_OK, _TEXT, b"ok\n")
            case "/readyz" if not self._is_ready():
                exchange.respond(_UNAVAILABLE, _TEXT, b"the lists of nodes and models are not complete yet\n")
            case "/readyz":
                exchange.respond(_OK, _TEXT, b"ok\n")
            case "/metrics":
                exchange.respond(_OK, b"Content-Type: %b\r\n" % CONTENT_TYPE, self._metrics.render())
            case _:
                exchange.respond(404, _TEXT, b"not found\n")


def _render_error(_status: int, reason: str) -> tuple[bytes, bytes]:
    return _TEXT, f"{reason}\n".encode()


@contextlib.asynccontextmanager
async def listen(server: ExtenderServer, address: str, port: int, *, reads_only: bool = False) -> AsyncIterator[int]:
    """Serve an address, and return its port. Raises OSError.

    Args:
        server: the routes.
        address: an address of this machine; empty: all of them.
        port: the port; 0: a free one.
        reads_only: serve health and metrics only.
    """
    begin = server.begin_read if reads_only else server.begin
    table = ConnectionTable(connection_caps(descriptor_limit()), _TIMES.sweep_seconds)
    listener = HttpListener(RequestHandling(begin, _render_error), table, _TIMES)
    await listener.bind(address, port)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.unbind()
