"""The only writer of the ConfigMaps with measurements: those of Jobs, and those that hosts report."""

import asyncio

import structlog

from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.plan import FIELD_MANAGER, Leading
from crds.meta import CONTROLLER_NAMESPACE
from fitness.performance import MeasuredPerformance
from fitness.performance_store import RecordKey, build_config_map, name_config_map, put_host_record, put_record
from kube.errors import Unreachable
from kube.resources import CONFIG_MAPS
from kube.store import Store

log = structlog.get_logger()


class RecordWriter:
    """Writes measurements, one after the other: each write states all measurements of a model.

    Args:
        store: the watch cache.
        kind: the ConfigMaps with measurements.
    """

    def __init__(self, store: Store, kind: OptionalKind) -> None:
        self._store, self._kind = store, kind
        self._writing = asyncio.Lock()

    async def write(self, leading: Leading, model_hash: str, key: RecordKey, record: MeasuredPerformance) -> None:
        """Store a measurement, unless it is stored. Raises as `Client`."""
        async with self._writing:
            if not self._kind.exists:
                # Without those that are stored, a write would replace them.
                raise Unreachable(f"measurements in ConfigMaps of {CONTROLLER_NAMESPACE} are not listed yet")
            name = name_config_map(model_hash)
            stored_map = self._store.get(CONFIG_MAPS, name, CONTROLLER_NAMESPACE)
            if stored_map is None:
                # One without its label, or of another leader, is not in this watch cache: its measurements stay, too.
                selector = f"metadata.name={name}"
                listed = await leading.client.list(CONFIG_MAPS, CONTROLLER_NAMESPACE, field_selector=selector)
                stored_map = next(iter(listed.items), None)
            before: dict[str, str] = (stored_map or {}).get("data") or {}
            put = put_host_record if record.source == "host" else put_record
            stored = put(before, key, record)
            if stored.dropped:
                log.warning("measurements_dropped", config_map=name, keys=stored.dropped)
            if stored.data == before:
                return
            obj = build_config_map(model_hash, stored.data)
            if stored_map is not None:
                # Another leader may have written a measurement that this watch cache has not yet.
                obj["metadata"]["resourceVersion"] = stored_map["metadata"]["resourceVersion"]
            leading.require_leadership()
            answer = await leading.client.apply(CONFIG_MAPS, obj, field_manager=FIELD_MANAGER)
            self._store.put(CONFIG_MAPS, answer)
        log.info(
            "speed_measured",
            model=record.model,
            model_hash=model_hash,
            **key._asdict(),
            tokens_per_second=record.tokens_per_second,
        )
