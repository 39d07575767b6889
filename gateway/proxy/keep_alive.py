"""Comments that keep the connections of streams open which wait for their next piece.

Load balancers and clients give up a connection on which nothing comes: the shortest times that are met are 20 s between
two pieces and 30 s to the head. So a comment is sent every 10 s. Not in the first 5 s: once a byte was sent, an error
has no status any more, and clients do not try again by themselves.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest

FIRST_COMMENT_SECONDS: Final = 5.0
"""After the body of a request has come."""
COMMENT_SECONDS: Final = 10.0
"""After the last piece that the client has got."""
STREAM_FIELDS: Final = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
STREAMED_ROUTES: Final = frozenset({"chat", "completions", "messages", "responses"})
"""Names of the paths that have streams; engines ignore the wish for one at others."""
_SWEEP_SECONDS: Final = 0.5
_COMMENT: Final = b": waiting\n\n"
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


def render_comment(route: str) -> bytes:
    """Return a piece of a stream that says nothing: Anthropic's API has an event for that."""
    return _PING if route == "messages" else _COMMENT


class KeepAlive:
    """The streams that are kept open. One sweep looks at all of them: a timer for each would cost more."""

    def __init__(self) -> None:
        self._requests: set[InferenceRequest] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        """Starts the next sweep; None: none is planned, as no stream is kept open."""

    def add(self, request: "InferenceRequest") -> None:
        """Keep the stream of a request open, from now to its end."""
        self._requests.add(request)
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def discard(self, request: "InferenceRequest") -> None:
        """Forget a request that has ended, or is no stream."""
        self._requests.discard(request)

    def _sweep(self) -> None:
        self._sweep_timer = None
        now = time.monotonic()
        for request in list(self._requests):
            pause_seconds = COMMENT_SECONDS if request.exchange.started else FIRST_COMMENT_SECONDS
            is_due = now - request.last_sent >= pause_seconds
            if is_due and request.is_between_events and not request.exchange.is_blocked:
                request.send_comment(now)
        if self._requests:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
