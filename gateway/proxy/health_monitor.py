"""Watch the health of all backends of the proxy, and report each change at once to those that watch it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from typing import Final

from msgspec import structs

from gateway.proxy.backend_health import BackendPast, UnobservedPast
from gateway.proxy.config import Backend, BackendHealth

CHECK_SECONDS = 1.0
_UNOBSERVED: Final = UnobservedPast()


class HealthMonitor:
    """The past of each configured backend, and the watchers of their health."""

    def __init__(self) -> None:
        self._pasts: dict[str, BackendPast] = {}
        """By the uid of a backend: its last answers, and the health that they show."""
        self._backends: dict[str, Backend] = {}
        self._watchers: set[asyncio.Queue[BackendHealth]] = set()
        """The changes of health that each caller of `watch` has not got yet."""
        self._check_timer: asyncio.TimerHandle | None = None
        """Starts the next check of pauses; None: none is planned, as no backend works on a request."""

    def configure(self, backends: Collection[Backend]) -> None:
        """Observe these backends from now on; forget the past of each that is gone, was changed, or is drained no more.

        A backend that begins to drain, and is otherwise unchanged, keeps its past.
        """
        previous, self._backends = self._backends, {backend.uid: backend for backend in backends}
        for uid in {*previous, *self._backends}:
            before, after = previous.get(uid), self._backends.get(uid)
            # The agent drains a suspect backend while it examines it: its past stays until it takes requests again.
            begins_to_drain = before and after == structs.replace(before, draining=True)  # nothing else has changed
            if before != after and not begins_to_drain:
                self.clear(uid)
        self._pasts = {uid: self._pasts.get(uid) or BackendPast(uid, self._report) for uid in self._backends}

    def clear(self, uid: str) -> bool:
        """Forget the past of backend `uid`, and report that it is no suspect; return False if it is not configured."""
        past = self._pasts.get(uid)
        if past is None:
            return False
        self._pasts[uid] = BackendPast(uid, self._report)
        if past.health.suspect:
            self._report(self._pasts[uid])  # the new past, which suspects nothing
        return True

    def observe_backend(self, uid: str) -> BackendPast:
        """Return the past of a backend that gets a request now; from now on its pauses are checked.

        One that is not configured is not observed: it has left the configuration, or is behind a gateway.
        """
        past = self._pasts.get(uid)
        if past is None:
            return _UNOBSERVED
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_pauses)
        return past

    def suspects(self) -> tuple[BackendHealth, ...]:
        """Return the health of the backends that are suspect."""
        return tuple(past.health for past in self._pasts.values() if past.health.suspect)

    async def watch(self, pause_seconds: float) -> AsyncGenerator[BackendHealth | None, None]:
        """Yield the health of every suspect backend, then each change at once; None after a pause without one."""
        changes: asyncio.Queue[BackendHealth] = asyncio.Queue()
        for health in self.suspects():
            changes.put_nowait(health)
        self._watchers.add(changes)
        try:
            while True:
                change = None
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_seconds):  # wait_for may swallow a cancellation
                        change = await changes.get()
                yield change
        finally:
            self._watchers.discard(changes)

    def _report(self, past: BackendPast) -> None:
        """Report the health of `past` to the watchers, unless it was forgotten meanwhile."""
        if self._pasts.get(past.health.uid) is past:
            for changes in self._watchers:
                changes.put_nowait(past.health)

    def _check_pauses(self) -> None:
        """Check the pauses of all backends that answer, and again in a second while there are such."""
        self._check_timer = None
        busy = [past for past in self._pasts.values() if past.under_way]
        for past in busy:
            past.check_pauses(time.monotonic())
        if busy:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_pauses)
