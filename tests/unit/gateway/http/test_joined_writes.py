"""Data for several sockets: written together, in order, and never later than what must come behind it."""

import asyncio
from typing import Any

from gateway.http.joined_writes import JoinedWrites
from gateway.http.limits import SEND_TOGETHER_BYTES


class RecordingTransport:
    """A transport that notes what is written, in a list that several share."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.closing = False
        self._written = written

    def write(self, data: bytes) -> None:
        assert not self.closing
        self._written.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 7


def make_transports(count: int) -> tuple[list[Any], list[tuple[str, bytes]]]:
    written: list[tuple[str, bytes]] = []
    return [RecordingTransport(str(number), written) for number in range(count)], written


async def test_writes_of_a_pass_are_made_at_its_end_in_their_order() -> None:
    (first, second), written = make_transports(2)
    writes = JoinedWrites()
    for transport, data in ((second, b"a"), (first, b"b"), (second, b"c")):
        writes.write(transport, data, at_once=False)
    assert not written
    assert writes.has(first)
    await asyncio.sleep(0)
    assert written == [("1", b"ac"), ("0", b"b")]
    assert not writes.has(first)


async def test_eighth_reader_does_not_wait_for_the_end_of_the_pass() -> None:
    transports, written = make_transports(9)
    writes = JoinedWrites()
    for transport in transports:
        writes.write(transport, b"a", at_once=False)
    assert len(written) == 8
    await asyncio.sleep(0)
    assert len(written) == 9


async def test_long_and_urgent_data_is_written_behind_what_waits() -> None:
    (first, second), written = make_transports(2)
    writes = JoinedWrites()
    long_data = b"x" * (SEND_TOGETHER_BYTES + 1)
    writes.write(first, b"a", at_once=False)
    writes.write(first, long_data, at_once=False)
    writes.write(second, b"b", at_once=False)
    writes.write(second, b"c", at_once=True)
    assert written == [("0", b"a"), ("0", long_data), ("1", b"b"), ("1", b"c")]


async def test_data_is_written_before_a_transport_is_closed_and_not_afterwards() -> None:
    (closed, lost, dropped), written = make_transports(3)
    writes = JoinedWrites()
    for transport in (closed, lost, dropped):
        writes.write(transport, b"a", at_once=False)
    assert writes.flush(closed) == 7
    lost.closing = True
    writes.drop(dropped)
    await asyncio.sleep(0)
    assert written == [("0", b"a")]
