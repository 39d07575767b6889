"""Connections to upstream servers, kept for the next request for a short time.

A connection that is kept saves half the cost of a short request. But an idle one occupies a thread of llama-server,
which may have only four more threads than slots, and an upstream may close it just when a request is sent. So it is
kept for a time that is shorter than the upstreams' own (llama-server and uvicorn: 5 s).
"""

import asyncio
import functools
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

from gateway.http.upstream_connection import BodyPieces, UpstreamBrokeOffError, UpstreamConnection, UpstreamResponse

CONNECT_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 2.0
_IDLE_CONNECTIONS: Final = 64
"""Kept for one upstream at most."""
_STALE_SECONDS: Final = 1.0
"""An upstream that closed a kept connection without an answer so soon had closed it before the request came."""


class NotAcceptedError(Exception):
    """The upstream accepted no connection; nothing of the request was sent."""


class UpstreamOrigin(NamedTuple):
    """The host and port of an upstream."""

    host: str
    port: int


@functools.lru_cache(maxsize=1024)
def parse_origin(url: str) -> UpstreamOrigin:
    """Return the origin of an http URL."""
    parts = urlsplit(url)
    return UpstreamOrigin(parts.hostname or "", parts.port or 80)


class UpstreamPool:
    """The connections to all upstreams, as a context that closes them."""

    def __init__(self, *, connect_seconds: float = CONNECT_SECONDS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._idle: dict[UpstreamOrigin, list[UpstreamConnection]] = {}
        self._origins: dict[UpstreamConnection, UpstreamOrigin] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def send(
        self, origin: UpstreamOrigin, head: bytes, body: BodyPieces, *, repeatable: bool
    ) -> UpstreamResponse:
        """Send a request, with its body in pieces, and return its response when the head has come.

        A request that is `repeatable` is sent once more, over a new connection, if the upstream closed a kept one
        without an answer.

        Raises NotAcceptedError and UpstreamBrokeOffError.
        """
        if idle := self._idle.get(origin):
            sent = asyncio.get_running_loop().time()
            response = idle.pop().send(head, body)
            try:
                return await _wait_for_head(response)
            except UpstreamBrokeOffError as error:
                seconds = asyncio.get_running_loop().time() - sent
                if error.answered or not repeatable or seconds > _STALE_SECONDS:
                    raise
            try:
                connection = await self._connect(origin)
            except NotAcceptedError as error:
                # The request was sent once: another upstream must not get it as if it had not been.
                raise UpstreamBrokeOffError(str(error), answered=False) from error
        else:
            connection = await self._connect(origin)
        return await _wait_for_head(connection.send(head, body))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep:
            self._sweep.cancel()
        for connection in list(self._origins):
            connection.abort()

    async def _connect(self, origin: UpstreamOrigin) -> UpstreamConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self._keep, self._forget), origin.host, origin.port
                )
        except TimeoutError as error:
            raise NotAcceptedError(f"no connection within {self._connect_seconds:g} s") from error
        except OSError as error:
            raise NotAcceptedError(str(error)) from error
        self._origins[connection] = origin
        return connection

    def _keep(self, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(self._origins[connection], [])
        if len(idle) >= _IDLE_CONNECTIONS:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_seconds / 2, self._close_idle)

    def _forget(self, connection: UpstreamConnection) -> None:
        origin = self._origins.pop(connection, None)
        idle = self._idle.get(origin) if origin else None
        if origin and idle and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[origin]

    def _close_idle(self) -> None:
        """Close what was idle for too long; the oldest are at the front, because the youngest are used first."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._idle_seconds
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= oldest:
                idle.pop(0).abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweep = loop.call_later(self._idle_seconds / 2, self._close_idle)


async def _wait_for_head(response: UpstreamResponse) -> UpstreamResponse:
    """Wait for the head; break the request off if the wait is cancelled."""
    try:
        await response.head()
    except BaseException:
        response.close()
        raise
    return response
