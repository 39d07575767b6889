"""One request to one backend: send it whole, and relay the response to the client as its content type requires."""

import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

import structlog

from gateway.http.exchange import Exchange
from gateway.http.headers import HOP_BY_HOP, Field, encode_fields
from gateway.http.upstream_connection import UpstreamBrokeOffError, UpstreamResponse
from gateway.http.upstream_pool import UpstreamPool, parse_origin
from gateway.proxy import errors, response_body
from gateway.proxy.backend_health import is_failure
from gateway.proxy.config import Backend
from gateway.proxy.errors import RequestError
from gateway.proxy.health_monitor import AnswerObserver
from gateway.proxy.service import InferenceRequest, Service

REQUEST_ID: Final = "X-Request-Id"
_LARGEST_ERROR_BYTES: Final = 64 << 10
_REQUEST_ID_FIELD: Final = REQUEST_ID.encode()
_FOR_WEB_PAGES: Final = frozenset(
    b"access-control-" + name
    for name in (
        *(b"allow-origin", b"allow-credentials", b"allow-headers", b"allow-methods", b"allow-private-network"),
        *(b"expose-headers", b"max-age"),
    )
)
"""Fields by which an engine would open the proxy to web pages."""
_NOT_TO_CLIENT: Final = (
    HOP_BY_HOP | _FOR_WEB_PAGES | {b"content-length", b"date", b"server", b"set-cookie", b"x-request-id"}
)
# The token is the proxy's, not the engine's; a compressed response could not be rewritten; the others belong to the
# connection with the client.
_NOT_TO_ENGINE: Final = HOP_BY_HOP | {
    *(b"content-length", b"authorization", b"x-api-key", b"host", b"expect", b"accept-encoding", b"x-request-id"),
}
_FIRST_ERROR_STATUS: Final = 300  # a redirect is no response that a client could use
_TEMPORARY_ERRORS: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

_log = structlog.get_logger()


class UpstreamRequest:
    """A client's request on its way to one backend of `service`; the outcome is noted in `inference` and `observer`."""

    def __init__(
        self,
        exchange: Exchange,
        inference: InferenceRequest,
        service: Service,
        backend: Backend,
        observer: AnswerObserver,
    ) -> None:
        self._exchange = exchange
        self._service = service
        self._inference = inference
        self._backend = backend
        self._observer = observer
        self._text_events = 0
        self._last_token_at = 0.0

    async def send(self, pool: UpstreamPool) -> None:
        """Send the request and relay the response to the client. Raises NotAcceptedError and RequestError."""
        try:
            upstream = await self._send_request(pool)
            try:
                await self._answer(upstream)
            finally:
                upstream.close()
        except UpstreamBrokeOffError as error:
            self._break_off(error)

    async def _send_request(self, pool: UpstreamPool) -> UpstreamResponse:
        backend = self._backend
        body = self._inference.body.replace_model(backend.model)
        fields = self._exchange.head.headers.forward(_NOT_TO_ENGINE)
        fields.append((b"Host", backend.url.removeprefix("http://").encode()))
        fields.append((b"Content-Length", b"%d" % sum(map(len, body))))
        fields.append((_REQUEST_ID_FIELD, self._inference.request_id.encode()))
        if backend.api_key:
            fields.append((b"Authorization", f"Bearer {backend.api_key}".encode()))
        head = encode_fields(f"POST {self._inference.path} HTTP/1.1\r\n".encode(), fields)
        # Generated text is the only effect of a request, so it may be sent again over another connection.
        return await pool.send(parse_origin(backend.url), head, body, repeatable=True)

    async def _answer(self, upstream: UpstreamResponse) -> None:
        """Relay the response. Raises RequestError and UpstreamBrokeOffError."""
        self._inference.status = upstream.status
        self._inference.free_body()
        if is_failure(upstream.status):
            self._observer.fail(str(upstream.status))
        if upstream.status >= _FIRST_ERROR_STATUS:
            raise await self._translate_error(upstream)
        self._observer.note_begin()
        kind = (upstream.headers.value(b"content-type") or b"").partition(b";")[0].strip().lower()
        if upstream.headers.value(b"content-encoding"):
            await self._relay_unchanged(upstream)
        elif kind == b"text/event-stream":
            await self._relay_stream(upstream)
        elif kind == b"application/json":
            await self._relay_json(upstream)
        else:
            await self._relay_unchanged(upstream)
        self._observer.succeed()

    async def _relay_stream(self, upstream: UpstreamResponse) -> None:
        """Pass a stream of events on, line by line, as they come."""
        exchange, observer = self._exchange, self._observer
        stream = response_body.TokenStream(self._service.config.model)
        self._start_response(upstream)
        chunk = upstream.read_nowait()
        try:
            while chunk or not upstream.complete:
                if chunk:
                    now = time.monotonic()
                    observer.note_data(now)
                    exchange.write(stream.feed(chunk))
                    self._observe_tokens(stream, now)
                    if exchange.is_blocked:
                        observer.wait_for_client()
                        await exchange.drain()
                        observer.note_data(time.monotonic())
                chunk = await upstream.read()
            exchange.write(stream.finish())
            exchange.finish()
        finally:
            self._inference.tokens = stream.tokens

    def _observe_tokens(self, stream: response_body.TokenStream, now: float) -> None:
        """Count the tokens that came, and measure the time that they took."""
        total = stream.text_events
        new, self._text_events = total - self._text_events, total
        if not new:
            return
        self._inference.tokens = stream.tokens
        if new < total:
            self._service.metrics.inter_token_seconds.observe((now - self._last_token_at) / new)
        else:
            self._inference.first_token_seconds = now - self._inference.arrived
            self._service.metrics.first_token_seconds.observe(self._inference.first_token_seconds)
        self._last_token_at = now

    async def _relay_json(self, upstream: UpstreamResponse) -> None:
        """Pass on a response that is one JSON object; blanks that an engine sends while it works go ahead of it."""
        body = b""
        pieces = bytearray()
        while piece := await upstream.read():
            if not pieces and piece.isspace():
                self._start_response(upstream)
                self._exchange.write(piece)
                await self._exchange.drain()
            elif upstream.complete and not pieces:
                body = piece
            else:
                pieces += piece
                if len(pieces) > response_body.SHORT_JSON_BYTES:
                    await self._relay_long_json(upstream, bytes(pieces))
                    return
        rewritten = response_body.rewrite_json(body or bytes(pieces), self._service.config.model)
        self._inference.tokens = rewritten.tokens
        if rewritten.failed:
            self._inference.error = "engine_error"
            self._observer.fail("an error under status 200")
        if self._exchange.started:
            self._exchange.write(rewritten.body)
            self._exchange.finish()
        elif rewritten.failed:
            raise errors.translate_engine_error(
                HTTPStatus.INTERNAL_SERVER_ERROR, rewritten.body, self._service.config.name
            )
        else:
            self._exchange.respond(upstream.status, self._fields(upstream), rewritten.body)

    async def _relay_long_json(self, upstream: UpstreamResponse, piece: bytes) -> None:
        """Pass on `piece` and the rest of a response that is one JSON object as they come."""
        response = response_body.LongJsonResponse(self._service.config.model)
        self._inference.tokens = response.tokens
        self._start_response(upstream)
        while piece:
            self._exchange.write(response.feed(piece))
            await self._exchange.drain()
            piece = await upstream.read()
        self._exchange.write(response.finish())
        self._exchange.finish()

    async def _relay_unchanged(self, upstream: UpstreamResponse) -> None:
        """Pass on a response that cannot be rewritten."""
        self._start_response(upstream)
        while piece := await upstream.read():
            self._exchange.write(piece)
            await self._exchange.drain()
        self._exchange.finish()

    async def _translate_error(self, upstream: UpstreamResponse) -> RequestError:
        """Return the engine's error in OpenAI's form."""
        body = b""
        while len(body) < _LARGEST_ERROR_BYTES and (piece := await upstream.read()):
            body += piece
        error = errors.translate_engine_error(upstream.status, body[:_LARGEST_ERROR_BYTES], self._service.config.name)
        if error.status in _TEMPORARY_ERRORS:
            error.headers["Retry-After"] = upstream.headers.get("Retry-After", "1")
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status in _TEMPORARY_ERRORS:
            self._inference.error = "engine_error"
        return error

    def _start_response(self, upstream: UpstreamResponse) -> None:
        """Send the head, without a length, because the length may change."""
        if not self._exchange.started:
            self._exchange.start(upstream.status, self._fields(upstream))

    def _fields(self, upstream: UpstreamResponse) -> Iterable[Field]:
        fields = upstream.headers.forward(_NOT_TO_CLIENT)
        fields.append((_REQUEST_ID_FIELD, self._inference.request_id.encode()))
        return fields

    def _break_off(self, error: UpstreamBrokeOffError) -> None:
        """Break off the client's response, as the engine broke off. Raises RequestError if no response has begun."""
        streaming = self._exchange.started
        _log.warning(
            "engine_broke_off",
            service=self._service.config.name,
            backend=self._backend.uid,
            streaming=streaming,
            error=str(error),
        )
        self._inference.error = "engine_broke_off"
        self._observer.fail("broken off")
        if not streaming:
            raise errors.upstream_failed(self._service.config.name) from error
        self._exchange.break_off()
