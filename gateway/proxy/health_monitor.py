"""Watch the health of all backends of the proxy, and report each change at once to those that watch it."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import Protocol

from gateway.proxy.backend_health import AnswerProgress, BackendPast
from gateway.proxy.config import Backend, BackendHealth

CHECK_SECONDS = 1.0
_DIGEST_BYTES = 4096


class ExpectedAnswer(Protocol):
    """An answer that has not begun."""

    def observe(self) -> object:
        """Call the monitor's `begin`."""


class HealthMonitor:
    """The past of each configured backend, and the watchers of their health."""

    def __init__(self) -> None:
        self._pasts: dict[str, BackendPast] = {}
        self._backends: dict[str, Backend] = {}
        self._watchers: set[HealthWatch] = set()
        self._expected: set[ExpectedAnswer] = set()
        self._check: asyncio.TimerHandle | None = None

    def configure(self, backends: Collection[Backend]) -> None:
        """Forget the past of each backend that is new, gone, changed, or takes requests again after it was drained."""
        previous, self._backends = self._backends, {backend.uid: backend for backend in backends}
        for uid in {*previous, *self._backends}:
            before, after = previous.get(uid), self._backends.get(uid)
            if before != after and not (before and after and _is_only_drained(before, after)):
                self.clear(uid)
        self._pasts = {uid: self._pasts.get(uid) or BackendPast(uid) for uid in self._backends}

    def clear(self, uid: str) -> bool:
        """Forget the past of backend `uid`, and report that it is no suspect; return False if it is not configured."""
        past = self._pasts.get(uid)
        if past is None:
            return False
        self._observe_expected()  # they belong to that past
        self._pasts[uid] = BackendPast(uid)
        if past.health.suspect:
            self._report(self._pasts[uid].health)
        return True

    def expect(self, answer: ExpectedAnswer) -> None:
        """Observe the answer to a request that was sent, from when it begins, or from the next check on.

        To observe it at once would delay it: an idle engine answers within microseconds.
        """
        self._expected.add(answer)
        if self._check is None:
            self._check = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_pauses)

    def begin(self, answer: ExpectedAnswer, uid: str, body: bytes | bytearray, sent_at: float) -> "AnswerObserver":
        """Observe the answer to a request with this body, which was sent to `uid` at a time of the monotonic clock."""
        self._expected.discard(answer)
        # A backend that has left the configuration is observed, too, but nobody reads the result.
        past = self._pasts.get(uid) or BackendPast(uid)
        return AnswerObserver(self, past, body, sent_at)

    def suspects(self) -> tuple[BackendHealth, ...]:
        """Return the health of the backends that are suspect."""
        return tuple(past.health for past in self._pasts.values() if past.health.suspect)

    def watch(self) -> "HealthWatch":
        """Return the health of every suspect backend, then each change; close it when it is needed no more."""
        watch = HealthWatch(self._watchers)
        for health in self.suspects():
            watch.put(health)
        return watch

    def report_change(self, past: BackendPast, before: BackendHealth) -> None:
        """Report the health of `past` to the watchers if it is not as `before`."""
        if past.health is not before and self._pasts.get(past.health.uid) is past:
            self._report(past.health)

    def _report(self, health: BackendHealth) -> None:
        for watch in self._watchers:
            watch.put(health)

    def _observe_expected(self) -> None:
        for answer in tuple(self._expected):
            answer.observe()

    def _check_pauses(self) -> None:
        self._check = None
        self._observe_expected()
        now = time.monotonic()
        busy = [past for past in self._pasts.values() if past.under_way]
        for past in busy:
            before = past.health
            past.check_pauses(now)
            self.report_change(past, before)
        if busy:
            self._check = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_pauses)


class AnswerObserver(AnswerProgress):
    """One answer, and its steps as the monitor notes them; the first that ends it counts."""

    __slots__ = ("_monitor", "_past")

    def __init__(self, monitor: HealthMonitor, past: BackendPast, body: bytes | bytearray, sent_at: float) -> None:
        super().__init__(_digest(body), len(body), sent_at)
        self._monitor = monitor
        self._past = past
        past.under_way.add(self)

    def note_begin(self) -> None:
        """Note the begin of an answer: the head of a response without an error."""
        self._past.note_begin(self, time.monotonic())

    def note_data(self, now: float) -> None:
        """Note data of a stream."""
        before = self._past.health
        self._past.note_data(self, now)
        self._monitor.report_change(self._past, before)

    def succeed(self) -> None:
        """Note a complete answer."""
        if self in self._past.under_way:
            before = self._past.health
            self._past.succeed(self)
            self._monitor.report_change(self._past, before)

    def fail(self, outcome: str) -> None:
        """Note that the backend failed the request; `outcome` is a status or a kind of failure."""
        if self in self._past.under_way:
            before = self._past.health
            self._past.fail(self, outcome, time.monotonic())
            self._monitor.report_change(self._past, before)

    def fail_for_good(self, outcome: str) -> None:
        """Note that the backend cannot answer any request more, by its own answer."""
        if self in self._past.under_way:
            before = self._past.health
            self._past.fail_for_good(self, outcome)
            self._monitor.report_change(self._past, before)

    def abandon(self) -> None:
        """Note the end of an answer that shows nothing; no effect after it has ended otherwise."""
        self._past.abandon(self)


class HealthWatch:
    """One watcher's queue of changes: the latest health of each backend that has changed since it was read."""

    def __init__(self, watchers: "set[HealthWatch]") -> None:
        self._watchers = watchers
        self._changes: dict[str, BackendHealth] = {}
        self._changed = asyncio.Event()
        watchers.add(self)

    def put(self, health: BackendHealth) -> None:
        """Add a change."""
        self._changes[health.uid] = health
        self._changed.set()

    def close(self) -> None:
        """Stop watching."""
        self._watchers.discard(self)

    async def changes(self, pause_seconds: float) -> AsyncIterator[tuple[BackendHealth, ...]]:
        """Yield changes at once, or nothing after `pause_seconds` without one."""
        while True:
            try:
                async with asyncio.timeout(pause_seconds):
                    await self._changed.wait()
            except TimeoutError:
                yield ()
                continue
            self._changed.clear()
            changes, self._changes = tuple(self._changes.values()), {}
            yield changes


def _is_only_drained(before: Backend, after: Backend) -> bool:
    """Decide whether a backend has only been drained, as the agent does while it looks at a suspect one."""
    return after.draining and not before.draining and _identity(before) == _identity(after)


def _identity(backend: Backend) -> tuple[object, ...]:
    return (backend.url, backend.model, backend.api_key, backend.concurrency)


def _digest(body: bytes | bytearray) -> int:
    """Return the same number for the same body, from its ends only, because a body may be large."""
    if len(body) <= _DIGEST_BYTES:
        return hash(bytes(body))
    return hash((len(body), bytes(body[:_DIGEST_BYTES]), bytes(body[-_DIGEST_BYTES:])))
