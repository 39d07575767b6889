"""The measurements that agents of hosts report in the status of their processes, copied to where those of Jobs are.

A host is not trusted. Its measurement counts in the namespace of the process alone, for the Model that the process
serves, on the device class of a host: none of a node has such a name. Numbers and times are bounded, a process is
looked at once a minute at most, and a namespace has the measurements of 16 classes of hosts of each model.
"""

import functools
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.reconcile.plan import Leading, Snapshot
from controller.services.device_classes import find_host_class
from controller.services.performance_source import PerformanceSource
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from crds.model import Model
from crds.performance import ProcessPerformance
from crds.rate import MOST_REPORTED
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import RecordKey
from kube.client import Obj
from kube.queue import WorkQueue, run_workers
from kube.resources import METAL_HOSTS, METAL_PROCESSES, MODELS, ObjectKey, Resource, object_key
from kube.store import Store
from kube.time import rfc3339

PAUSE_SECONDS: Final = 60.0
"""Least time between two looks at one process."""
AGAIN_SECONDS: Final = 900.0
"""Time after which a measurement that was refused is looked at again: the clock of its host may have been set."""
MOST_AHEAD: Final = timedelta(minutes=10)
"""The most by which the clock of a host may be ahead."""
EARLIEST: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""No host measured before. Times are compared as text, and that of an earlier year may have fewer digits."""
_WORKERS: Final = 2
_WRITE_SECONDS: Final = 30.0

log = structlog.get_logger()


class HostResult(NamedTuple):
    """A measurement of a host, and where it is stored."""

    model_hash: str
    key: RecordKey
    record: MeasuredPerformance


def read_host_result(process: MetalProcess, host: MetalHost, model: Model, now: datetime) -> HostResult | str:
    """Return the measurement that a process reports, or the reason to refuse it.

    Args:
        process: a process whose status has a measurement.
        host: the host that it is bound to.
        model: the Model that it names.
        now: the time.
    """
    # 1. The process must serve one Model alone, without further artifacts such as a draft or an adapter, on this host.
    spec, performance = process.spec, process.status.performance
    if performance is None or spec.mode != "chat" or spec.further_artifacts:
        return "it has no measurement of a model alone"
    if spec.host_name != host.metadata.name:
        return "it is bound to another host"

    # 2. It must serve the revision and checksum that the Model has now.
    artifact = spec.artifact
    current = (model.status.revision, model.spec.sha256 or model.status.sha256)
    if artifact.source != model.spec.source or (artifact.revision, artifact.sha256) != current:
        return "it serves an earlier state of its Model"

    # 3. The host must have a device class, and its numbers must be plausible.
    device_class = find_host_class(host)
    if device_class is None or not host.status.memory_bytes:
        return "its host does not say which chip and how much memory it has"
    record = _read_record(performance, now)
    if isinstance(record, str):  # the reason to refuse it
        return record

    # 4. Names are taken from the objects, not from the report.
    named = msgspec.structs.replace(
        record, model=model.metadata.name, runtime=spec.runtime, node=host.metadata.name, source="host"
    )
    key = RecordKey(device_class, process.metadata.namespace)
    return HostResult(hash_model(model, spec.runtime, spec), key, named)


def _read_record(performance: ProcessPerformance, now: datetime) -> MeasuredPerformance | str:
    """Return the numbers of a measurement, or the reason to refuse one of them."""
    # 1. The time, by the clock of the host.
    try:
        measured_at = datetime.fromisoformat(performance.measured_at)
        is_future, is_past = measured_at > now + MOST_AHEAD, measured_at < EARLIEST
    except (ValueError, TypeError, OverflowError):  # TypeError: a time without a zone
        return f"measuredAt {performance.measured_at!r} is no time with a zone"
    if is_future or is_past:
        when = "in the future" if is_future else f"before {EARLIEST.year}"
        return f"measuredAt {performance.measured_at!r} is {when}: set the clock of the host"

    # 2. The speeds, in tokens per second; None: the host does not report it.
    rates = {
        "tokensPerSecond": _read_number(performance.tokens_per_second),
        "promptTokensPerSecond": _read_number(performance.prompt_tokens_per_second),
    }
    for name, rate in rates.items():
        if rate is not None and not 0 < rate <= MOST_REPORTED:
            return f"{name} {rate:g} is not within 0 and {MOST_REPORTED:g}"

    # 3. All that is reported, as a record: `convert` checks the bounds of its fields.
    fields = rates | {
        "timeToFirstTokenMs": performance.time_to_first_token_ms,
        "interTokenLatencyMs": _read_number(performance.inter_token_latency_ms),
        "loadSeconds": performance.load_seconds,
    }
    reported = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert({**reported, "measuredAt": rfc3339(measured_at)}, MeasuredPerformance, strict=False)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        return f"it is no measurement ({error})"


def _read_number(text: str) -> float | None:
    return float(text) if text else None


class HostResults:
    """The copies of measurements of hosts, while this replica leads.

    Args:
        store: the watch cache.
        measured: the stored measurements.
    """

    def __init__(self, store: Store, measured: PerformanceSource) -> None:
        self._store, self._measured = store, measured
        self._queue: WorkQueue[ObjectKey] | None = None
        """None: this replica does not lead."""
        store.subscribe(self._take_change)

    async def run(self, leading: Leading) -> None:
        """Copy the measurements of hosts while this replica leads."""
        self._queue = due = WorkQueue[ObjectKey](PAUSE_SECONDS)
        try:
            for process in self._store.list(METAL_PROCESSES):
                self._take_change(METAL_PROCESSES, None, process)
            await run_workers(due, functools.partial(self._store_result, leading), _WORKERS, _WRITE_SECONDS)
        finally:
            self._queue = None

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Enqueue a process that reports another measurement than before, while this replica leads."""
        if resource != METAL_PROCESSES or self._queue is None or new is None:
            return
        reported = _read_reported(new)
        if reported is not None and (old is None or reported != _read_reported(old)):
            self._queue.add(object_key(new))

    async def _store_result(self, leading: Leading, key: ObjectKey) -> float | None:
        """Store the measurement of a process, unless a later one is known. Raises as `Client`.

        Returns the seconds after which to look again: while measurements cannot be stored in this cluster, or if this
        one is refused. None: it is stored, it is no later than the stored one, or there is none.
        """
        # `exists` is False until the ConfigMaps with the stored measurements can be read.
        if not self._measured.kind.exists:
            return PAUSE_SECONDS

        result = self._read_result(key)
        if result is None:
            return None
        if isinstance(result, str):  # the reason to refuse it
            log.info("host_measurement_refused", process=str(key), problem=result)
            return AGAIN_SECONDS

        # Of two hosts of one class, the later measurement counts. Times are text that sorts by time.
        performance = self._measured.table.find_exact(result.model_hash, result.key)
        if performance is None or performance.measured_at < result.record.measured_at:
            await self._measured.write(leading, result.model_hash, result.key, result.record)
        return None

    def _read_result(self, key: ObjectKey) -> HostResult | str | None:
        """Return the measurement of a process, or the reason to refuse it; None: it has none, or is gone."""
        snapshot = Snapshot(self._store, datetime.now(UTC))
        process = snapshot.read(METAL_PROCESSES, key, MetalProcess)
        if process is None or process.metadata.deletion_timestamp is not None or process.status.performance is None:
            return None
        host = snapshot.read(METAL_HOSTS, ObjectKey("", process.spec.host_name or ""), MetalHost)
        model = snapshot.read(MODELS, ObjectKey(key.namespace, process.spec.model_name), Model)
        if host is None or model is None:
            return "its host or its Model is not there"
        return read_host_result(process, host, model, snapshot.now)


def _read_reported(process: Obj) -> object:
    return (process.get("status") or {}).get("performance")
