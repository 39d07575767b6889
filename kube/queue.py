"""Keys that wait for a reconcile, with the semantics of client-go's work queue.

A key is never worked on twice at once; added while it is being worked on, it comes again afterwards; added many
times, it comes once. Nothing polls: delays are timers of the event loop.
"""

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """A coalescing queue of keys; `len` is how many wait now (neither later ones nor those being worked on)."""

    def add(self, key: K) -> None:
        """Have `key` worked on as soon as possible."""
        raise NotImplementedError

    def add_after(self, key: K, seconds: float) -> None:
        """Have `key` worked on in `seconds`, or earlier when something else asks for it."""
        raise NotImplementedError

    def retry(self, key: K) -> float:
        """Add `key` after its back-off, 0.1 s doubling to 300 s with jitter; returns the seconds."""
        raise NotImplementedError

    def forget(self, key: K) -> None:
        """End the back-off of `key`: its work succeeded, or its object is gone."""
        raise NotImplementedError

    async def get(self) -> K:
        """Wait for a key; the caller must call `done` with it."""
        raise NotImplementedError

    def done(self, key: K) -> None:
        """The work on `key` ended, however it ended."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


async def run_workers(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[float | None]],
    workers: int,
    timeout_seconds: float,
) -> None:
    """Work on the queue for ever; cancel it to stop.

    `reconcile` returns the seconds after which it wants the key again, or None. An error or a time-out is logged and
    retried with back-off.
    """
    raise NotImplementedError
