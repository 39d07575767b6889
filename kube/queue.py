"""A queue of keys to reconcile, with the semantics of client-go's work queue.

A key is never reconciled twice at once. A key that is added during its reconcile is reconciled again afterwards; a key
that is added many times is reconciled once. Nothing polls: delays are timers of the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import structlog

from kube.backoff import backoff_seconds
from kube.errors import ApiError, NotOurs, Unreachable

log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 300.0


class WorkQueue(Generic[K]):
    """A coalescing queue of keys; `len` counts those ready now (neither delayed ones nor those being reconciled)."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._added_at: dict[K, float] = {}
        """When each dirty key was added, by `time.monotonic`; the first is the oldest."""
        self._processing: set[K] = set()
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}

    def add(self, key: K) -> None:
        """Enqueue `key` now."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        self._added_at[key] = time.monotonic()
        if key not in self._processing:
            self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Enqueue `key` in `seconds`; of several delays the earliest counts."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        waiting = self._later.get(key)
        if waiting and waiting.when() <= due:
            return
        if waiting:
            waiting.cancel()
        self._later[key] = loop.call_at(due, self._add_due, key)

    def retry(self, key: K) -> float:
        """Enqueue `key` after its back-off, 0.1 s doubling to 300 s with jitter; return the seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        seconds = backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: K) -> None:
        """Reset the back-off of `key`: its reconcile succeeded, or its object is gone."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key; the caller must call `done` with it."""
        key = await self._ready.get()
        self._dirty.discard(key)
        del self._added_at[key]
        self._processing.add(key)
        return key

    def done(self, key: K) -> None:
        """Mark the reconcile of `key` as ended, however it ended."""
        self._processing.discard(key)
        if key in self._dirty:
            self._ready.put_nowait(key)

    def oldest_seconds(self) -> float:
        """Return for how long the oldest key has waited; callable from any thread."""
        added = list(self._added_at.values())  # one step of the interpreter, which no other thread interrupts
        return time.monotonic() - added[0] if added else 0.0

    def __len__(self) -> int:
        return self._ready.qsize()

    def _add_due(self, key: K) -> None:
        del self._later[key]
        self.add(key)


async def run_workers(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[float | None]],
    workers: int,
    timeout_seconds: float,
) -> None:
    """Reconcile the keys of the queue for ever; cancel it to stop.

    `reconcile` returns the seconds after which the key is due again, or None. An error or a time-out is logged and
    retried with back-off.
    """
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_work(queue, reconcile, timeout_seconds))


async def _work(queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[float | None]], timeout_seconds: float) -> None:
    while True:
        key = await queue.get()
        try:
            async with asyncio.timeout(timeout_seconds):
                again = await reconcile(key)
        except (ApiError, NotOurs, Unreachable, TimeoutError) as error:
            what = str(error) or f"no result within {timeout_seconds} s"
            log.warning("reconcile_failed", key=key, error=what, retry_seconds=round(queue.retry(key), 1))
        except Exception:  # a defect in one reconcile must not stop all the others
            log.exception("reconcile_crashed", key=key, retry_seconds=round(queue.retry(key), 1))
        else:
            queue.forget(key)
            if again is not None:
                queue.add_after(key, again)
        finally:
            queue.done(key)
