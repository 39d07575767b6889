"""The stored measurements of speed: the only writer of their ConfigMaps, and which services a change concerns.

A service asks for the speed of its model on the hardware of its replicas, and is reconciled again when a measurement of
that model changes. What is damaged in a ConfigMap is logged once for each version of it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import structlog

from controller.reconcile.indexes import discard_from_index
from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.plan import FIELD_MANAGER, Leading
from crds.inferenceservice import ServicePerformance
from crds.meta import CONTROLLER_NAMESPACE
from crds.rate import format_rate
from fitness.performance import MeasuredPerformance
from fitness.performance_store import (
    SELECTOR,
    PerformanceTable,
    RecordKey,
    build_config_map,
    name_config_map,
    put_host_record,
    put_record,
)
from kube.errors import Unreachable
from kube.resources import CONFIG_MAPS, ObjectKey
from kube.store import Store

log = structlog.get_logger()


class BenchmarkProblem(NamedTuple):
    """Why the speed of a service could not be measured, for its condition."""

    reason: str
    message: str


class PerformanceSource:
    """The stored measurements.

    Args:
        store: the watch cache.
        table: the measurements of the store.
        enqueue: called with each service that a change concerns.
    """

    def __init__(self, store: Store, table: PerformanceTable, enqueue: Callable[[ObjectKey], None]) -> None:
        self.table = table
        self.kind = OptionalKind(CONFIG_MAPS, SELECTOR, (CONTROLLER_NAMESPACE,))
        """The ConfigMaps, which a controller of some namespaces may not read."""
        self._store = store
        self._writing = asyncio.Lock()
        """Held during a write, so that one write does not remove what another one adds."""
        self._enqueue = enqueue
        self._model_hashes: dict[ObjectKey, str] = {}
        """The hash of the model of each service that shows a speed, or will."""
        self._services_by_hash: defaultdict[str, set[ObjectKey]] = defaultdict(set)
        """The same services by that hash, so that a measurement is not compared with all of them."""
        self._problems: Mapping[ObjectKey, BenchmarkProblem] = {}
        """Why the last benchmark of a service has measured nothing."""
        table.subscribe(self._enqueue_services_of)

    async def write(self, leading: Leading, model_hash: str, key: RecordKey, record: MeasuredPerformance) -> None:
        """Store a measurement in the ConfigMap of its model, unless it is stored already.

        Each write states all measurements of a model, so only one write goes on at a time. Raises as `Client`.
        """
        async with self._writing:
            if not self.kind.exists:  # the stored ConfigMaps are not known yet, or cannot be read
                # A write that leaves out those that are stored would remove them.
                raise Unreachable(f"measurements in ConfigMaps of {CONTROLLER_NAMESPACE} are not listed yet")

            # 1. The ConfigMap as it is stored, if it exists.
            name = name_config_map(model_hash)
            stored_map = self._store.get(CONFIG_MAPS, name, CONTROLLER_NAMESPACE)
            if stored_map is None:
                # The ConfigMap may exist without its label, or be too new for this watch cache: what it has stays.
                selector = f"metadata.name={name}"
                listed = await leading.client.list(CONFIG_MAPS, CONTROLLER_NAMESPACE, field_selector=selector)
                stored_map = next(iter(listed.items), None)

            # 2. Add the measurement. Without room for it, it or others are dropped.
            before: dict[str, str] = (stored_map or {}).get("data") or {}
            add_record = put_host_record if record.source == "host" else put_record
            stored = add_record(before, key, record)
            if stored.dropped:
                log.warning("measurements_dropped", config_map=name, keys=stored.dropped)
            if stored.data == before:
                return

            # 3. Write all measurements of the model.
            obj = build_config_map(model_hash, stored.data)
            if stored_map is not None:
                # Another leader may have written a measurement that this watch cache has not yet: then the write fails.
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

    def find_performance(
        self, key: ObjectKey, model_hash: str, device_classes: Iterable[str]
    ) -> ServicePerformance | None:
        """Return the measured speed of a model on the slowest of these device classes; None: it was not measured.

        The service is enqueued from now on when a measurement of the model changes.
        """
        if self._model_hashes.get(key) != model_hash:
            self.forget(key)
            self._model_hashes[key] = model_hash
            self._services_by_hash[model_hash].add(key)
        # By device class, such as nvidia-l4x2: the measurements that the namespace of the service may see.
        records = self.table.list_classes(model_hash, key.namespace)
        measured_classes = [name for name in sorted(device_classes) if name in records]
        if not measured_classes:
            return None
        slowest = min(measured_classes, key=lambda name: records[name].tokens_per_second)
        return describe_performance(records[slowest], model_hash, slowest)

    def find_problem(self, key: ObjectKey) -> BenchmarkProblem | None:
        """Return why the last benchmark of a service has measured nothing; None if it has, or there was none."""
        return self._problems.get(key)

    def report_problems(self, problems: Mapping[ObjectKey, BenchmarkProblem]) -> None:
        """Replace the problems of all services, and enqueue each service whose problem has changed."""
        last, self._problems = self._problems, problems
        for key in sorted(last.keys() | problems.keys()):
            if last.get(key) != problems.get(key):
                self._enqueue(key)

    def forget(self, key: ObjectKey) -> None:
        """Enqueue a service no more when measurements change: it is gone, or shows no speed."""
        model_hash = self._model_hashes.pop(key, None)
        if model_hash is not None:
            discard_from_index(self._services_by_hash, model_hash, key)

    def _enqueue_services_of(self, model_hash: str) -> None:
        """Enqueue the services that show the speed of a model, whose measurements have changed."""
        for key in sorted(self._services_by_hash.get(model_hash, ())):
            self._enqueue(key)


def describe_performance(record: MeasuredPerformance, model_hash: str, device_class: str) -> ServicePerformance:
    """Return a measurement as the status of a service shows it."""
    prompt, first_ms = record.prompt_tokens_per_second, record.time_to_first_token_ms
    return ServicePerformance(
        tokens_per_second=format_rate(record.tokens_per_second),
        prompt_tokens_per_second=format_rate(prompt) if prompt is not None else "",
        time_to_first_token_ms=round(first_ms) if first_ms is not None else None,
        source=record.source,
        device_class=device_class,
        model_hash=model_hash,
        measured_at=record.measured_at,
    )
