"""The memory of request bodies, over all services: a client may send many large ones, and all of them wait for a turn.

A body is held whole from its first byte until an engine answers. What does not fit any more is refused at once, so that
one client's images cost no other client, and not the host, their memory.
"""

from typing import Final

LIMIT_BYTES: Final = 256 << 20
"""Of all bodies at a time: thousands of chats, or some dozens of requests with images."""


class Bodies:
    """What is held of bodies now."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def hold(self) -> "HeldBody":
        """Begin to count one more body."""
        return HeldBody(self)

    def has_room(self, more_bytes: int) -> bool:
        """Whether so many more may be held."""
        return self.held_bytes + more_bytes <= self._limit_bytes


class HeldBody:
    """One body's share, which grows as it arrives."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size_bytes = 0

    def grow(self, more_bytes: int) -> bool:
        """Count more of it, unless that is too much."""
        if not self._bodies.has_room(more_bytes):
            return False
        self._size_bytes += more_bytes
        self._bodies.held_bytes += more_bytes
        return True

    def release(self) -> None:
        """Count none of it any more; may be called twice."""
        self._bodies.held_bytes -= self._size_bytes
        self._size_bytes = 0
