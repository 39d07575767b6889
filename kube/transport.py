"""HTTP to the API server; tests inject faults here and nowhere else.

This module handles HTTP, time-outs and credentials, not Kubernetes objects. Every failure to get an answer is
Unreachable; every answer, whatever its status, is returned.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from kube.credentials import Credentials
from kube.errors import Unreachable
from kube.kubeconfig import CredentialsError

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

CONNECT_SECONDS = 2.0
TOTAL_SECONDS = 30.0
CONNECTIONS = 32
"""Requests at once, and handshakes for streams; more wait. Handshakes of a burst must fit into CONNECT_SECONDS.

Streams have connections of their own: a controller of many namespaces has more watches than this. A stream that waits
for its answer holds up no other: that of a silent container's log comes with its next line.
"""

_CLOSED = "all connections were closed to open new ones"


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to the API server; `path` starts with a slash."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = field(default=None, repr=False)
    content_type: str = "application/json"
    accept: str = "application/json"
    once: bool = False
    """Never send it a second time by ourselves: who gets the first answer matters."""


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    status: int
    body: bytes = field(repr=False)
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer whose body is read as it comes."""

    status: int
    chunks: AsyncIterator[bytes]
    retry_after_seconds: float | None = None


class Transport(Protocol):
    """The connection of the client to the server."""

    async def request(self, request: Request) -> Response:
        """Send and read the whole answer. Raises Unreachable."""

    def stream(self, request: Request, *, idle_seconds: float) -> AbstractAsyncContextManager[Stream]:
        """Send and read the body as it comes. Raises Unreachable, also after `idle_seconds` without a byte."""

    async def reconnect(self) -> None:
        """Break off all connections, and use new ones from now on: requests on the old ones raise Unreachable."""

    async def close(self) -> None:
        """Close all connections."""


class AiohttpTransport:
    """Transport over two aiohttp sessions; create it inside a running event loop and close it.

    A 401 refreshes the credentials once (a token is rotated on disk, an exec plugin's expires) and sends again.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        # One session for requests, whose number is limited, and one for streams, which last and have no limit (0).
        self._requests, self._streams = self._open_session(CONNECTIONS), self._open_session(0)
        self._answers: set[aiohttp.ClientResponse] = set()
        """Answers that are being read."""

    async def request(self, request: Request) -> Response:
        """Send and read the whole answer. Raises Unreachable."""
        limits = aiohttp.ClientTimeout(total=TOTAL_SECONDS, sock_connect=CONNECT_SECONDS)
        async with self._open_answer(request, limits) as answer, _unreachable(request):
            return Response(answer.status, await answer.read(), _read_retry_after(answer))

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        """Send and read the body as it comes. Raises Unreachable, also after `idle_seconds` without a byte."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=idle_seconds)
        async with self._open_answer(request, limits, is_stream=True) as answer:
            yield Stream(answer.status, _read_chunks(answer, request), _read_retry_after(answer))

    async def reconnect(self) -> None:
        """Break off all connections, and use new ones from now on: requests on the old ones raise Unreachable."""
        old = self._requests, self._streams
        self._requests, self._streams = self._open_session(CONNECTIONS), self._open_session(0)
        # Closing a session raises no error in the readers of its answers, and ends the time-outs of these answers.
        for answer in self._answers:
            answer.content.set_exception(aiohttp.ClientConnectionError(_CLOSED))  # its reader raises this now
        for session in old:
            await session.close()

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._requests, self._streams):
            await session.close()

    def _open_session(self, connections: int) -> aiohttp.ClientSession:
        """Return a session of at most so many connections; 0: no limit."""
        return aiohttp.ClientSession(connector=_Connector(ssl=self._credentials.tls or True, limit=connections))

    @contextlib.asynccontextmanager
    async def _open_answer(
        self, request: Request, limits: aiohttp.ClientTimeout, *, is_stream: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, again with new credentials after a 401, and yield the open answer. Raises Unreachable."""
        answer = await self._send(request, limits, is_stream=is_stream)
        if answer.status == 401 and await self._refresh_credentials(request, answer):  # noqa: PLR2004 - Unauthorized
            answer = await self._send(request, limits, is_stream=is_stream)
        async with answer:
            self._answers.add(answer)
            try:
                yield answer
            finally:
                self._answers.discard(answer)
                _abort_unless_read(answer)

    async def _refresh_credentials(self, request: Request, answer: aiohttp.ClientResponse) -> bool:
        """Get new credentials after a 401; return whether to send the request again.

        If so, or if that fails, the answer is closed. Raises Unreachable.
        """
        refused = answer.request_info.headers.get("Authorization")
        try:
            async with _unreachable(request):
                has_new = await self._credentials.refresh(refused)
        except BaseException:
            answer.close()
            raise
        if has_new:
            answer.close()
        return has_new

    async def _send(
        self, request: Request, limits: aiohttp.ClientTimeout, *, is_stream: bool
    ) -> aiohttp.ClientResponse:
        """Send a request with the current credentials, and return the open answer. Raises Unreachable.

        aiohttp sends some requests again when a kept connection breaks; a body that can be read only once prevents
        that for a request that must not be repeated (`once`).
        """
        credentials = self._credentials
        headers = {"Accept": request.accept, "User-Agent": "pomona"}
        if request.body is not None:
            headers["Content-Type"] = request.content_type

        async with _unreachable(request):  # which turns errors of the connection into Unreachable
            if authorization := await credentials.authorization():
                headers["Authorization"] = authorization
            session = self._streams if is_stream else self._requests
            try:
                return await session.request(
                    request.method,
                    credentials.server + request.path,
                    params=request.query,
                    data=_stream_once(request.body) if request.once and request.body else request.body,
                    headers=headers,
                    timeout=limits,
                    allow_redirects=False,
                    server_hostname=credentials.tls_server_name,
                    proxy=credentials.proxy,
                )
            except asyncio.CancelledError as error:
                # `reconnect` closes the session, which cancels the requests that wait for a connection. To the caller
                # that is a lost connection; only a cancellation of this task itself is passed on.
                task = asyncio.current_task()
                if session.closed and task is not None and not task.cancelling():
                    raise aiohttp.ClientConnectionError(_CLOSED) from error
                raise


class _Connector(aiohttp.TCPConnector):
    """A connector that makes at most CONNECTIONS handshakes at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = asyncio.Semaphore(CONNECTIONS)

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list["Trace"],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the method of aiohttp has it
    ) -> "ResponseHandler":
        """Make a connection; wait before it while CONNECTIONS handshakes run, so that those of a burst are in time."""
        async with self._handshakes:  # a semaphore
            try:
                return await super()._create_connection(req, traces, timeout)
            except RuntimeError as error:
                # uvloop raises it when it takes the descriptor of a new connection for that of one that was given up.
                raise aiohttp.ClientConnectionError(str(error)) from error


async def _stream_once(body: bytes) -> AsyncIterator[bytes]:
    """Yield `body` as a stream: aiohttp sends a DELETE again after a cut, unless its body can be read once only."""
    yield body


def _abort_unless_read(answer: aiohttp.ClientResponse) -> None:
    """Break off the connection of an answer that is left before its end, such as a watch.

    An orderly end of TLS would take a round trip, and a command ends without waiting for that.
    """
    connection = answer.connection
    if connection is not None and connection.transport is not None and not answer.content.is_eof():
        connection.transport.abort()


async def _read_chunks(answer: aiohttp.ClientResponse, request: Request) -> AsyncIterator[bytes]:
    async with _unreachable(request):
        async for chunk in answer.content.iter_any():
            yield chunk


@contextlib.asynccontextmanager
async def _unreachable(request: Request) -> AsyncIterator[None]:
    """Turn every failure to get an answer into Unreachable."""
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, OSError, CredentialsError) as error:
        raise Unreachable(f"{request.method} {request.path}: {describe_failure(error)}") from error


def describe_failure(error: Exception) -> str:
    """Return why no answer came, in words for a log, without the query of the request."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):  # it would repeat the whole URL with its query
        return f"no connection within {CONNECT_SECONDS:g} s"
    # The class itself only: errors of names and certificates are sub-classes, and state their reasons themselves.
    if type(error) is aiohttp.ClientConnectorError and error.errno:
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def _read_retry_after(answer: aiohttp.ClientResponse) -> float | None:
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
