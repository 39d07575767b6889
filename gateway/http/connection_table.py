"""All connections of clients, over all listeners of the process: their number, and the time each may take.

A connection beyond the caps takes the place of one without a request, the longest idle first: of its own address if
that has too many, else of all. So idle connections, however many, keep no request out. Times are compared by one
sweep over all connections, because a timer for each request would cost more than the request's own parsing.
"""

import asyncio
from typing import Protocol

from gateway.event_log import log
from gateway.http.limits import ConnectionCaps


class SweptConnection(Protocol):
    """A connection, as the table sees it."""

    deadline: float
    """The time of the loop's clock after which `expire` is called; infinite if there is none."""

    @property
    def is_idle(self) -> bool:
        """True while it has no request."""

    @property
    def peer(self) -> str:
        """The address of the client."""

    def expire(self) -> None:
        """End what took too long."""

    def close_idle(self) -> None:
        """Close the connection, which has no request."""


class _Peer:
    """The connections of one address: their number, and those of them that became idle, the longest idle first."""

    __slots__ = ("accepted", "idle")

    def __init__(self) -> None:
        self.accepted = 0
        self.idle: dict[SweptConnection, None] = {}


class ConnectionTable:
    """The connections, and those of them that became idle, the longest idle first.

    One that has a request since is found out when it is looked at: that costs nothing for each request.
    """

    def __init__(self, caps: ConnectionCaps, sweep_seconds: float) -> None:
        self.caps = caps
        self._sweep_seconds = sweep_seconds
        self._connections: set[SweptConnection] = set()
        self._idle: dict[SweptConnection, None] = {}
        self._peers: dict[str, _Peer] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._refused = 0
        self.accepted = 0
        """The number of connections, including those whose handshake is not complete."""

    def admit(self, peer: str) -> bool:
        """Decide whether a connection from `peer` is taken, if need be in the place of an idle one; count it if so."""
        if self._has_room(peer):
            self.accepted += 1
            self._peers.setdefault(peer, _Peer()).accepted += 1
            return True
        self._refused += 1
        return False

    def _has_room(self, peer: str) -> bool:
        known = self._peers.get(peer)
        if known is not None and known.accepted >= self.caps.per_peer:
            return self._close_longest_idle(known.idle)
        return self.accepted < self.caps.total or self._close_longest_idle(self._idle)

    def dismiss(self, peer: str) -> None:
        """Count a connection that was admitted as gone."""
        self.accepted -= 1
        known = self._peers[peer]
        known.accepted -= 1
        if not known.accepted:
            del self._peers[peer]

    def add(self, connection: SweptConnection) -> None:
        """Watch the times of an admitted connection."""
        self._connections.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._sweep_seconds, self._expire_late)

    def remove(self, connection: SweptConnection) -> None:
        """Forget a connection that was closed."""
        if connection in self._connections:
            self._forget_idle(connection)
            self._connections.discard(connection)
            self.dismiss(connection.peer)

    def mark_idle(self, connection: SweptConnection) -> None:
        """Note that a connection has no request."""
        if connection in self._connections:
            self._forget_idle(connection)  # it is the last to become idle
            self._idle[connection] = self._peers[connection.peer].idle[connection] = None

    def _forget_idle(self, connection: SweptConnection) -> None:
        if connection in self._idle:
            del self._idle[connection]
            del self._peers[connection.peer].idle[connection]

    def _close_longest_idle(self, idle: dict[SweptConnection, None]) -> bool:
        """Close the first of these idle connections; return False if there is none."""
        busy: list[SweptConnection] = []
        found = None
        for connection in idle:
            if connection.is_idle:
                found = connection
                break
            busy.append(connection)
        # After the walk: each new one over a dict passes all that was deleted from its front.
        for connection in busy:
            self._forget_idle(connection)
        if found is None:
            return False
        self.remove(found)
        found.close_idle()
        return True

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
