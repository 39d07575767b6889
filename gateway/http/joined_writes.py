"""Writes to several sockets that are made one right after the other, at the end of the event loop's pass.

A write wakes the process at its other end, unless that is awake. With the work on a request between two writes, that
process has time to fall asleep again, and to wake it costs more than the write itself. Without a pause in between, who
is woken by the first write is still awake for the others. uvloop makes each write at once.
"""

import asyncio
from typing import Final

from gateway.http.limits import SEND_TOGETHER_BYTES

_MOST_WAITING: Final = 8
"""So many are written before the end of the pass: to join more saves little, and their readers would idle meanwhile."""


class JoinedWrites:
    """The data that waits to be written, by transport."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, bytes] = {}

    def write(self, transport: asyncio.Transport, data: bytes, *, at_once: bool) -> None:
        """Write data soon, or at once if it is long or shall not wait; always behind what waits already."""
        if at_once or len(data) > SEND_TOGETHER_BYTES:
            self.flush(transport)
            transport.write(data)
            return
        waiting = self._waiting
        if not waiting:
            asyncio.get_running_loop().call_soon(self._write_all)
        waiting[transport] = waiting[transport] + data if transport in waiting else data
        if len(waiting) >= _MOST_WAITING:
            self._write_all()

    def has(self, transport: asyncio.Transport) -> bool:
        """Return whether data waits for a transport."""
        return transport in self._waiting

    def flush(self, transport: asyncio.Transport) -> int:
        """Write what waits for a transport, and return the bytes that it buffers, as the peer does not read them."""
        if data := self._waiting.pop(transport, None):
            transport.write(data)
        return transport.get_write_buffer_size()

    def drop(self, transport: asyncio.Transport) -> None:
        """Forget what waits for a transport, which is broken off."""
        self._waiting.pop(transport, None)

    def _write_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for transport, data in waiting.items():
            if not transport.is_closing():  # it may have been lost meanwhile
                transport.write(data)
