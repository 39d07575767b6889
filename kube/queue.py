"""A queue of keys to reconcile, with the semantics of client-go's work queue.

A key is never reconciled twice at once. A key that is added during its reconcile is reconciled again afterwards; a key
that is added many times is reconciled once. Urgent keys go before all others, so that in a burst what is new is not
held up by what is only looked at again. A key may have a pause after each reconcile: the changes that follow the first
one are then seen together. Nothing polls: delays are timers of the event loop.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import structlog

from kube.backoff import backoff_seconds
from kube.errors import ApiError, LeadershipLost, NotOurs, Unreachable

log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 300.0
LOST_SECONDS = 1.0
"""Pause of a worker that leads no more: the election cancels it, and all keys that wait would fail like this one."""


class WorkQueue(Generic[K]):
    """A coalescing queue of keys; `len` counts those ready now (neither delayed ones nor those being reconciled).

    A key is reconciled again `pause_seconds` after its last reconcile at the earliest.
    """

    def __init__(self, pause_seconds: float = 0.0) -> None:
        self._ready: asyncio.PriorityQueue[tuple[bool, int, K]] = asyncio.PriorityQueue()
        """Keys that a worker may take: first False for an urgent key, then a number that keeps the others in order."""
        self._numbers = itertools.count()

        self._pause_seconds = pause_seconds
        self._paused: set[K] = set()
        """Keys whose pause after a reconcile is not over."""
        self._dirty: set[K] = set()
        """Keys that are enqueued, ready or not: each gets one more reconcile."""
        self._added_at: dict[K, float] = {}
        """When each dirty key was added, by `time.monotonic`; the first is the oldest."""
        self._processing: set[K] = set()
        """Keys that are being reconciled."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        """Keys that will be enqueued later."""
        self._failures: dict[K, int] = {}
        """The failures in a row of a key, for its back-off."""

    def add(self, key: K, *, urgent: bool = False) -> None:
        """Enqueue `key`, if it is not enqueued; an urgent one before all that are not.

        A key that is being reconciled, or pauses, becomes ready afterwards.
        """
        if key in self._dirty:
            return
        self._dirty.add(key)
        self._added_at[key] = time.monotonic()
        if key not in self._processing and key not in self._paused:
            self._put(key, urgent=urgent)

    def add_after(self, key: K, seconds: float) -> None:
        """Enqueue `key` in `seconds`; of several delays the earliest counts."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        waiting = self._timers.get(key)
        if waiting and waiting.when() <= due:
            return  # it will be enqueued earlier than that
        if waiting:
            waiting.cancel()
        self._timers[key] = loop.call_at(due, self._add_due, key)

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
        _can_wait, _number, key = await self._ready.get()  # urgent keys first, then in the order of their numbers
        self._dirty.discard(key)
        del self._added_at[key]
        self._processing.add(key)
        return key

    def processing(self) -> frozenset[K]:
        """Return the keys that are being reconciled."""
        return frozenset(self._processing)

    def done(self, key: K) -> None:
        """Mark the reconcile of `key` as ended, however it ended.

        A key that was added meanwhile becomes ready: at once or, if keys have a pause, when that is over.
        """
        self._processing.discard(key)
        if self._pause_seconds:
            self._paused.add(key)
            asyncio.get_running_loop().call_later(self._pause_seconds, self._end_pause, key)
        elif key in self._dirty:  # added while it was reconciled
            self._put(key)

    def oldest_seconds(self) -> float:
        """Return for how long the oldest key has waited; callable from any thread."""
        added = list(self._added_at.values())  # one step of the interpreter, which no other thread interrupts
        if not added:
            return 0.0
        return time.monotonic() - added[0]

    def __len__(self) -> int:
        return self._ready.qsize()

    def _end_pause(self, key: K) -> None:
        """Make a key ready again if it was added during its reconcile or the pause after it."""
        self._paused.discard(key)
        if key in self._dirty:
            self._put(key)

    def _put(self, key: K, *, urgent: bool = False) -> None:
        can_wait = not urgent
        self._ready.put_nowait((can_wait, next(self._numbers), key))

    def _add_due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)


async def run_workers(
    queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[float | None]], workers: int, timeout_seconds: float
) -> None:
    """Reconcile the keys of the queue for ever; cancel it to stop.

    `reconcile` returns the seconds after which the key is due again, or None. An error or a time-out is logged and
    retried with back-off.
    """
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_work(queue, reconcile, timeout_seconds))


async def _work(queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[float | None]], timeout_seconds: float) -> None:
    """Reconcile one key of the queue after the other, for ever.

    If it succeeds, the key is enqueued again after the seconds that `reconcile` returns, unless it returns None. If it
    fails or takes too long, that is logged, and the key is retried after its back-off.
    """
    while True:
        key = await queue.get()
        try:
            async with asyncio.timeout(timeout_seconds):
                next_seconds = await reconcile(key)
        # `retry` enqueues the key again after its back-off, and returns the seconds until then.
        except (ApiError, LeadershipLost, NotOurs, Unreachable, TimeoutError) as error:
            what = str(error) or f"no result within {timeout_seconds} s"
            log.warning("reconcile_failed", key=key, error=what, retry_seconds=round(queue.retry(key), 1))
            if isinstance(error, LeadershipLost):  # the election cancels this worker soon
                await asyncio.sleep(LOST_SECONDS)
        except Exception:  # a defect in one reconcile must not stop all the others
            log.exception("reconcile_crashed", key=key, retry_seconds=round(queue.retry(key), 1))
        else:
            queue.forget(key)  # its failures, so that the next one begins a new back-off
            if next_seconds is not None:
                queue.add_after(key, next_seconds)
        finally:
            queue.done(key)
