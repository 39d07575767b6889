"""The retries of the queue's writes: a unit whose write failed is decided again after a pause that grows.

Other units are admitted meanwhile. A cell that the API server refused for a unit is tried last.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import structlog

from kube.backoff import backoff_seconds
from kube.errors import ApiError, Conflict, NotFound, Unreachable

FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 60.0
"""Longest pause before a write that failed is tried again."""

log = structlog.get_logger()


class WriteFailures(NamedTuple):
    """The failures in a row to write one unit."""

    tries: int = 0
    retry_at: float = 0.0
    """When to try again, on the clock of the event loop."""
    refused_by: frozenset[str] = frozenset()
    """Cells that the API server refused since all of them had refused."""
    error: str = ""
    """The last failure."""


_NO_FAILURE: Final = WriteFailures()


class WriteRetries:
    """The failures of all units, by uid; `wake` is called when a pause is over."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Start without failures."""
        self._wake = wake
        self._failures: dict[str, WriteFailures] = {}

    def is_paused(self, uid: str, now: float) -> bool:
        """Return whether the pause after a failed write of a unit still lasts."""
        return self._failures.get(uid, _NO_FAILURE).retry_at > now

    def refused_by(self, uid: str) -> frozenset[str]:
        """Return the cells that are to be tried last for a unit."""
        return self._failures.get(uid, _NO_FAILURE).refused_by

    def list_errors(self) -> dict[str, str]:
        """Return the last failure of each unit that has one, by uid."""
        return {uid: failed.error for uid, failed in self._failures.items() if failed.error}

    def pause(self, uid: str, seconds: float) -> None:
        """Make no write for a unit for some seconds, then call `wake`."""
        loop = asyncio.get_running_loop()
        self._failures[uid] = WriteFailures(retry_at=loop.time() + seconds)
        loop.call_later(seconds, self._wake)

    def note_failure(
        self, uid: str, cell: str, error: ApiError | Unreachable, longest_seconds: float = LAST_RETRY_SECONDS
    ) -> int:
        """Note a failure, wake after a pause, and return the number of failures in a row.

        Args:
            uid: the unit.
            cell: the cell that it was to get; empty if the write was for none.
            error: the failure.
            longest_seconds: the longest pause.
        """
        # 1. Note it. The pause grows with the number of failures in a row.
        loop, last = asyncio.get_running_loop(), self._failures.get(uid, _NO_FAILURE)
        tries = last.tries + 1
        seconds = backoff_seconds(tries, first=FIRST_RETRY_SECONDS, most=longest_seconds)
        refused = last.refused_by
        if cell:
            # If every cell that fits has refused, a new round of all of them begins.
            refused = frozenset({cell}) if cell in refused else refused | {cell}
        self._failures[uid] = WriteFailures(tries, retry_at=loop.time() + seconds, refused_by=refused, error=str(error))

        # 2. Wake after the pause, and log: a conflict is no cause for a warning.
        loop.call_later(seconds, self._wake)
        log.log(
            logging.INFO if isinstance(error, Conflict | NotFound) else logging.WARNING,
            "queue_write_failed",
            unit=uid,
            cell=cell,
            error=str(error),
            retry_seconds=round(seconds, 1),
        )
        return tries

    def forget(self, uid: str) -> None:
        """Forget the failures of a unit: a write of it succeeded."""
        self._failures.pop(uid, None)

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget the failures of all other units."""
        self._failures = {uid: failed for uid, failed in self._failures.items() if uid in uids}
