"""One request to one backend: send it whole, and relay the response to the client as its content type requires."""

import functools
import io
import socket
import struct
import time
from http import HTTPStatus

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.proxy import errors, request_body, response_body
from gateway.proxy.backend_health import is_failure
from gateway.proxy.config import Backend
from gateway.proxy.errors import RequestError
from gateway.proxy.health_monitor import AnswerObserver
from gateway.proxy.service import CLIENT_GONE, InferenceRequest, Service

_CONNECT_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 2.0
_LARGE_REQUEST_BYTES = 1 << 20
_LARGEST_ERROR_BYTES = 64 << 10
_LARGEST_JSON_BYTES = 64 << 20
"""A larger response is passed on unchanged, with the engine's name for the model."""
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_NOT_TO_CLIENT = _HOP_BY_HOP | {"content-length"}
# The token is the proxy's, not the engine's; a compressed response could not be rewritten; the others belong to the
# connection with the client.
_NOT_TO_ENGINE = _NOT_TO_CLIENT | {"authorization", "x-api-key", "host", "expect", "accept-encoding", "x-request-id"}
_CLIENT_ADDITIONS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_FIRST_ERROR_STATUS = 300  # a redirect is no response that a client could use
_TEMPORARY_ERRORS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
REQUEST_ID = "X-Request-Id"

_log = structlog.get_logger()


class ClientGoneError(Exception):
    """The client has closed its connection."""


class NotAcceptedError(Exception):
    """The backend accepted no connection; nothing of the request was sent, so another backend may get it."""


def open_session() -> aiohttp.ClientSession:
    """Return the HTTP client for all backends: it connects within 2 s or fails, and waits as long as an engine takes.

    A connection is kept for the next request, which halves the cost of a short request, but only for 2 s. An idle
    connection occupies a thread of llama-server, which may have only four more threads than slots; and a request on a
    connection that its server is just closing would fail and cannot be repeated: llama-server and uvicorn close idle
    connections after 5 s.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_CLIENT_ADDITIONS,
    )


class UpstreamRequest:
    """A client's request on its way to one backend of `service`; the outcome is noted in `inference`."""

    def __init__(
        self,
        request: web.BaseRequest,
        inference: InferenceRequest,
        service: Service,
        backend: Backend,
        observer: AnswerObserver,
    ) -> None:
        self._request = request
        body = inference.body
        self._body = body if backend.model is None else request_body.replace_model(body, backend.model)
        self._service = service
        self._inference = inference
        self._backend = backend
        self._observer = observer
        self._text_events = 0
        self._last_token_at = 0.0
        self._response: web.StreamResponse | None = None

    async def send(self, session: aiohttp.ClientSession) -> web.StreamResponse:
        """Send the request and stream the response to the client. Raises NotAcceptedError and RequestError."""
        headers = _forward_headers(self._request.headers, _NOT_TO_ENGINE)
        headers[REQUEST_ID] = self._inference.request_id
        if self._backend.api_key:
            headers["Authorization"] = f"Bearer {self._backend.api_key}"
        try:
            async with session.post(
                _url(self._backend.url, self._inference.path),
                headers=headers,
                # A large body is written piece by piece, as the engine reads it.
                data=self._body if len(self._body) < _LARGE_REQUEST_BYTES else io.BytesIO(self._body),
                allow_redirects=False,
            ) as upstream:
                self._inference.status = upstream.status
                self._body = b""
                self._inference.free_body()
                if is_failure(upstream.status):
                    self._observer.fail(str(upstream.status))
                if upstream.status >= _FIRST_ERROR_STATUS:
                    raise await self._translate_error(upstream)
                self._observer.note_begin()
                response = await self._relay(upstream)
                self._observer.succeed()
                return response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAcceptedError(str(error)) from error
        except ClientGoneError:
            self._inference.status = CLIENT_GONE
            return self._response or web.Response()
        except (aiohttp.ClientError, ConnectionError) as error:
            return self._break_off(error)

    async def _relay(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass the response on as its content type requires."""
        if "Content-Encoding" in upstream.headers:
            return await self._relay_unchanged(upstream, b"")
        if upstream.content_type == "text/event-stream":
            return await self._relay_stream(upstream)
        if upstream.content_type == "application/json":
            return await self._relay_json(upstream)
        return await self._relay_unchanged(upstream, b"")

    async def _relay_stream(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass a stream of events on, line by line, as they come."""
        content = upstream.content
        stream = response_body.TokenStream(self._service.config.model)
        # The first data goes out with the head, and the end with the last event: each saves a system call.
        chunk = content.read_nowait()
        response = await self._start_response(upstream, alone=not chunk)
        try:
            while True:
                lines = stream.feed(chunk)
                self._observe_tokens(stream)
                if content.at_eof():
                    await _send(response, lines + stream.finish(), last=True)
                    return response
                if lines:
                    self._observer.wait_for_client()
                    await _send(response, lines)
                    self._observer.note_data(time.monotonic())
                chunk = await content.readany()
                self._observer.note_data(time.monotonic())
        finally:
            self._inference.tokens = stream.tokens

    def _observe_tokens(self, stream: response_body.TokenStream) -> None:
        """Count the tokens that came, and measure the time that they took."""
        total = stream.text_events
        new, self._text_events = total - self._text_events, total
        if not new:
            return
        self._inference.tokens = stream.tokens
        now = time.monotonic()
        if new < total:
            self._service.metrics.inter_token_seconds.observe((now - self._last_token_at) / new)
        else:
            self._inference.first_token_seconds = now - self._inference.arrived
            self._service.metrics.first_token_seconds.observe(self._inference.first_token_seconds)
        self._last_token_at = now

    async def _relay_json(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass on a response that is one JSON object; blanks that an engine sends while it works go ahead of it."""
        body = bytearray()
        async for chunk in upstream.content.iter_any():
            if not body and chunk.isspace():
                await _send(await self._start_response(upstream), chunk)
                continue
            body += chunk
            if len(body) > _LARGEST_JSON_BYTES:
                return await self._relay_unchanged(upstream, bytes(body))
        rewritten = response_body.rewrite_json(bytes(body), self._service.config.model)
        self._inference.tokens = rewritten.tokens
        if rewritten.failed:
            self._inference.error = "engine_error"
            self._observer.fail("an error under status 200")
        if self._response is not None:
            await _send(self._response, rewritten.body, last=True)
            return self._response
        if rewritten.failed:
            raise errors.translate_engine_error(
                HTTPStatus.INTERNAL_SERVER_ERROR, rewritten.body, self._service.config.name
            )
        headers = _forward_headers(upstream.headers, _NOT_TO_CLIENT)
        return web.Response(status=upstream.status, body=rewritten.body, headers=headers)

    async def _relay_unchanged(self, upstream: aiohttp.ClientResponse, begin: bytes) -> web.StreamResponse:
        """Pass on `begin` and the rest of a response that cannot be rewritten."""
        response = await self._start_response(upstream)
        if begin:
            await _send(response, begin)
        async for chunk in upstream.content.iter_any():
            await _send(response, chunk)
        await _send(response, b"", last=True)
        return response

    async def _translate_error(self, upstream: aiohttp.ClientResponse) -> RequestError:
        """Return the engine's error in OpenAI's form."""
        body = await upstream.content.read(_LARGEST_ERROR_BYTES)
        error = errors.translate_engine_error(upstream.status, body, self._service.config.name)
        if error.status in _TEMPORARY_ERRORS:
            error.headers["Retry-After"] = upstream.headers.get("Retry-After", "1")
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status in _TEMPORARY_ERRORS:
            self._inference.error = "engine_error"
        return error

    async def _start_response(self, upstream: aiohttp.ClientResponse, *, alone: bool = True) -> web.StreamResponse:
        """Send the head, chunked because the length may change; if not `alone`, together with the data sent next."""
        if self._response is None:
            headers = _forward_headers(upstream.headers, _NOT_TO_CLIENT)
            headers[REQUEST_ID] = self._inference.request_id
            self._response = (web.StreamResponse if alone else _DelayedHeadResponse)(
                status=upstream.status, headers=headers
            )
            await self._response.prepare(self._request)
        return self._response

    def _break_off(self, error: Exception) -> web.StreamResponse:
        """Break off the client's response, as the engine broke off. Raises RequestError if no response has begun."""
        streaming = self._response is not None and self._response.prepared
        _log.warning(
            "engine_broke_off",
            service=self._service.config.name,
            backend=self._backend.uid,
            streaming=streaming,
            # A parser's error quotes the data that it could not parse, which may be part of a response.
            error=str(error) if isinstance(error, OSError) else type(error).__name__,
        )
        self._inference.error = "engine_broke_off"
        self._observer.fail("broken off")
        if self._response is None:
            raise errors.upstream_failed(self._service.config.name) from error
        _abort_connection(self._request)
        return self._response


@functools.lru_cache(maxsize=256)
def _url(base: str, path: str) -> URL:
    return URL(base + path, encoded=True)


class _DelayedHeadResponse(web.StreamResponse):
    """A response whose head is sent with its first data; an aiohttp without this attribute sends the head first."""

    _send_headers_immediately = False


async def _send(response: web.StreamResponse, data: bytes, *, last: bool = False) -> None:
    """Write `data` to the client. Raises ClientGoneError."""
    try:
        await (response.write_eof(data) if last else response.write(data))
    except ConnectionError as error:
        raise ClientGoneError from error


def _abort_connection(request: web.BaseRequest) -> None:
    """Close the client's connection so that the client sees the response as broken off, not as complete."""
    transport = request.transport
    if transport is None:
        return
    if request.version < aiohttp.HttpVersion11:
        # A chunked response shows by itself that it ended early; an HTTP/1.0 client sees that only from a reset.
        reset_on_close = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
    transport.close()


def _forward_headers(headers: CIMultiDictProxy[str], withheld: frozenset[str]) -> CIMultiDict[str]:
    """Return `headers` without `withheld` and without those that the sender's Connection header names."""
    dropped = withheld
    if "Connection" in headers:
        dropped |= {name.strip().lower() for value in headers.getall("Connection") for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
