"""One request through the proxy: checked, sent to a backend, its answer passed on as it comes.

Nothing is buffered either way, so a token reaches the client when the engine made it, and a slow client slows the
engine's socket instead of filling our memory. Who leaves early ends the other side: a client that hangs up cancels the
work, and a backend that breaks off breaks the client's connection, so that half an answer never looks like a whole one.
"""

import hmac
import socket
import struct
from collections.abc import AsyncIterator, Callable
from http import HTTPMethod

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.proxy import errors
from gateway.proxy.balance import InFlight, choose
from gateway.proxy.config import Backend, ServiceListener

BODY_LIMIT_BYTES = 64 << 20

_CONNECT_SECONDS = 2.0
_HOP_BY_HOP = (
    *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection"),
    *("TE", "Trailer", "Transfer-Encoding", "Upgrade"),
)
# The token is ours, not the engine's; the other two are between us and the client.
_NOT_FORWARDED = ("Authorization", "Host", "Expect")
_CLIENT_ADDITIONS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")

_log = structlog.get_logger()


class _NotAcceptedError(Exception):
    """Nothing of the request was sent; another backend may have it."""


def upstream_session() -> aiohttp.ClientSession:
    """Return the session for all backends: it connects within 2 s or fails, and then waits as long as an engine takes.

    Connections are not kept: an idle one would occupy a thread of llama-server's HTTP server, and one that the server
    is just closing would fail a request that cannot be repeated.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_CLIENT_ADDITIONS,
    )


async def answer(
    request: web.BaseRequest,
    current: Callable[[], ServiceListener],
    in_flight: InFlight,
    session: aiohttp.ClientSession,
) -> web.StreamResponse:
    """Answer one client request for the service that `current` gives; each backend is chosen as it is then."""
    service = current()
    if request.method == HTTPMethod.GET and request.path == "/health":
        ready = choose(service.backends, in_flight.counts(), ()) is not None
        return web.json_response({"status": "ok"}) if ready else errors.unavailable(service.name)
    if not _has_token(request, service.token):
        return errors.unauthorized(service.name)
    if not request.raw_path.startswith("/"):
        # An absolute or authority form would choose the host that we connect to.
        return errors.bad_request("the request target must be a path")
    if (request.content_length or 0) > BODY_LIMIT_BYTES:
        return errors.too_large(BODY_LIMIT_BYTES)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # an interim answer is not yet the answer
    tried: set[str] = set()
    while (backend := choose(current().backends, in_flight.counts(), tried)) is not None:
        tried.add(backend.uid)
        try:
            with in_flight.request(backend.uid):
                return await _Exchange(request, service.name, backend).run(session)
        except _NotAcceptedError as error:
            _log.warning("backend does not accept", service=service.name, backend=backend.uid, error=str(error))
    return errors.unavailable(service.name)


def _has_token(request: web.BaseRequest, token: str) -> bool:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(credentials.strip().encode(errors="surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


class _Exchange:
    """One request with one backend."""

    def __init__(self, request: web.BaseRequest, service: str, backend: Backend) -> None:
        self._request = request
        self._backend = backend
        self._service = service
        self._too_large = False

    async def run(self, session: aiohttp.ClientSession) -> web.StreamResponse:
        request = self._request
        response: web.StreamResponse | None = None
        try:
            async with session.request(
                request.method,
                URL(self._backend.url + request.raw_path, encoded=True),
                headers=_forwarded(request.headers, _NOT_FORWARDED),
                data=self._body() if request.body_exists else None,
                allow_redirects=False,
            ) as upstream:
                response = web.StreamResponse(
                    status=upstream.status, reason=upstream.reason, headers=_forwarded(upstream.headers)
                )
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotAcceptedError(str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            return self._broken(response, error)

    async def _body(self) -> AsyncIterator[bytes]:
        """Yield the client's body as it arrives, up to the limit, which a chunked one does not announce."""
        size_bytes = 0
        async for chunk in self._request.content.iter_any():
            size_bytes += len(chunk)
            if size_bytes > BODY_LIMIT_BYTES:
                self._too_large = True
                raise ValueError(f"request body over {BODY_LIMIT_BYTES} bytes")
            yield chunk

    def _broken(self, response: web.StreamResponse | None, error: Exception) -> web.StreamResponse:
        if self._too_large and response is None:
            return errors.too_large(BODY_LIMIT_BYTES)
        _log.warning(
            "exchange broken",
            service=self._service,
            backend=self._backend.uid,
            answering=response is not None,
            error=str(error) or type(error).__name__,
        )
        if response is None:
            return errors.bad_gateway(self._service)
        _cut(self._request)
        return response


def _cut(request: web.BaseRequest) -> None:
    """Close the client's connection so that it sees the answer as broken off, not as ended."""
    transport = request.transport
    if transport is None:
        return
    if request.version < aiohttp.HttpVersion11:
        # A chunked or counted body shows by itself that it ended early; to an HTTP/1.0 client only a reset says so.
        reset_on_close = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
    transport.close()


def _forwarded(headers: CIMultiDictProxy[str], withheld: tuple[str, ...] = ()) -> CIMultiDict[str]:
    """Copy `headers` without those that belong to one connection, by the standard or by the sender's word."""
    named = [name.strip() for value in headers.getall("Connection", []) for name in value.split(",")]
    dropped = {name.lower() for name in (*_HOP_BY_HOP, *withheld, *named)}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
