"""The density API without HTTP: it takes snapshots, and computes answers in a thread, one at a time.

Pairs of models and nodes are many: the event loop goes on meanwhile, and a flood of questions is answered in its turn.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from console.density_feed import CONTEXT_LENGTH, DensityFeed
from console.density_snapshot import DensitySnapshot
from console.fit_table import FitTable

T = TypeVar("T")


log = structlog.get_logger()


class DensityService:
    """Computes by the newest snapshot.

    Args:
        feed: the cluster.
    """

    def __init__(self, feed: DensityFeed) -> None:
        self.feed = feed
        self.table = FitTable(CONTEXT_LENGTH, feed.measured)
        self._turn = asyncio.Lock()

    async def prepare(self) -> None:
        """Rank all models on all cells once the cluster is known, so that the first question waits for no estimates."""
        await self.feed.wait_until_complete()
        try:
            await self.compute(_rank_everywhere)
        except Exception:
            # As for a question that fails: the other questions are still answered.
            log.exception("fits_not_prepared")

    async def compute(self, answer: Callable[[DensitySnapshot, FitTable], T]) -> T:
        """Return what `answer` returns about the cluster as it is now."""
        async with self._turn:
            snapshot = self.feed.take_snapshot()
            if changed := self.feed.take_changed_hashes():
                touched = (each for each in snapshot.models if not changed.isdisjoint(each.hashes.values()))
                self.table.forget([each.key for each in touched])
            if self.feed.take_corrections():
                self.table.forget_corrected()
            return await asyncio.to_thread(answer, snapshot, self.table)


def _rank_everywhere(snapshot: DensitySnapshot, table: FitTable) -> None:
    for profile in snapshot.profiles:
        table.rank_models(snapshot.models, profile)
