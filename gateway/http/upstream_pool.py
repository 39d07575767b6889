"""Connections to upstream servers, plain or with TLS, kept for the next request for a short time.

A connection that is kept saves half the cost of a short request. But an idle one occupies a thread of llama-server,
which may have only four more threads than slots, and an upstream may close it just when a request is sent. So it is
kept for a time that is shorter than the upstreams' own (llama-server and uvicorn: 5 s).
"""

import asyncio
import ssl
import time
from typing import Final, Self
from urllib.parse import urlsplit

from gateway.http.joined_writes import JoinedWrites
from gateway.http.upstream_connection import UpstreamConnection

CONNECT_SECONDS: Final = 1.5
IDLE_SECONDS: Final = 2.0
_IDLE_CONNECTIONS: Final = 64
"""Kept for one upstream at most."""
_HTTPS_PORT: Final = 443
_HTTP_PORT: Final = 80


class NotAcceptedError(Exception):
    """The upstream accepted no connection, or its certificate is not trusted; nothing of the request was sent."""


class UpstreamPool:
    """The connections to all upstreams, by their URLs without a path, as a context that closes them.

    Args:
        trust: verifies the certificates of upstreams with https, which have to name the host of the URL, such as its IP
            address; None: the system's certificate authorities do.
        idle_seconds: the time for which a connection is kept.
    """

    def __init__(self, trust: ssl.SSLContext | None = None, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self.writes = JoinedWrites()
        """The requests that are sent at the end of the loop's pass."""
        self._trust = trust
        self._idle_seconds = idle_seconds
        self._idle: dict[str, list[UpstreamConnection]] = {}
        """By URL: connections that are kept for another request, the longest idle first."""
        self._all: set[UpstreamConnection] = set()
        """All open connections, also those that carry a request."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        """Starts the next look for what is idle for too long; None: none is planned, as nothing is idle."""

    def take_idle(self, url: str) -> UpstreamConnection | None:
        """Take a kept connection out of the pool, until its response has ended; None if none is left.

        Kept connections that the upstream has closed meanwhile are dropped.
        """
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()  # the one that was kept last, so that the others grow old
            # The loop may not have read yet that the upstream has closed it.
            if connection.is_open:
                return connection
            connection.abort()
        return None

    async def connect(self, url: str) -> UpstreamConnection:
        """Return a new connection, which is the caller's until its response has ended. Raises NotAcceptedError."""
        host, port, trust = self.find_server(url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(url, self), host, port, ssl=trust
                )
        except TimeoutError as error:
            raise NotAcceptedError(f"no connection within {CONNECT_SECONDS:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise NotAcceptedError(f"its certificate is not trusted: {error.verify_message}") from error
        except OSError as error:
            raise NotAcceptedError(str(error) or "it broke off the connection while that was made") from error
        self._all.add(connection)
        return connection

    def find_server(self, url: str) -> tuple[str, int, ssl.SSLContext | None]:
        """Return host and port of an upstream, and the context that verifies its certificate; None: it has none."""
        parts = urlsplit(url)
        if parts.scheme == "http":
            return parts.hostname or "", parts.port or _HTTP_PORT, None
        if self._trust is None:  # the system's authorities are read only if there is an upstream with https
            self._trust = ssl.create_default_context()
        return parts.hostname or "", parts.port or _HTTPS_PORT, self._trust

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep_timer:
            self._sweep_timer.cancel()
        for connection in list(self._all):
            connection.abort()

    def keep(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose response has ended for another request, or close it."""
        idle = self._idle.setdefault(connection.url, [])
        if len(idle) >= _IDLE_CONNECTIONS:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(self._idle_seconds / 2, self._close_idle)

    def forget(self, connection: UpstreamConnection) -> None:
        """Forget a connection that is closed, or is being closed."""
        self._all.discard(connection)
        idle = self._idle.get(connection.url)
        if idle and connection in idle:
            idle.remove(connection)

    def _close_idle(self) -> None:
        """Close what was idle for too long, and plan the next sweep.

        The longest idle are at the front of each list, because the last one that was kept is used first.
        """
        self._sweep_timer = None
        latest_expired = time.monotonic() - self._idle_seconds
        for url, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= latest_expired:
                idle.pop(0).abort()
            if not idle:
                del self._idle[url]
        if self._idle:
            self._sweep_timer = asyncio.get_running_loop().call_later(self._idle_seconds / 2, self._close_idle)
