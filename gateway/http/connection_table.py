"""All connections of clients, over all listeners of the process: their number, and the time each may take.

A connection beyond the caps takes the place of one without a request, the longest idle first: of its own address if
that has too many, else of all. So idle connections, however many, keep no request out. Times are compared by one
sweep over all connections, because a timer for each request would cost more than the request's own parsing.
"""

import asyncio
from collections import Counter
from typing import Protocol

from gateway.event_log import log
from gateway.http.limits import ConnectionCaps


class SweptConnection(Protocol):
    """A connection, as the table sees it."""

    peer: str
    deadline: float
    """The time of the loop's clock after which `expire` is called; infinite if there is none."""

    def expire(self) -> None:
        """End what took too long."""

    def close_idle(self) -> None:
        """Close the connection, which has no request."""


class ConnectionTable:
    """The connections, and those of them that are idle, the longest idle first."""

    def __init__(self, caps: ConnectionCaps, sweep_seconds: float) -> None:
        self.caps = caps
        self._sweep_seconds = sweep_seconds
        self._connections: set[SweptConnection] = set()
        self._idle: dict[SweptConnection, None] = {}
        self._peers: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None
        self._refused = 0

    @property
    def accepted(self) -> int:
        """The number of connections, including those whose handshake is not complete."""
        return self._peers.total()

    def admit(self, peer: str) -> bool:
        """Decide whether a connection from `peer` is taken, if need be in the place of an idle one; count it if so."""
        if self._has_room(peer):
            self._peers[peer] += 1
            return True
        self._refused += 1
        return False

    def _has_room(self, peer: str) -> bool:
        if self._peers[peer] >= self.caps.per_peer:
            return self._close_longest_idle(peer)
        return self.accepted < self.caps.total or self._close_longest_idle(None)

    def dismiss(self, peer: str) -> None:
        """Count a connection that was admitted as gone."""
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    def add(self, connection: SweptConnection) -> None:
        """Watch the times of an admitted connection."""
        self._connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._sweep_seconds, self._expire_late)

    def remove(self, connection: SweptConnection) -> None:
        """Forget a connection that was closed."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._idle.pop(connection, None)
            self.dismiss(connection.peer)

    def mark_idle(self, connection: SweptConnection) -> None:
        """Note that a connection has no request."""
        self._idle[connection] = None

    def mark_busy(self, connection: SweptConnection) -> None:
        """Note that a connection has a request."""
        self._idle.pop(connection, None)

    def _close_longest_idle(self, peer: str | None) -> bool:
        """Close the longest idle connection, of `peer` if that is given; return False if there is none."""
        for connection in self._idle:
            if peer is None or connection.peer == peer:
                self.remove(connection)
                connection.close_idle()
                return True
        return False

    def _expire_late(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [each for each in self._connections if each.deadline <= now]:
            connection.expire()
        if self._refused:
            log.warning("connections_refused", count=self._refused, total=self.caps.total, peer=self.caps.per_peer)
            self._refused = 0
        if self._connections:
            self._sweep = loop.call_later(self._sweep_seconds, self._expire_late)
