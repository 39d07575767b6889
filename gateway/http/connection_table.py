"""All connections of clients, over all listeners of the process: their number, and the time each may take.

A connection beyond the caps takes the place of one that waits: without a request, with half a head, in its handshake,
or with a request of a stranger, the longest waiting first, of its own address if that has too many, else of all. So
idle and slow connections, however many, keep no request out. Heads that do not come whole share a budget in the same
way. Times are compared by one sweep over all connections: a timer for each request would cost more than its parsing.
"""

import asyncio
from typing import TYPE_CHECKING

from gateway.event_log import log
from gateway.http.joined_writes import JoinedWrites
from gateway.http.limits import TLS_COST, UNFINISHED_HEAD_BYTES, ConnectionCaps

if TYPE_CHECKING:
    from gateway.http.server_connection import ServerConnection


class _ConnectionGroup:
    """The connections of one address, or all: those that began to wait, the longest waiting first, and their heads.

    One that has a request since is found out when it is looked at: that costs nothing for each request.
    """

    def __init__(self) -> None:
        # The dicts to None are sets that keep the order in which connections were added.
        self.accepted = 0
        """The number of all accepted connections, including those that work on a request."""
        self.waiting: dict[ServerConnection, None] = {}
        """Connections without a request when they were added, the longest waiting first."""
        self.unfinished_heads: dict[ServerConnection, None] = {}
        """Connections that have sent a part of a request's head, the oldest first."""
        self.head_bytes = 0
        """The size of these unfinished heads."""


class ConnectionTable:
    """The connections of a process, or of some of its listeners."""

    def __init__(self, caps: ConnectionCaps, sweep_seconds: float) -> None:
        self.caps = caps
        """The most connections: in all, from one address, and before waiting ones give way (`soft_total`)."""
        self.writes = JoinedWrites()
        """The answers that are sent at the end of the loop's pass."""
        self._sweep_seconds = sweep_seconds
        self._connections: set[ServerConnection] = set()
        self._all = _ConnectionGroup()
        self._by_peer: dict[str, _ConnectionGroup] = {}
        """The connections from each address."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        """Starts the next sweep, which ends what took too long; None: none is planned while there is no connection."""
        self._refused_since_sweep = 0
        """Connections that were not accepted; each sweep logs them as one line."""

    @property
    def accepted(self) -> int:
        """The number of connections, including those whose handshake is not complete."""
        return self._all.accepted

    def admit(self, peer: str, *, is_tls: bool = False) -> bool:
        """Decide whether to accept a connection from the address `peer`; close a waiting one if that is needed.

        Return False if there is no room and none waits; it is counted for the log. If True, the caller calls `add` at
        once.
        """
        # From the soft total on, each new connection takes the place of one without a request, to save memory. A
        # connection with TLS takes as much memory as TLS_COST others, so its soft total is lower.
        soft_total = self.caps.soft_total // TLS_COST if is_tls else self.caps.soft_total
        is_admitted = self._make_room(peer, soft_total)
        if not is_admitted:
            self._refused_since_sweep += 1
        return is_admitted

    def _make_room(self, peer: str, soft_total: int) -> bool:
        """Return True if a connection from `peer` may be added; a waiting one is closed for it if needed.

        * `peer` has reached its cap: one of its own waiting connections has to give way; False if none waits.
        * There are fewer than `soft_total`: there is room, and none is closed.
        * There are more: the longest waiting connection gives way; if none waits, there is room up to the hard total.
        """
        from_peer = self._by_peer.get(peer)
        if from_peer is not None and from_peer.accepted >= self.caps.per_peer:
            return self._close_longest_waiting(from_peer)
        has_room = self.accepted < self.caps.total
        if has_room and self.accepted < soft_total:
            return True
        # From the soft total on, a waiting connection is closed even if there is room without that.
        return self._close_longest_waiting(self._all) or has_room

    def add(self, connection: "ServerConnection") -> None:
        """Count an admitted connection, and watch its times."""
        self._connections.add(connection)
        peer = self._by_peer.setdefault(connection.peer, _ConnectionGroup())
        for group in (self._all, peer):
            group.accepted += 1
        self.mark_waiting(connection)
        if self._sweep_timer is None:
            # The sweep ends what takes too long, and plans the next one itself while there are connections.
            self._sweep_timer = asyncio.get_running_loop().call_later(self._sweep_seconds, self._expire_late)

    def remove(self, connection: "ServerConnection") -> None:
        """Forget a connection that was closed."""
        if connection not in self._connections:
            return
        self.forget_unfinished_head(connection)
        self._forget_waiting(connection)
        self._connections.discard(connection)
        peer = self._by_peer[connection.peer]
        for group in (self._all, peer):
            group.accepted -= 1
        if not peer.accepted:
            del self._by_peer[connection.peer]

    def mark_waiting(self, connection: "ServerConnection") -> None:
        """Note that a connection begins to wait, for a request or to be closed: from now on it may give way."""
        if connection in self._connections:
            self._forget_waiting(connection)  # it is added again as the last, because it begins to wait now
            self._all.waiting[connection] = None
            self._by_peer[connection.peer].waiting[connection] = None

    def count_unfinished_head(self, connection: "ServerConnection", size_bytes: int) -> None:
        """Set the size of a request's head that has not come whole yet; the table counts these bytes as held memory.

        While one address holds more than half of the limit, or all together more than the limit, the connections whose
        heads began first are closed.
        """
        if connection not in self._connections:
            return

        # Replace the size that was counted before, `connection.head_bytes`: in the group of all connections, and in
        # that of the same address. `unfinished_heads` is an ordered set; a connection in it keeps its place.
        peer = self._by_peer[connection.peer]
        for group in (self._all, peer):
            group.unfinished_heads[connection] = None
            group.head_bytes += size_bytes - connection.head_bytes
        connection.head_bytes = size_bytes

        # A connection that is closed takes its head out of `head_bytes`, so each loop ends.
        while peer.head_bytes > UNFINISHED_HEAD_BYTES // 2:
            self._close_oldest_head(peer)
        while self._all.head_bytes > UNFINISHED_HEAD_BYTES:
            self._close_oldest_head(self._all)

    def _close_oldest_head(self, group: _ConnectionGroup) -> None:
        """Close the connection of `group` whose unfinished head began first: a dict keeps the order of insertion."""
        self._close(next(iter(group.unfinished_heads)))

    def forget_unfinished_head(self, connection: "ServerConnection") -> None:
        """Note that a head has come whole, or is given up."""
        if connection in self._all.unfinished_heads:
            for group in (self._all, self._by_peer[connection.peer]):
                del group.unfinished_heads[connection]
                group.head_bytes -= connection.head_bytes
        connection.head_bytes = 0

    def _forget_waiting(self, connection: "ServerConnection") -> None:
        if connection in self._all.waiting:
            del self._all.waiting[connection]
            del self._by_peer[connection.peer].waiting[connection]

    def _close_longest_waiting(self, group: _ConnectionGroup) -> bool:
        """Close the connection of `group` that waits longest; return False if none waits.

        A connection that got a request stays in `waiting` until it is found here, because removing it at once would
        cost time in every request. So those that come before the first replaceable one are removed now.
        """
        # Find the first connection that may be closed; `waiting` has the longest waiting first.
        busy: list[ServerConnection] = []
        longest_waiting = None
        for connection in group.waiting:
            if connection.is_replaceable:  # it has no request, or one that any stranger may send
                longest_waiting = connection
                break
            busy.append(connection)

        # In one go: a new loop over a dict for each would step over all entries that were deleted from its front.
        for connection in busy:
            self._forget_waiting(connection)

        if longest_waiting is None:
            return False
        self._close(longest_waiting)
        return True

    def _close(self, connection: "ServerConnection") -> None:
        self.remove(connection)
        connection.give_way()

    def _expire_late(self) -> None:
        """End what took too long in any connection, log how many were refused, and plan the next sweep."""
        self._sweep_timer = None
        loop = asyncio.get_running_loop()

        # End what is late, each connection in its own way.
        now = loop.time()
        late = [
            connection
            for connection in self._connections
            if connection.deadline <= now or connection.request_deadline <= now
        ]
        for connection in late:
            connection.expire()

        # One line for all that were refused since the last sweep.
        if self._refused_since_sweep:
            log.warning(
                "connections_refused", count=self._refused_since_sweep, total=self.caps.total, peer=self.caps.per_peer
            )
            self._refused_since_sweep = 0

        # Without connections no sweep is planned; the next connection plans one.
        if self._connections:
            self._sweep_timer = loop.call_later(self._sweep_seconds, self._expire_late)
