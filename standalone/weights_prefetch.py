"""Fetch the weights of models on demand ahead, so that their first requests wait for a load and for no download.

One model is fetched at a time, and what was fetched stays locked, so that it is not deleted to make room for others.
A model that is loaded meanwhile fetches for itself: the store fetches nothing twice.
"""

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from artifacts.errors import ArtifactError
from artifacts.source import scheme_of
from artifacts.transfer_rate import TransferMeter
from gateway.change_counter import ChangeCounter
from kube.backoff import backoff_seconds
from metal_agent.assignments import Assignment
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.weights import PinnedWeights

_FIRST_RETRY_SECONDS: Final = 5.0
_LAST_RETRY_SECONDS: Final = 300.0

log = structlog.get_logger()


class WeightsPrefetch:
    """The weights of the assignments that `list_sleeping` returns, by uid; `changes` counts when they may be others.

    Weights that a daemon fetches for itself are not fetched.
    """

    def __init__(
        self, context: RunnerContext, list_sleeping: Callable[[], Mapping[str, Assignment]], changes: ChangeCounter
    ) -> None:
        """Fetch nothing before `run`."""
        self._context, self._list_sleeping, self._changes = context, list_sleeping, changes
        self._held: dict[str, PinnedWeights] = {}
        self._retry_at: dict[str, float] = {}
        """The time from which on a fetch that failed is tried again, by uid."""
        self._failures: Counter[str] = Counter()
        """Failures in a row, by uid."""
        self.transfers: dict[str, TransferMeter] = {}
        """Measures of the weights that are being fetched, by uid."""
        self.problems: dict[str, str] = {}
        """The reason why weights could not be fetched, by uid."""

    def has(self, assignment: Assignment) -> bool:
        """Return whether the weights of an assignment are there, or are fetched by a daemon when it is loaded."""
        return assignment.uid in self._held or _is_of_daemon(assignment)

    async def run(self) -> None:
        """Fetch what is missing, one after the other, until cancelled; then release all locks."""
        try:
            while True:
                seen_changes = self._changes.count
                sleeping = {uid: one for uid, one in self._list_sleeping().items() if not _is_of_daemon(one)}
                self._forget_others(sleeping)
                missing = [uid for uid in sleeping if uid not in self._held]
                due = [uid for uid in missing if self._retry_at.get(uid, 0.0) <= time.monotonic()]
                if due:
                    await self._fetch(sleeping[due[0]])
                    continue
                next_at = min((self._retry_at[uid] for uid in missing), default=None)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if next_at is None else max(0.0, next_at - time.monotonic())):
                        await self._changes.wait_past(seen_changes)
        finally:
            self._forget_others({})

    async def _fetch(self, assignment: Assignment) -> None:
        """Fetch the weights of one assignment, and lock them; note a failure, and when it is tried again."""
        uid, spec = assignment.uid, assignment.spec
        names = [spec.source_secret, *(artifact.source_secret for artifact in spec.further_artifacts)]
        tokens = [self._context.secret(assignment.namespace, name) if name else None for name in names]
        try:
            self._held[uid] = await self._context.weights.fetch(
                assignment.namespace, spec, tokens, functools.partial(self._note_progress, uid)
            )
        except Exception as error:  # the other models are fetched all the same
            expected = isinstance(error, ArtifactError | OSError)
            log.warning("prefetch_failed", service=spec.service_name, error=str(error), exc_info=not expected)
            self._failures[uid] += 1
            pause = backoff_seconds(self._failures[uid], first=_FIRST_RETRY_SECONDS, most=_LAST_RETRY_SECONDS)
            self._retry_at[uid] = time.monotonic() + pause
            self.problems[uid] = f"its weights cannot be fetched: {error}; next try in {pause:.0f} s"
        else:
            self.problems.pop(uid, None)
        finally:
            self.transfers.pop(uid, None)
            self._changes.note()

    def _note_progress(self, uid: str, fetched_bytes: int, total_bytes: int | None) -> None:
        """Note how much of the weights has come. That some has is a change; how much is read when it is shown."""
        is_first = uid not in self.transfers
        self.transfers.setdefault(uid, TransferMeter()).note(fetched_bytes, total_bytes, time.monotonic())
        if is_first:
            self._changes.note()

    def _forget_others(self, uids: Collection[str]) -> None:
        """Unlock the weights of all but these assignments, and forget their failures."""
        for uid in [uid for uid in self._held if uid not in uids]:
            self._held.pop(uid).release()
        for noted in (self._retry_at, self._failures, self.problems):
            for uid in [uid for uid in noted if uid not in uids]:
                del noted[uid]


def _is_of_daemon(assignment: Assignment) -> bool:
    """Return whether a daemon fetches the weights of an assignment for itself."""
    return scheme_of(assignment.spec.artifact.source) == "ollama"
