"""The HTTPS server of preflight: one path, which only API servers know, and answers from memory.

A request is answered within the pass of the event loop in which its body is complete. One at another path costs no more
than its head, so a stranger who reaches the port learns nothing and delays nothing.
"""

import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog

from controller.preflight.admission_review import InvalidReviewError, ReviewedWrite, encode_answer, parse_review
from controller.preflight.preflight_verdict import PreflightAnswer
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import Exchange
from gateway.http.limits import ConnectionCaps
from gateway.http.listener import HttpListener
from gateway.http.server_connection import RequestHandling
from gateway.http.whole_answers import BUFFER_BYTES, TIMES
from gateway.http.whole_body import BodyLimits, WholeBodies, WholeBody, render_text

MOST_BODY_BYTES: Final = 8 << 20
"""A review has an object twice, and the API server takes none of more than 3 MiB."""
MOST_HELD_BYTES: Final = 16 << 20
"""All bodies that are being received: two of the largest, and thousands of usual ones."""
MOST_CONNECTIONS: Final = 128
"""Half of them from one address. API servers need some; each of a stranger's takes memory of the controller, and gives
way to that of another."""
_JSON: Final = b"Content-Type: application/json\r\n"

log = structlog.get_logger()


class PreflightServer:
    """The path of the webhook.

    Args:
        knows_path: returns whether a path is that of the webhook.
        judge: returns the answer to a write.
    """

    def __init__(self, knows_path: Callable[[str], bool], judge: Callable[[ReviewedWrite], PreflightAnswer]) -> None:
        self.bodies = WholeBodies()
        self._knows_path = knows_path
        self._judge = judge

    def begin(self, exchange: Exchange) -> WholeBody | None:
        """Begin to answer a request."""
        if not self._knows_path(exchange.head.path):
            exchange.respond(404, *render_text(404, "not found"))
        elif exchange.head.method != "POST":
            fields, text = render_text(405, "use POST")
            exchange.respond(405, fields + b"Allow: POST\r\n", text)
        else:
            limits = BodyLimits(MOST_BODY_BYTES, MOST_HELD_BYTES)
            return self.bodies.receive(exchange, limits, functools.partial(self.answer, exchange))
        return None

    def answer(self, exchange: Exchange, body: bytes | bytearray) -> None:
        """Answer a review."""
        try:
            write = parse_review(body)
        except InvalidReviewError as error:
            exchange.respond(400, *render_text(400, str(error)))
            return
        try:
            answer = self._judge(write)
        except Exception:  # the boundary of the request: the service is written without preflight
            log.exception("preflight_failed")
            exchange.respond(500, *render_text(500, "preflight failed: see the log of the controller"))
            return
        exchange.respond(200, _JSON, encode_answer(write.uid, answer))


@contextlib.asynccontextmanager
async def listen(server: PreflightServer, host: str, port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Serve an address over TLS, and return its port. Raises OSError.

    Args:
        server: the path.
        host: an address of this machine; empty: all of them.
        port: the port; 0: a free one.
        context: the certificate.
    """
    caps = ConnectionCaps(MOST_CONNECTIONS, MOST_CONNECTIONS // 2, buffered_bytes=BUFFER_BYTES)
    table = ConnectionTable(caps, TIMES.sweep_seconds)
    handling = RequestHandling(server.begin, render_text)
    listener = HttpListener(handling, table, TIMES, context, buffer_bytes=BUFFER_BYTES)
    await listener.bind(host, port)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.unbind()
