"""The table of connections: which one gives way, and the number of connections that are looked at to find it."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionCaps

pytestmark = pytest.mark.interpreted


class Connection:
    """A connection that counts how often the table asks it for its peer."""

    deadline = request_deadline = math.inf
    head_bytes = 0

    def __init__(self, peer: str, *, is_replaceable: bool) -> None:
        self._peer = peer
        self.is_replaceable = is_replaceable
        self.asked = 0
        self.closed = False

    @property
    def peer(self) -> str:
        self.asked += 1
        return self._peer

    def expire(self) -> None:
        """Do nothing: it has no deadline."""

    def give_way(self) -> None:
        self.closed = True


def connect(table: ConnectionTable, peer: str, *, idle: bool = True) -> Any:
    assert table.admit(peer)
    connection: Any = Connection(peer, is_replaceable=idle)
    table.add(connection)
    return connection


async def test_refusal_of_a_busy_peer_looks_at_no_connection() -> None:
    table = ConnectionTable(ConnectionCaps(total=1000, per_peer=2), sweep_seconds=60)
    others = [connect(table, f"10.0.0.{number}") for number in range(200)]
    busy = [connect(table, "10.1.0.1", idle=False) for _ in range(2)]
    assert not table.admit("10.1.0.1"), "both are found to have a request"
    asked = sum(connection.asked for connection in (*others, *busy))
    assert not table.admit("10.1.0.1")
    assert sum(connection.asked for connection in (*others, *busy)) == asked
    assert table.accepted == 202


async def test_longest_idle_connection_of_the_peer_gives_way_without_a_look_at_others() -> None:
    table = ConnectionTable(ConnectionCaps(total=1000, per_peer=3), sweep_seconds=60)
    others = [connect(table, f"10.0.0.{number}") for number in range(200)]
    first, second, third = (connect(table, "10.1.0.1") for _ in range(3))
    table.mark_waiting(first)
    asked = sum(other.asked for other in others)
    connect(table, "10.1.0.1")
    assert [connection.closed for connection in (first, second, third)] == [False, True, False]
    assert sum(other.asked for other in others) == asked
    table.remove(second)
    assert table.accepted == 203, "a connection that was closed is counted once"


async def test_connection_with_a_request_since_it_was_idle_does_not_give_way() -> None:
    table = ConnectionTable(ConnectionCaps(total=3, per_peer=3), sweep_seconds=60)
    busy, idle, again = (connect(table, "10.1.0.1") for _ in range(3))
    busy.is_replaceable = again.is_replaceable = False
    connect(table, "10.1.0.1", idle=False)
    assert [connection.closed for connection in (busy, idle, again)] == [False, True, False]
    again.is_replaceable = True
    table.mark_waiting(again)
    connect(table, "10.1.0.1", idle=False)
    assert [connection.closed for connection in (busy, again)] == [False, True]
    assert not table.admit("10.1.0.1"), "the last one has a request"


class CountedWalks(dict[Any, None]):
    """Counts the iterations: each one passes all that was deleted from the front."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


async def test_idle_connection_behind_busy_ones_is_found_in_one_walk() -> None:
    table = ConnectionTable(ConnectionCaps(total=100, per_peer=100), sweep_seconds=60)
    table._all.waiting = CountedWalks()
    connections = [connect(table, f"10.0.0.{number}") for number in range(100)]
    for connection in connections[:-1]:
        connection.is_replaceable = False
    assert table.admit("10.0.1.1")
    assert (connections[-1].closed, table._all.waiting.walks) == (True, 1)
    assert not table._all.waiting, "those with a request are forgotten"


async def test_number_of_connections_is_known_without_a_look_at_the_peers() -> None:
    table = ConnectionTable(ConnectionCaps(total=3, per_peer=3), sweep_seconds=60)
    connections = [connect(table, f"10.0.0.{number}") for number in range(3)]
    table._by_peer = None  # type: ignore[assignment] # whoever looks at it fails
    assert table.accepted == 3
    assert len({id(connection) for connection in connections}) == 3


async def test_addresses_without_connections_are_forgotten() -> None:
    table = ConnectionTable(ConnectionCaps(total=2, per_peer=2), sweep_seconds=60)
    first, second = connect(table, "10.0.0.1"), connect(table, "10.0.0.2")
    third = connect(table, "10.0.0.3")
    assert first.closed, "the longest idle of all gives way"
    for connection in (second, third):
        table.remove(connection)
        table.mark_waiting(connection)
    assert (table.accepted, table._by_peer, table._all.waiting) == (0, {}, {})
