"""A server of few paths whose answers are whole and soon made: metrics, health, webhooks, the APIs of agents.

Whoever reaches its port may ask, so it takes few connections and little memory, whatever is sent to it. A request
without a body and with a plain answer is answered within the pass of the event loop in which it has come; one whose
answer is awaited, or whose body is still coming, gives way to other connections, unless the answer calls
`keep_connection`.
"""

import contextlib
import functools
import inspect
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestHandling, RequestReceiver
from gateway.http.headers import Field, Headers, encode_fields, is_from_local_program
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.request_head import InvalidRequestError

T = TypeVar("T")

TEXT: Final = b"text/plain; charset=utf-8"
JSON: Final = b"application/json"
CAPS: Final = ConnectionCaps(total=64, per_peer=16, buffered_bytes=16 << 10)
"""Scrapers and probes need a handful. A node agent may have 30 MiB of memory for all of them."""
TIMES: Final = ConnectionTimes(
    head_seconds=5.0, body_pause_seconds=5.0, write_seconds=5.0, linger_seconds=2.0, request_seconds=30.0
)
BUFFER_BYTES: Final = 16 << 10
"""Those of the kernel count as memory of the container, too; it takes twice as much for each direction."""
_FRESH_AT_ONCE: Final = 10
_FRESH_SECONDS: Final = 1.0
_MOST_PARAMETERS: Final = 64


class WholeAnswer(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    content_type: bytes = TEXT
    fields: tuple[Field, ...] = ()

    def encode_fields(self) -> bytes:
        """Return the lines of the header fields."""
        return encode_fields(((b"Content-Type", self.content_type), *self.fields))


class AskedQuestion(NamedTuple):
    """A request, as the answer to it needs it."""

    exchange: Exchange
    body: bytes | bytearray = b""
    name: str = ""
    """The rest of the path, of a route whose path is a prefix."""

    @property
    def method(self) -> str:
        """The method."""
        return self.exchange.head.method

    @property
    def path(self) -> str:
        """The path, decoded."""
        return self.exchange.head.path

    @property
    def headers(self) -> Headers:
        """The header fields."""
        return self.exchange.head.headers

    @property
    def peer(self) -> str:
        """The address of the client."""
        return self.exchange.connection.peer

    def read_query(self) -> dict[str, str]:
        """Return the first value of each parameter. Raises ValueError: they are too many."""
        pairs = parse_qsl(
            self.exchange.head.query, keep_blank_values=True, errors="surrogateescape", max_num_fields=_MOST_PARAMETERS
        )
        return dict(reversed(pairs))  # of several values of a parameter, the first is put last and stays

    def keep_connection(self) -> None:
        """Keep the connection from giving way to another one during this request: its client is known."""
        self.exchange.is_replaceable = False


Answer = Callable[[AskedQuestion], WholeAnswer | Awaitable[WholeAnswer]]


class BodyLimits(NamedTuple):
    """The most bytes of one body, and of all that are being received."""

    body_bytes: int
    held_bytes: int


class Route(NamedTuple):
    """The answer to the requests to a path."""

    answer: Answer
    method: str = "GET"
    """GET serves HEAD, too."""
    body: BodyLimits | None = None
    """Limits of the body; None: a body is not read."""


def explain(status: int, message: str) -> WholeAnswer:
    """Return a failure as text."""
    return WholeAnswer(status, f"{message}\n".encode())


class AnswerServer:
    """The routes of a server.

    Args:
        routes: the routes by path; one that ends with a slash is a prefix of the paths it serves.
        fail: renders a failure: a status, and what is the matter.
        check: returns the answer to a request that may not be asked, before anything else is looked at.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        fail: Callable[[int, str], WholeAnswer] = explain,
        check: Callable[[AskedQuestion], WholeAnswer | None] = lambda _: None,
    ) -> None:
        self._routes = routes
        self._prefixes = [path for path in routes if path.endswith("/")]  # such a route serves all paths below it
        self._fail = fail
        """Renders a failure of a status and a reason."""
        self._check = check
        """Returns the answer to a request that must not be asked here; None: the request is allowed."""
        self.held_bytes = 0
        """The bytes of the bodies that are being received."""

    def handle_requests(self, *, is_private: bool) -> RequestHandling:
        """Return the work on the requests to a listener; `is_private`: of local programs, not of web pages."""
        return RequestHandling(functools.partial(self._begin, is_private), self._render_error)

    def _begin(self, is_private: bool, exchange: Exchange) -> RequestReceiver | None:
        """Answer a request, or begin to: find its route; refuse other paths and methods and, if private, web pages.

        Return what the connection calls while the request goes on, for its body or an awaited answer; None if the
        response was sent.
        """
        exchange.is_replaceable = True  # anybody may ask: until the answer is sent, the connection may give way
        question = AskedQuestion(exchange)
        head = exchange.head

        # 1. Refuse all but local programs, if this listener is private, and what `_check` refuses (the caller of the
        #    constructor gives it).
        if is_private and not is_from_local_program(head.headers):
            self.refuse(exchange, 403, "ask 127.0.0.1 or localhost by that name, and from no web page")
            return None
        if (refusal := self._check(question)) is not None:
            self._respond(exchange, refusal)
            return None

        # 2. Find the route of the path; `name` is the rest of the path behind a prefix.
        found = self._find_route(head.path)
        if found is None:
            self.refuse(exchange, 404, "not found")
            return None
        route, name = found

        # 3. Refuse other methods; HEAD is answered like GET.
        method = "GET" if head.method == "HEAD" else head.method
        if method != route.method:
            allowed = b"GET, HEAD" if route.method == "GET" else route.method.encode()
            refusal = self._fail(405, f"use {route.method}")
            self._respond(exchange, refusal._replace(fields=(*refusal.fields, (b"Allow", allowed))))
            return None
        return self._begin_route(question._replace(name=name), route)

    def _find_route(self, path: str) -> tuple[Route, str] | None:
        """Return the route of a path, and the name in it: what follows the route's prefix, "" for an exact route.

        A route whose path ends with a slash is a prefix; of several the longest counts. None if nothing is served
        there, also if the path is a prefix without a name.
        """
        if route := self._routes.get(path):
            return None if path.endswith("/") else (route, "")
        prefixes = [prefix for prefix in self._prefixes if path.startswith(prefix)]
        longest = max(prefixes, key=len, default=None)
        return None if longest is None else (self._routes[longest], path[len(longest) :])

    def _begin_route(self, question: AskedQuestion, route: Route) -> RequestReceiver | None:
        """Answer a request to this route, or return the receiver of its body.

        A route without limits for a body reads none, and answers now: return the exchange if its answer is awaited,
        else None. A body that is too long, or for which all bodies together leave no room, is refused: return None.
        """
        exchange, limits = question.exchange, route.body
        length = exchange.content_length or 0  # 0 also for a chunked body, whose length is not known yet
        if limits is None:
            return self.answer(question, route)

        # Refuse what the length shows to be too much; `take_body` counts what comes.
        if length > limits.body_bytes:
            self.refuse(exchange, 413, f"the body is larger than {limits.body_bytes >> 10} KiB")
            return None
        if self.held_bytes + length > limits.held_bytes:
            self.refuse(exchange, 503, "too many large requests at once")
            return None

        exchange.send_continue()  # asks a client for the body, if it waits for that
        return _WholeBody(self, question, route, limits)

    def answer(self, question: AskedQuestion, route: Route) -> AwaitedExchange | None:
        """Answer a request that has come whole: at once, or in a task if the route's function is a coroutine function.

        Return the exchange that runs the task; None if the response was sent.
        """
        if inspect.iscoroutinefunction(route.answer):

            async def respond(_: AwaitedExchange) -> None:  # in a task, which the exchange starts at once
                self._respond(question.exchange, await route.answer(question))  # type: ignore[misc] # a coroutine

            return AwaitedExchange(question.exchange, respond, reads_body=False)
        answer = route.answer(question)
        assert isinstance(answer, WholeAnswer)  # noqa: S101 - a plain function returns no awaitable
        self._respond(question.exchange, answer)
        return None

    def refuse(self, exchange: Exchange, status: int, reason: str) -> None:
        """Answer a request with a failure."""
        self._respond(exchange, self._fail(status, reason))

    def _respond(self, exchange: Exchange, answer: WholeAnswer) -> None:
        exchange.respond(answer.status, answer.encode_fields(), answer.body)

    def _render_error(self, status: int, reason: str) -> tuple[bytes, bytes]:
        answer = self._fail(status, reason)
        return answer.encode_fields(), answer.body


class _WholeBody:
    """A body that is received whole before it is answered at once."""

    def __init__(self, server: AnswerServer, question: AskedQuestion, route: Route, limits: BodyLimits) -> None:
        self._server, self._question, self._route, self._limits = server, question, route, limits
        self._pieces = bytearray()
        """Pieces before the last one; a body that comes at once is never copied."""

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Keep a piece, and answer after the last one; refuse the request once it, or all bodies, hold too much.

        `held_bytes` of the server counts the pieces of all bodies that are being received.
        """
        # A body that comes at once is neither copied nor counted.
        if is_last and not self._pieces:
            self._answer(piece)
            return

        self._pieces += piece
        self._server.held_bytes += len(piece)
        if len(self._pieces) > self._limits.body_bytes:
            self._refuse(413, "the body is too large")
        elif self._server.held_bytes > self._limits.held_bytes:
            self._refuse(503, "too many large requests at once")  # it may come later
        elif is_last:
            body = self._pieces
            self.hang_up()  # gives its bytes back to the budget, because it is no longer being received
            self._answer(body)

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Refuse a request whose body does not come."""
        self._refuse(400, f"the body did not come: {error}")

    def resume_writing(self) -> None:
        """Do nothing: the answer is sent whole."""

    def stop(self) -> None:
        """Do nothing: the answer is sent at once."""

    def hang_up(self) -> None:
        """Take the body out of the budget, and free it."""
        self._server.held_bytes -= len(self._pieces)
        self._pieces = bytearray()

    def _refuse(self, status: int, reason: str) -> None:
        self.hang_up()
        self._server.refuse(self._question.exchange, status, reason)

    def _answer(self, body: bytes | bytearray) -> None:
        """Answer the request; one whose answer is awaited has the awaited exchange as its receiver from now on."""
        if awaited := self._server.answer(self._question._replace(body=body), self._route):
            self._question.exchange.receiver = awaited


class PacedRendering(Generic[T]):
    """A text that is costly to render, and that strangers ask for: beyond ten times at once, once a second.

    In between the last one is repeated, so that clients that ask often, or do not read it, share one.

    Args:
        render: returns the text, or a task that renders it.
        clock: seconds that never go back.
    """

    def __init__(self, render: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._counted_at = clock()
        """The time of the last call of `read`."""
        self._renderings_left = float(_FRESH_AT_ONCE)
        """The tokens of a token bucket: each rendering takes one, and each second adds one, up to ten."""
        self._text: T | None = None
        """The last text; None: none was rendered."""

    def read(self) -> T:
        """Return the text: rendered now if the token bucket allows it, else the last one, at most a second old."""
        now = self._clock()
        # Refill the bucket for the time since the last call.
        self._renderings_left = min(_FRESH_AT_ONCE, self._renderings_left + (now - self._counted_at) / _FRESH_SECONDS)
        self._counted_at = now
        if self._text is None or self._renderings_left >= 1:
            self._renderings_left -= 1
            self._text = self._render()
        return self._text


def is_loopback(host: str) -> bool:
    """Decide whether only this machine reaches what listens on `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def create_listener(
    server: AnswerServer,
    host: str,
    *,
    context: ssl.SSLContext | None = None,
    caps: ConnectionCaps = CAPS,
    times: ConnectionTimes = TIMES,
) -> HttpListener:
    """Return a listener for a server that will listen on `host`, with a connection table of its own.

    On a loopback address only local programs may ask, not web pages.
    """
    handling = server.handle_requests(is_private=is_loopback(host))
    table = ConnectionTable(caps, times.sweep_seconds)
    # Small kernel buffers save memory, but not for loopback: its packets have 64 KiB, and one that does not fit into
    # the buffer waits 40 ms.
    buffer_bytes = None if is_loopback(host) else BUFFER_BYTES
    return HttpListener(handling, table, times, context, buffer_bytes=buffer_bytes)


@contextlib.asynccontextmanager
async def serve_answers(
    server: AnswerServer,
    host: str,
    port: int,
    *,
    context: ssl.SSLContext | None = None,
    caps: ConnectionCaps = CAPS,
    times: ConnectionTimes = TIMES,
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the block runs; returns the address. Raises OSError.

    Args:
        server: the routes.
        host: an address of this machine; empty: all of them.
        port: the port; 0: a free one.
        context: the certificate; None: plain HTTP.
        caps: the most connections.
        times: the times that a connection may take.
    """
    listener = create_listener(server, host, context=context, caps=caps, times=times)
    await listener.bind(host, port)
    try:
        bound = listener.sockets[0].getsockname()
        yield bound[0], bound[1]
    finally:
        listener.unbind()
