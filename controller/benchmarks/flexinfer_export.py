"""The export of measured speeds to programs of FlexInfer: one flat ConfigMap, written a while after a change.

It has what everybody may believe: what Jobs measured in the namespace of the controller, and what an administrator
states for all. Those programs know no namespaces. It is written while the controller leads and runs with
--flexinfer-export.
"""

import asyncio
from typing import Final

import structlog

from controller.reconcile.plan import FIELD_MANAGER, Leading
from controller.services.performance_source import PerformanceSource
from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from fitness.performance_store import FLEXINFER_EXPORT, build_flexinfer_export
from kube.errors import ApiError, Unreachable
from kube.resources import CONFIG_MAPS

PAUSE_SECONDS: Final = 30.0

log = structlog.get_logger()


class FlexInferExport:
    """The export, as it was written last."""

    def __init__(self, measured: PerformanceSource) -> None:
        self._measured = measured
        self._changed = asyncio.Event()
        measured.table.subscribe(lambda _model_hash: self._changed.set())

    async def run(self, leading: Leading) -> None:
        """Write the export for ever: after each change of the measurements, if it differs from what was written last.

        A failed write is repeated after the pause. Measurements that do not fit into the ConfigMap are logged.
        """
        written: dict[str, str] | None = None  # None: this leader has not written it yet
        self._changed.set()  # so the first round writes it
        while True:
            await self._changed.wait()
            self._changed.clear()

            # made.data: the data of the ConfigMap. made.dropped: the measurements that do not fit into it.
            made = build_flexinfer_export(self._measured.table)
            if made.data != written:
                try:
                    await _write(leading, made.data)
                    written = made.data
                except (ApiError, Unreachable) as error:
                    log.warning("export_failed", config_map=FLEXINFER_EXPORT, error=str(error))
                    self._changed.set()  # so the next round repeats it
                if made.dropped:
                    log.warning("export_shortened", config_map=FLEXINFER_EXPORT, missing=len(made.dropped))

            # Changes within this pause are written together.
            await asyncio.sleep(PAUSE_SECONDS)


async def _write(leading: Leading, data: dict[str, str]) -> None:
    """Write the data of the exported ConfigMap. Raises as `Client`, or LeadershipLost."""
    labels = {LABEL_MANAGED_BY: MANAGED_BY}
    metadata = {"name": FLEXINFER_EXPORT, "namespace": CONTROLLER_NAMESPACE, "labels": labels}
    leading.require_leadership()
    await leading.client.apply(CONFIG_MAPS, {"metadata": metadata, "data": data}, field_manager=FIELD_MANAGER)
