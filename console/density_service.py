"""The density API without HTTP: it takes snapshots, and computes answers in a thread, one at a time.

Pairs of models and nodes are many: the event loop goes on meanwhile, and a flood of questions is answered in its turn.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from console.density_snapshot import CONTEXT_LENGTH, DensitySnapshot, SnapshotSource
from console.fit_table import FitTable
from controller.placement.cluster_view import ClusterView
from fitness.correction_table import CorrectionGroup

T = TypeVar("T")


log = structlog.get_logger()


class DensityService:
    """Computes by the newest snapshot.

    Args:
        view: the cluster.
    """

    def __init__(self, view: ClusterView) -> None:
        """Answer by `view`, and note each change of its measurements, so that no fit that is cached outlives them."""
        self.view = view
        self.table = FitTable(CONTEXT_LENGTH, view.measured)
        """The cache of the fits of models on devices."""
        self._source = SnapshotSource(view)
        self._compute_lock = asyncio.Lock()
        self._measured_hashes: set[str] = set()
        """Hashes of models whose measurements have changed since the last answer. Their fits are dropped before the
        next one, not at once, since a thread may be computing an answer by them."""
        self._has_new_corrections = False
        """True if the corrections, by which measurements of models improve the estimates of others, have changed."""
        view.measured.subscribe(self._measured_hashes.add)
        view.measured.corrections.subscribe(self._take_corrections)

    def take_snapshot(self) -> DensitySnapshot:
        """Return the cluster as it is now."""
        return self._source.take_snapshot()

    def _take_corrections(self, _groups: frozenset[CorrectionGroup]) -> None:
        self._has_new_corrections = True

    async def prepare(self) -> None:
        """Rank all models on all cells once the cluster is known, so that the first question waits for no estimates."""
        await self.view.wait_until_complete()
        try:
            # The table caches the rankings, so the result is not needed here.
            await self.compute(_rank_everywhere)
        except Exception:
            # As for a question that fails: the other questions are still answered.
            log.exception("fits_not_prepared")

    async def compute(self, answer: Callable[[DensitySnapshot, FitTable], T]) -> T:
        """Return what `answer`, called in a thread, returns about the cluster as it is now; one call runs at a time.

        Before the call, the cached fits of models whose measurements have changed since the last one are dropped, and
        all fits with a corrected speed if a correction has changed.
        """
        # The lock also keeps the caches of the table from being changed while a thread uses them.
        async with self._compute_lock:
            snapshot = self.take_snapshot()

            # _measured_hashes: identities of models with new measurements; `model.hashes` has one for each engine
            if changed_hashes := self._measured_hashes:
                changed = (model for model in snapshot.models if not changed_hashes.isdisjoint(model.hashes.values()))
                self.table.forget([model.key for model in changed])
                changed_hashes.clear()

            # A correction, by which measurements of models improve the estimates of others, has changed.
            if self._has_new_corrections:
                self.table.forget_corrected()
                self._has_new_corrections = False

            return await asyncio.to_thread(answer, snapshot, self.table)


def _rank_everywhere(snapshot: DensitySnapshot, table: FitTable) -> None:
    for profile in snapshot.profiles:
        table.rank_models(snapshot.models, profile)
