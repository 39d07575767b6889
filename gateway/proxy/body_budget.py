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

    def reserve(self) -> "BodyReservation":
        """Return an empty reservation, for one more body."""
        return BodyReservation(self)

    def has_room(self, more_bytes: int) -> bool:
        """Decide whether `more_bytes` fit into the budget."""
        return self.held_bytes + more_bytes <= self._limit_bytes


class BodyReservation:
    """One body's share of the budget, which grows as the body arrives."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size_bytes = 0

    def grow(self, more_bytes: int) -> bool:
        """Reserve `more_bytes`, or return False if the budget has no room for them."""
        if not self._budget.has_room(more_bytes):
            return False
        self._size_bytes += more_bytes
        self._budget.held_bytes += more_bytes
        return True

    def release(self) -> None:
        """Give the whole share back; may be called twice."""
        self._budget.held_bytes -= self._size_bytes
        self._size_bytes = 0
