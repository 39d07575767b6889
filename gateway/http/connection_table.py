"""All connections of clients, over all listeners of the process: their number, and the time each may take.

A connection beyond the caps takes the place of one that waits: without a request, with half a head, in its handshake,
or with a request of a stranger, the longest waiting first, of its own address if that has too many, else of all. So
idle and slow connections, however many, keep no request out. Heads that do not come whole share a budget in the same
way. Times are compared by one sweep over all connections: a timer for each request would cost more than its parsing.
"""

import asyncio
from typing import TYPE_CHECKING

from gateway.event_log import log
from gateway.http.limits import TLS_COST, UNFINISHED_HEAD_BYTES, ConnectionCaps

if TYPE_CHECKING:
    from gateway.http.server_connection import ServerConnection


class _Waiting:
    """Connections that began to wait, the longest waiting first, and those of them with a part of a head.

    One that has a request since is found out when it is looked at: that costs nothing for each request.
    """

    def __init__(self) -> None:
        self.accepted = 0
        """The number of connections, also of those that do not wait."""
        self.connections: dict[ServerConnection, None] = {}
        self.heads: dict[ServerConnection, None] = {}
        self.head_bytes = 0


class ConnectionTable:
    """The connections of a process, or of some of its listeners."""

    def __init__(self, caps: ConnectionCaps, sweep_seconds: float) -> None:
        self.caps = caps
        self._sweep_seconds = sweep_seconds
        self._connections: set[ServerConnection] = set()
        self._all = _Waiting()
        self._peers: dict[str, _Waiting] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._refused = 0

    @property
    def accepted(self) -> int:
        """The number of connections, including those whose handshake is not complete."""
        return self._all.accepted

    def admit(self, peer: str, *, is_tls: bool = False) -> bool:
        """Decide whether to accept a connection from `peer`, and close a waiting one if that makes the room.

        An accepted connection has to be added at once.
        """
        is_admitted = self._make_room(peer, self.caps.with_room // (TLS_COST if is_tls else 1))
        self._refused += not is_admitted
        return is_admitted

    def _make_room(self, peer: str, with_room: int) -> bool:
        """Return True if a connection from `peer` may be added, after closing a waiting one if needed."""
        waiting = self._peers.get(peer)
        if waiting is not None and waiting.accepted >= self.caps.per_peer:
            return self._close_longest_waiting(waiting)
        if self.accepted < with_room:
            return self.accepted < self.caps.total or self._close_longest_waiting(self._all)
        return self._close_longest_waiting(self._all) or self.accepted < self.caps.total

    def add(self, connection: "ServerConnection") -> None:
        """Count an admitted connection, and watch its times."""
        self._connections.add(connection)
        peer = self._peers.setdefault(connection.peer, _Waiting())
        for place in (self._all, peer):
            place.accepted += 1
        self.mark_waiting(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._sweep_seconds, self._expire_late)

    def remove(self, connection: "ServerConnection") -> None:
        """Forget a connection that was closed."""
        if connection not in self._connections:
            return
        self.release_head(connection)
        self._forget_waiting(connection)
        self._connections.discard(connection)
        peer = self._peers[connection.peer]
        for place in (self._all, peer):
            place.accepted -= 1
        if not peer.accepted:
            del self._peers[connection.peer]

    def mark_waiting(self, connection: "ServerConnection") -> None:
        """Note that a connection begins to wait: for a request, or for its end."""
        if connection in self._connections:
            self._forget_waiting(connection)  # it is the last to wait
            self._all.connections[connection] = self._peers[connection.peer].connections[connection] = None

    def hold_head(self, connection: "ServerConnection", size_bytes: int) -> None:
        """Count the bytes of a head that has not come whole; beyond a limit, close those that wait longest."""
        if connection not in self._connections:
            return
        peer = self._peers[connection.peer]
        for place in (self._all, peer):
            place.heads[connection] = None
            place.head_bytes += size_bytes - connection.head_bytes
        connection.head_bytes = size_bytes
        while peer.head_bytes > UNFINISHED_HEAD_BYTES // 2:
            self._close(next(iter(peer.heads)))
        while self._all.head_bytes > UNFINISHED_HEAD_BYTES:
            self._close(next(iter(self._all.heads)))

    def release_head(self, connection: "ServerConnection") -> None:
        """Note that a head has come whole, or is given up."""
        if connection in self._all.heads:
            for place in (self._all, self._peers[connection.peer]):
                del place.heads[connection]
                place.head_bytes -= connection.head_bytes
        connection.head_bytes = 0

    def _forget_waiting(self, connection: "ServerConnection") -> None:
        if connection in self._all.connections:
            del self._all.connections[connection]
            del self._peers[connection.peer].connections[connection]

    def _close_longest_waiting(self, place: _Waiting) -> bool:
        """Close the connection of `place` that waits longest; return False if none waits."""
        busy: list[ServerConnection] = []
        waiting = None
        for connection in place.connections:
            if connection.gives_way:
                waiting = connection
                break
            busy.append(connection)
        # After the walk: each new one over a dict passes all that was deleted from its front.
        for connection in busy:
            self._forget_waiting(connection)
        if waiting is None:
            return False
        self._close(waiting)
        return True

    def _close(self, connection: "ServerConnection") -> None:
        self.remove(connection)
        connection.give_way()

    def _expire_late(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = [
            connection
            for connection in self._connections
            if connection.deadline <= now or connection.request_deadline <= now
        ]
        for connection in late:
            connection.expire()
        if self._refused:
            log.warning("connections_refused", count=self._refused, total=self.caps.total, peer=self.caps.per_peer)
            self._refused = 0
        if self._connections:
            self._sweep = loop.call_later(self._sweep_seconds, self._expire_late)
