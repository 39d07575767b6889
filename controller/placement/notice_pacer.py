"""The pace at which services are told that their place in the queue has changed.

With each admission the positions of all that wait behind it move: to write them all at once, again and again, would
keep the API server busy with numbers. So each service is told at most once a second, and of mere moves a few services a
second in all, those first that have waited longest to be told.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kube.resources import ObjectKey

SERVICE_SECONDS: Final = 1.0
"""Least time between two notices about one service."""
MOVE_SECONDS: Final = 0.1
"""Least time between two notices about mere moves, of whatever service."""


class NoticePacer:
    """Notices that are due, and a timer for the next one; runs in an event loop."""

    def __init__(self, notify: Callable[[ObjectKey], None]) -> None:
        self._notify = notify
        self._pending: dict[ObjectKey, bool] = {}
        """Services to tell something, in this order; True if it is urgent."""
        self._told_at: dict[ObjectKey, float] = {}
        """When each service was told something that was told within the last second."""
        self._next_move_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, service: ObjectKey, *, is_urgent: bool) -> None:
        """Tell a service something as soon as that may be; `flush` tells what may be told now."""
        self._pending[service] = is_urgent or self._pending.get(service, False)

    def clear(self) -> None:
        """Forget all that is pending."""
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self) -> None:
        """Tell what may be told now, and set a timer for the rest."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._told_at = {key: at for key, at in self._told_at.items() if now - at < SERVICE_SECONDS}
        next_at: float | None = None
        for service, is_urgent in list(self._pending.items()):
            told_at = self._told_at.get(service)
            due_at = now if told_at is None else told_at + SERVICE_SECONDS
            if not is_urgent:
                due_at = max(due_at, self._next_move_at)
            if due_at > now:
                next_at = due_at if next_at is None else min(next_at, due_at)
                continue
            del self._pending[service]
            self._told_at[service] = now
            if not is_urgent:
                self._next_move_at = now + MOVE_SECONDS
            self._notify(service)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_at is not None:
            self._timer = loop.call_at(next_at, self.flush)
