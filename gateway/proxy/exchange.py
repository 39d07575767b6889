"""One request with one backend: sent whole, and its answer passed on in the form that its kind needs."""

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

from gateway.proxy import answers, asked, errors
from gateway.proxy.config import Backend
from gateway.proxy.service import CLIENT_GONE, Service, Visit

_CONNECT_SECONDS = 2.0
_KEPT_SECONDS = 2.0
_LARGE_BYTES = 1 << 20
_LONGEST_ERROR_BYTES = 64 << 10
_LONGEST_WHOLE_BYTES = 64 << 20
"""A larger answer is passed on as it is, under the name that the engine gave."""
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_NOT_TO_CLIENT = _HOP_BY_HOP | {"content-length"}
# The token is ours, not the engine's; packed answers could not be read; the others are between us and the client.
_NOT_TO_ENGINE = _NOT_TO_CLIENT | {"authorization", "x-api-key", "host", "expect", "accept-encoding", "x-request-id"}
_CLIENT_ADDITIONS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_FIRST_ERROR_STATUS = 300  # an engine that sends elsewhere has no answer either
_FOR_NOW = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_REQUEST_ID = "X-Request-Id"

_log = structlog.get_logger()


class ClientGoneError(Exception):
    """The client takes nothing any more."""


class NotAcceptedError(Exception):
    """Nothing of the request was sent; another backend may have it."""


def upstream_session() -> aiohttp.ClientSession:
    """Return the session for all backends: it connects within 2 s or fails, and then waits as long as an engine takes.

    A connection is kept for the next request, for that halves what a short one costs; but only for a moment. An idle
    one occupies a thread of llama-server, which has four more than slots, and one that its server is just closing would
    fail a request that cannot be repeated: llama-server and uvicorn close theirs after 5 s.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_CLIENT_ADDITIONS,
    )


class Exchange:
    """What `visit` asks of `service`, with one backend; the visit hears what came of it."""

    def __init__(self, visit: Visit, service: Service, backend: Backend) -> None:
        self._request = visit.request
        self._body = visit.body if backend.model is None else asked.rewritten(visit.body, backend.model)
        self._service = service
        self._visit = visit
        self._backend = backend
        self._chunks = 0
        self._last_at = 0.0
        self._response: web.StreamResponse | None = None

    async def run(self, session: aiohttp.ClientSession) -> web.StreamResponse:
        """Answer the client. Raises NotAcceptedError."""
        headers = _forwarded(self._request.headers, _NOT_TO_ENGINE)
        headers[_REQUEST_ID] = self._visit.request_id
        if self._backend.api_key:
            headers["Authorization"] = f"Bearer {self._backend.api_key}"
        try:
            async with session.post(
                _url(self._backend.url, self._visit.path),
                headers=headers,
                # A large one is written part by part, as the engine takes it.
                data=self._body if len(self._body) < _LARGE_BYTES else io.BytesIO(self._body),
                allow_redirects=False,
            ) as upstream:
                self._visit.status = upstream.status
                self._body = b""
                self._visit.forget_body()
                if upstream.status >= _FIRST_ERROR_STATUS:
                    return await self._refusal(upstream)
                if "Content-Encoding" in upstream.headers:
                    return await self._unread(upstream, b"")
                if upstream.content_type == "text/event-stream":
                    return await self._events(upstream)
                if upstream.content_type == "application/json":
                    return await self._whole(upstream)
                return await self._unread(upstream, b"")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAcceptedError(str(error)) from error
        except ClientGoneError:
            self._visit.status = CLIENT_GONE
            return self._response or web.Response()
        except (aiohttp.ClientError, ConnectionError) as error:
            return self._broken(error)

    async def _events(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass a stream on, event by event."""
        content = upstream.content
        stream = answers.Stream(self._service.config.model)
        # What is there already goes out with the head, and the end with the last event: each saves a system call.
        chunk = content.read_nowait()
        response = await self._head(upstream, alone=not chunk)
        try:
            while True:
                lines = stream.feed(chunk)
                self._measure(stream)
                if content.at_eof():
                    await _send(response, lines + stream.rest(), last=True)
                    return response
                if lines:
                    await _send(response, lines)
                chunk = await content.readany()
        finally:
            self._visit.tokens = stream.tokens

    def _measure(self, stream: answers.Stream) -> None:
        """Note when tokens came, and how many so far."""
        chunks = stream.chunks
        made, self._chunks = chunks - self._chunks, chunks
        if not made:
            return
        self._visit.tokens = stream.tokens
        now = time.monotonic()
        if made < chunks:
            self._service.metrics.inter_token.observe((now - self._last_at) / made)
        else:
            self._visit.first_token_seconds = now - self._visit.arrived
            self._service.metrics.first_token.observe(self._visit.first_token_seconds)
        self._last_at = now

    async def _whole(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass on an answer that is one object; the blanks by which an engine says that it still works go ahead."""
        body = bytearray()
        async for chunk in upstream.content.iter_any():
            if not body and chunk.isspace():
                await _send(await self._head(upstream), chunk)
                continue
            body += chunk
            if len(body) > _LONGEST_WHOLE_BYTES:
                return await self._unread(upstream, bytes(body))
        read = answers.whole(bytes(body), self._service.config.model)
        self._visit.tokens = read.tokens
        if read.failed:
            self._visit.error = "engine_error"
        if self._response is not None:
            await _send(self._response, read.body, last=True)
            return self._response
        if read.failed:
            self._visit.status, said = errors.of_engine(
                HTTPStatus.INTERNAL_SERVER_ERROR, read.body, self._service.config.name
            )
            return _error(self._visit.status, said)
        headers = _forwarded(upstream.headers, _NOT_TO_CLIENT)
        return web.Response(status=upstream.status, body=read.body, headers=headers)

    async def _unread(self, upstream: aiohttp.ClientResponse, begin: bytes) -> web.StreamResponse:
        response = await self._head(upstream)
        if begin:
            await _send(response, begin)
        async for chunk in upstream.content.iter_any():
            await _send(response, chunk)
        await _send(response, b"", last=True)
        return response

    async def _refusal(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass on why the engine refused, in OpenAI's form."""
        said = await upstream.content.read(_LONGEST_ERROR_BYTES)
        status, body = errors.of_engine(upstream.status, said, self._service.config.name)
        self._visit.status = status
        response = _error(status, body)
        if status in _FOR_NOW:
            response.headers["Retry-After"] = upstream.headers.get("Retry-After", "1")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _FOR_NOW:
            self._visit.error = "engine_error"
        return response

    async def _head(self, upstream: aiohttp.ClientResponse, *, alone: bool = True) -> web.StreamResponse:
        """Begin to answer, in chunks, for the length may change; where not `alone`, together with what is sent next."""
        if self._response is None:
            headers = _forwarded(upstream.headers, _NOT_TO_CLIENT)
            headers[_REQUEST_ID] = self._visit.request_id
            self._response = (web.StreamResponse if alone else _Following)(status=upstream.status, headers=headers)
            await self._response.prepare(self._request)
        return self._response

    def _broken(self, error: Exception) -> web.StreamResponse:
        answering = self._response is not None and self._response.prepared
        _log.warning(
            "exchange broken",
            service=self._service.config.name,
            backend=self._backend.uid,
            answering=answering,
            # What cannot be read is quoted in the error, and may be part of an answer.
            error=str(error) if isinstance(error, OSError) else type(error).__name__,
        )
        self._visit.error = "engine_broke_off"
        if self._response is None:
            self._visit.status = HTTPStatus.BAD_GATEWAY
            return errors.bad_gateway(self._service.config.name)
        _cut(self._request)
        return self._response


@functools.lru_cache(maxsize=256)
def _url(base: str, path: str) -> URL:
    return URL(base + path, encoded=True)


class _Following(web.StreamResponse):
    """An answer whose head waits for the data at hand; should aiohttp forget this word, it would just go ahead."""

    _send_headers_immediately = False


async def _send(response: web.StreamResponse, data: bytes, *, last: bool = False) -> None:
    """Write to the client. Raises ClientGoneError."""
    try:
        await (response.write_eof(data) if last else response.write(data))
    except ConnectionError as error:
        raise ClientGoneError from error


def _error(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _cut(request: web.BaseRequest) -> None:
    """Close the client's connection so that it sees the answer as broken off, not as ended."""
    transport = request.transport
    if transport is None:
        return
    if request.version < aiohttp.HttpVersion11:
        # A chunked body shows by itself that it ended early; to an HTTP/1.0 client only a reset says so.
        reset_on_close = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
    transport.close()


def _forwarded(headers: CIMultiDictProxy[str], withheld: frozenset[str]) -> CIMultiDict[str]:
    """Copy `headers` without those that belong to one connection, by the standard or by the sender's word."""
    dropped = withheld
    if "Connection" in headers:
        dropped |= {name.strip().lower() for value in headers.getall("Connection") for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
