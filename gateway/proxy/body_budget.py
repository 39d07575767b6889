"""The memory that request bodies may take, over all services of the host.

A body is held whole from its first byte until an engine responds, and many clients may send large ones that all wait in
a queue. A body that exceeds the budget is refused at once, so that a few clients with images cannot use up the host's
memory.
"""

from typing import Final

LIMIT_BYTES: Final = 256 << 20
"""For all bodies together: thousands of chats, or some dozens of requests with images."""


class BodyBudget:
    """The bytes that all request bodies hold together, and their limit."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def reserve(self, more_bytes: int) -> bool:
        """Reserve `more_bytes` for a body, or return False if the budget has no room for them."""
        if self.held_bytes + more_bytes > self._limit_bytes:
            return False
        self.held_bytes += more_bytes
        return True

    def release(self, held_bytes: int) -> None:
        """Give back what was reserved for a body."""
        self.held_bytes -= held_bytes
