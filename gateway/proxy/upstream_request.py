"""One request to one backend: send it whole, and relay the response to the client as its content type requires.

A token reaches the client as soon as the engine has made it, and a slow client slows the engine's socket instead of
filling the proxy's memory.
"""

import asyncio
import functools
import time
from contextlib import closing
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from gateway.event_log import log
from gateway.http.headers import HOP_BY_HOP, Headers
from gateway.http.peer_probes import ANSWER_SECONDS, SILENCE_SECONDS
from gateway.http.upstream_connection import UpstreamBrokeOffError, UpstreamConnection
from gateway.http.upstream_pool import NotAcceptedError, UpstreamPool
from gateway.proxy import errors, paths
from gateway.proxy.config import Backend
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import NO_FIELDS, RequestBody
from gateway.proxy.response_body import ErrorResponse, JsonResponse, ResponseBody
from gateway.proxy.response_end import ResponseEnd
from gateway.proxy.responses_stream import open_stream
from gateway.proxy.served_routes import suggest_paths
from gateway.proxy.service import SERVICE_HEADER, Service, render_adapter_fields
from gateway.proxy.token_counts import TokenCount
from gateway.proxy.token_lanes import UNKNOWN
from runtimes.engine_errors import judge_error, read_error
from runtimes.registry import find_runtime

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest, SharedResources

_NOT_TO_CLIENT: Final = HOP_BY_HOP | {
    *(b"content-length", b"date", b"server", b"set-cookie", b"x-request-id", b"strict-transport-security"),
    SERVICE_HEADER.lower().encode(),
}
_FIRST_ERROR_STATUS: Final = 300  # a redirect is no response that a client could use
_TEMPORARY_ERRORS: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

_NO_RESPONSE: Final = ResponseBody()
MOST_RETRY_SECONDS: Final = 120
"""OpenAI's and Anthropic's clients do not try again at all if they are told to wait for longer."""
_COUNT_SECONDS: Final = 10.0
"""Time in which an engine has counted the tokens of a prompt, which it does in milliseconds unless it hangs."""


class UpstreamRequest:
    """A client's request on its way to a backend of `service`, and the receiver of the backend's response."""

    def __init__(
        self, request: "InferenceRequest", service: Service, backend: Backend, shared: "SharedResources"
    ) -> None:
        self.backend = backend
        self._request = request
        self._exchange = request.exchange
        self._service = service
        self._shared = shared
        self._frees_late = backend.shared_tokens is not None and bool(find_runtime(backend.engine).prompt_counts)

        # The health of the backend is judged by its answers, of which this is one.
        self._backend_past = shared.health.observe_backend(backend.uid)
        self._progress = self._backend_past.expect_answer(request.body.content, time.monotonic())

        # The way to the backend. A connection is stale if the backend had closed it before the request came.
        self._task: asyncio.Task[None] | None = None  # makes a new connection, and sends the request over it
        self._connection: UpstreamConnection | None = None  # from the sending to the end of the response
        self._cancelled = False  # by `cancel`; then nothing is sent again
        self._was_repeated = False  # the request was sent again, because the first connection was stale
        self._api_key = backend.api_key  # or the one before, after the backend has refused this one

        # The response to the client, from `take_head` on.
        self._response: ResponseBody = _NO_RESPONSE  # rewrites the body
        self._fields = b""  # the lines of the header fields
        self._last_piece = b""  # the last piece of the body, which is sent with the end
        self.is_between_events = True
        """True if the client has got whole events only, so that a comment or another event may follow."""

        # Measures of a stream, in which about each event with text is one token.
        self._text_events = 0  # so far, as `_response` counts them
        self._first_token_at = self._last_token_at = 0.0
        self._was_blocked = False
        """The client read too slowly, and held up the backend."""

    @property
    def tokens(self) -> TokenCount:
        """The engine's report so far."""
        return self._response.tokens

    @property
    def was_sent(self) -> bool:
        """True if the backend has got the request."""
        return self._connection is not None

    @property
    def generation_seconds(self) -> float | None:
        """Time from the first to the last token; None if nothing was streamed, or the client read too slowly."""
        seconds = self._last_token_at - self._first_token_at
        return seconds if seconds > 0 and not self._was_blocked else None

    # The request

    def send(self) -> None:
        """Send the request over a kept connection, or a new one."""
        try:
            if connection := self._shared.pool.take_idle(self.backend.url):
                self._send_over(connection)
            else:
                self._connect()
        except Exception:  # noqa: BLE001 - the client gets an answer to whatever fails here
            self._request.fail()

    def cancel(self) -> None:
        """Break the request off, so that the backend stops its work."""
        self._cancelled = True
        if self._task:
            self._task.cancel()
        if self._connection and not self._frees_late:
            self._connection.abort()

    def free_slot(self) -> None:
        """Give the slot back. A cancelled request keeps shared cells until the backend closes the connection."""
        uid, reserved = self.backend.uid, self._request.reserved
        if self._cancelled and self._connection and self._frees_late:
            self._connection.abort(functools.partial(self._service.free_backend, uid, reserved))
        else:
            self._service.free_backend(uid, reserved)

    def forget_answer(self) -> None:
        """Note that the answer, if it has not ended, shows nothing of the backend."""
        self._backend_past.stop_observing(self._progress)

    def render_error(self, error: RequestError) -> bytes:
        """Return what tells the client of an error within a response that was begun; empty if there is no way."""
        return self._response.break_off(error)

    def resume_reading(self) -> None:
        """Read the response again, because the client has read."""
        if self._connection:
            self._connection.resume_reading()
            self._backend_past.note_data(self._progress, time.monotonic())

    def _connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send_over_new())

    async def _send_over_new(self) -> None:
        """Send the request over a new connection; if there is none, try another backend or fail."""
        try:
            try:
                connection = await self._shared.pool.connect(self.backend.url)
            except NotAcceptedError as error:
                self._note_not_accepted(error)
            else:
                self._send_over(connection)
        except Exception:  # noqa: BLE001 - the client gets an answer to whatever fails here
            self._request.fail()

    def _note_not_accepted(self, error: NotAcceptedError) -> None:
        """Try another backend, because this one accepts no connection.

        A request that was sent before over a stale connection is broken off instead: perhaps the backend has got it.
        """
        if self._was_repeated:
            self._break_off(str(error))
        else:
            self._note_failure("it accepts no connection")
            self._service.note_unreachable(self.backend)
            self._request.try_other_backend(self.backend, error)

    def _send_over(self, connection: UpstreamConnection) -> None:
        """Send head and body over `connection`, with the engine's own name for the model and its key."""
        request = self._request
        fields = render_adapter_fields(self.backend.adapters, request.adapter) if self.backend.adapters else NO_FIELDS
        body = request.body.render_for_engine(self.backend.model, fields)  # in pieces
        length = len(body[0]) if len(body) == 1 else sum(map(len, body))

        # A sum of bytes takes less than half of the time of formatting when the processor's caches are cold.
        head = (
            request.head.forwarded
            + _backend_fields(self.backend.url, self._api_key)
            + b"Content-Length: "
            + str(length).encode()
            + b"\r\n"
            + request.id_line
            + b"\r\n"
        )
        self._connection = connection
        silence_seconds = ANSWER_SECONDS if len(self._service.config.backends) > 1 else SILENCE_SECONDS
        connection.send(head, body, self, at_once=request.body.streams, silence_seconds=silence_seconds)

    # The response

    def take_head(self, status: int, headers: Headers, piece: bytes) -> None:
        """Choose how to rewrite the response by its status and type, send its beginning to the client, and note it.

        The body of the request is freed, since no other backend gets it now. An error, and a mere count of tokens, is
        no answer by whose delay the backend could be judged.
        """
        self._service.note_reached(self.backend)
        # 0. A backend that does not know its new key yet gets the one before.
        if status == HTTPStatus.UNAUTHORIZED and self._send_previous_key():
            return

        # 1. Choose by status, type and path how the body is rewritten.
        fields, request = _read_fields(headers), self._request
        request.status, forwarded = status, fields.forwarded
        model, route = request.attempts.model_name, request.route
        if _is_error(status):
            self._response = ErrorResponse(fields.retry_after)
        elif fields.kind == b"text/event-stream":
            self._response = open_stream(route, model, self.backend.model, hides_usage=request.hides_usage)
        elif self._exchange.started:  # by comments of a stream, which this is not
            self.cancel()
            self._break_off("its response is no stream")
            return
        elif fields.kind == b"application/json":
            self._response = JsonResponse(model)
        if not self._response.is_stream and not _is_error(status):
            self._shared.keep_alive.discard(request)  # a comment would begin a stream
        if request.translator and not _is_error(status):
            self._response, forwarded = request.translator.translate(self._response, request)
        self._fields = forwarded + request.client_fields + self._service.header_line

        # 2. Send the beginning, and note what it shows of the backend.
        self._pass_on(piece)
        if not _is_error(status):  # after an error, another backend may get the request
            if not (self._response.is_stream and request.router.keeps_open):  # else with its first event
                request.free_body()
            if route not in paths.TOKEN_COUNT_ROUTES:
                self._backend_past.note_begin(self._progress, time.monotonic())
        self._note_piece()

    def _send_previous_key(self) -> bool:
        """Send the request again with the key before; return False if there is none, or that was refused, too."""
        key = self.backend.previous_api_key
        if key is None or self._api_key == key or self._connection is None:
            return False
        self._api_key = key
        self._connection.abort()
        self._connection = None
        self._connect()
        return True

    def take_response(self, piece: bytes) -> None:
        """Pass a piece of the response on, then note it."""
        self._pass_on(piece)
        self._note_piece()

    def _pass_on(self, piece: bytes) -> None:
        """Send what the client gets of a piece; stop reading from the backend while the client does not read.

        The response begins at once or, if its form may turn out to be an error (such as a JSON object), with the first
        data; so do all that are kept open, because an engine may fail after its head. Once it has begun, its last piece
        is held back, and sent together with its end.
        """
        data = self._response.feed(piece) if piece else b""  # empty if all of it is held back
        exchange = self._exchange
        if data:
            if not self._request.has_answer:
                self._request.has_answer = True
                self._request.free_body()
            self.is_between_events = data.endswith((b"\n\n", b"\r\n\r\n")) or data in (b"\n", b"\r\n")
        if exchange.started:
            if self._connection and self._connection.is_response_complete:
                self._last_piece = data  # `end_response` follows, and sends it
            else:
                exchange.write(data)
        elif data or (self._response.starts_at_once and not self._request.router.keeps_open):
            self._request.has_answer = True
            exchange.start(self._request.status, self._fields, data)
        if exchange.is_blocked and self._connection:
            self._connection.pause_reading()

    def _note_piece(self) -> None:
        """Measure a stream; end a response that is an error, once more of its body would not be used."""
        if self._response.is_stream:
            self._measure_stream()
        elif self._response.failed and self._connection:  # enough of an error has come to explain it
            self._connection.abort()
            self.end_response()

    def end_response(self) -> None:
        """End the client's response as the backend's has ended."""
        self._connection = None
        try:
            self._end_response()
        except Exception:  # noqa: BLE001 - the client gets an answer to whatever fails here
            self._request.fail()

    def fail_response(self, error: UpstreamBrokeOffError) -> None:
        """Break off the client's response, because the backend broke off its own.

        If the connection was stale, so that the backend has not seen the request, the request is repeated once instead.
        """
        self._connection = None
        if error.was_stale and not self._was_repeated and not self._cancelled:
            # Generated text is the only effect of a request, so it may be sent again over another connection.
            self._was_repeated = True
            self._connect()
            return
        try:
            if error.is_gone:
                self._service.note_unreachable(self.backend)
            self._break_off(str(error))
        except Exception:  # noqa: BLE001 - the client gets an end whatever fails here
            self._request.fail()

    def _end_response(self) -> None:
        """Send the end of the response, or the error that it turned out to be, and record the outcome.

        * An error of which the client has got nothing yet: it is translated, and sent as the response.
        * A stream without its last event, or an object of which nothing came: the client gets an error as its last
          event or as the response, or the connection is broken off.
        * Else the rest is sent; if it has an error in a form that the client cannot read, that is added in its form.
        """
        # 1. Take the end of the body; `finish` sets `failed`, `end` and `unreadable_error` of the response.
        request, exchange, response = self._request, self._exchange, self._response
        last_data = self._last_piece + response.finish()

        # 2. The cases in which the client gets an error instead of the end.
        if response.failed and not request.has_answer:  # the body is an error, of which nothing was sent
            error = self._translate_error(response, last_data)
            if not request.try_elsewhere(self.backend, error):
                request.send_error(error)
            return
        if response.end is ResponseEnd.CUT_OFF:
            exchange.write(last_data)
            self._break_off(response.end.value)
            return

        # 3. Send the end; `request.end` records the request, and comes before it.
        self._note_end(response)
        request.has_answer = True
        if response.unreadable_error:
            name, engine = self._service.config.name, self.backend.engine
            error = errors.translate_engine_error(_error_status(response), response.unreadable_error, name, engine)
            last_data += response.break_off(error)
        request.end()
        if exchange.started:
            exchange.finish(last_data)
        else:
            exchange.respond(request.status, self._fields, last_data)

    def _note_end(self, response: ResponseBody) -> None:
        """Note what a response whose begin was sent shows of the backend: it works, or it failed.

        An error for which the request is to blame shows nothing of the backend, and neither does a count of tokens.
        """
        if response.end is ResponseEnd.FAILED:
            self._request.error = "engine_error"
            self._note_failure(response.end.value)
        elif response.end is ResponseEnd.COMPLETE and self._request.route not in paths.TOKEN_COUNT_ROUTES:
            self._backend_past.note_success(self._progress)

    def _note_failure(self, outcome: str) -> None:
        self._backend_past.note_failure(self._progress, outcome, time.monotonic())

    def _translate_error(self, response: ResponseBody, body: bytes) -> RequestError:
        """Return the backend's error in OpenAI's form, and note what it shows of the backend.

        It may show that the engine cannot serve any request ("sick"), that it failed on this one ("failure"), or
        nothing of the engine. An error that was sent under a status of success gets 400 or 500, by who is to blame.
        """
        # 1. Its status. The outcome names the failure in the health of the backend.
        request, engine = self._request, self.backend.engine
        status, outcome = request.status, str(request.status)
        if not _is_error(status):
            status, outcome = _error_status(response), ResponseEnd.FAILED.value

        # 2. What it shows, by the table of errors that are known of this engine.
        lesson = judge_error(find_runtime(engine).errors, status, read_error(body).text).lesson
        if lesson == "sick":
            self._backend_past.note_fatal_failure(self._progress, outcome)
        elif lesson == "failure":
            self._note_failure(outcome)

        # 3. The error for the client. A temporary one says when to try again.
        path, way = self._exchange.head.path, suggest_paths(request.route, (self.backend,))
        error = errors.translate_engine_error(status, body, self._service.config.name, engine, path=path, way=way)
        if error.status in _TEMPORARY_ERRORS and isinstance(response, ErrorResponse):
            error.headers["Retry-After"] = response.retry_after
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status in _TEMPORARY_ERRORS:
            request.error = "engine_error"
        return error

    def _measure_stream(self) -> None:
        """Note that the backend is not silent, and observe the time to the first token, or between two tokens.

        While the client does not read, the backend has to wait, so its pauses are not held against it.
        """
        # 1. The data, for the health of the backend.
        now = self._request.last_sent = time.monotonic()
        total_events = self._response.text_events
        self._backend_past.note_data(self._progress, now)
        self._progress.waits_for_client = self._exchange.is_blocked
        self._was_blocked |= self._exchange.is_blocked

        # 2. The tokens, for the metrics: an event with text is about one. One read of the socket may bring several.
        new_events = total_events - self._text_events
        if not new_events:
            return
        if self._text_events:
            self._service.metrics.inter_token_seconds.observe((now - self._last_token_at) / new_events)
        else:
            self._first_token_at = now
            seconds = self._request.first_token_seconds = now - self._request.arrived
            self._service.metrics.first_token_seconds.observe(seconds)
        self._text_events = total_events
        self._last_token_at = now

    def _break_off(self, reason: str) -> None:
        """Note the failure of the backend, which broke off; try another one, or send the client an error."""
        streaming = self._request.has_answer
        name = self._service.config.name
        log.warning("engine_broke_off", service=name, backend=self.backend.uid, streaming=streaming, error=reason)
        self._note_failure("broken off")
        error = errors.response_broken_off(name) if streaming else errors.upstream_failed(name)
        if not streaming and self._request.try_elsewhere(self.backend, error):
            return
        self._request.error = "engine_broke_off"
        self._request.send_error(error)


async def count_prompt(pool: UpstreamPool, backend: Backend, route: str, body: RequestBody) -> int:
    """Return the tokens of a prompt, more if the engine cannot count them, UNKNOWN if it does not answer."""
    path = find_runtime(backend.engine).prompt_counts.get(route)
    if path is None:
        return len(body.content) + 256  # a template adds some
    text = b"".join(body.render_for_engine(backend.model))
    if route == "completions":  # the prompt has no template
        text = msgspec.json.encode({"content": body.fields.get("prompt"), "add_special": True})
    head = b"POST %b HTTP/1.1\r\n%b" % (path.encode(), _backend_fields(backend.url, backend.api_key))
    try:
        async with asyncio.timeout(_COUNT_SECONDS):
            host, port, trust = pool.find_server(backend.url)
            reader, writer = await asyncio.open_connection(host, port, ssl=trust, limit=1 << 20)
            with closing(writer):
                writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(text), text))
                answer = await reader.readuntil(b"}")  # of an error, with an object in another, this is no JSON
        count = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
        return len(count["tokens"]) if route == "completions" else int(count["input_tokens"])
    except (OSError, EOFError, asyncio.LimitOverrunError, msgspec.DecodeError, LookupError, TypeError, ValueError):
        return UNKNOWN


def _is_error(status: int) -> bool:
    """Return whether no client could use a response of this status: an error, a redirect, or one without a body."""
    return status >= _FIRST_ERROR_STATUS or status == HTTPStatus.NO_CONTENT


def _error_status(response: ResponseBody) -> HTTPStatus:
    """Return the status that an error under status 200 should have had."""
    is_refused = response.end is ResponseEnd.REFUSED
    return HTTPStatus.BAD_REQUEST if is_refused else HTTPStatus.INTERNAL_SERVER_ERROR


class _ResponseFields(NamedTuple):
    """The header fields of a response."""

    forwarded: bytes
    """The lines that the client gets."""
    kind: bytes
    """The media type in lower case, without parameters; empty if the body is compressed."""
    retry_after: str


@functools.lru_cache(maxsize=256)
def _read_fields(headers: Headers) -> _ResponseFields:
    """Return the fields that matter; responses of one form share one `headers`."""
    content_type = headers.value(b"content-type") or b""
    if headers.value(b"content-encoding"):
        content_type = b""  # a compressed body cannot be rewritten, of whatever type it is
    media_type, _, _ = content_type.partition(b";")
    # Fields by which an engine would open the proxy to web pages.
    for_web_pages = {name.lower() for name, _ in headers.fields if name.lower().startswith(b"access-control-")}
    forwarded = headers.encode_forwarded(_NOT_TO_CLIENT | for_web_pages)
    return _ResponseFields(
        forwarded=forwarded,
        kind=media_type.strip().lower(),
        retry_after=_bound_retry_after(headers.get("Retry-After", "1")),
    )


def _bound_retry_after(stated: str) -> str:
    """Return the seconds after which a client tries again: an engine must not keep it away for longer."""
    is_number = stated.isascii() and stated.isdigit() and len(stated) <= len(str(MOST_RETRY_SECONDS))
    return str(min(int(stated), MOST_RETRY_SECONDS)) if is_number else "1"


@functools.lru_cache(maxsize=1024)
def _backend_fields(url: str, api_key: str | None) -> bytes:
    """Return the lines of the header fields that depend on the backend only."""
    lines = b"Host: %b\r\n" % url.partition("://")[2].encode()
    if api_key:
        lines += b"Authorization: Bearer %b\r\n" % api_key.encode()
    return lines
