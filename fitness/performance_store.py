"""The measurements of models as they are kept in ConfigMaps, and the table of them in memory.

One ConfigMap has the measurements of one model hash, with a key for each device class, so that an object stays small
and a change costs what one model costs. A measurement that was made in a namespace of tenants is a claim of theirs: its
key also has the namespace, and it counts in that namespace alone. A key without one counts for all.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from crds.meta import CONTROLLER_NAMESPACE, GROUP, LABEL_MANAGED_BY, MANAGED_BY
from fitness.correction_table import CorrectionTable, MeasuredRatio
from fitness.corrections import SpeedRatio
from fitness.performance import MeasuredPerformance
from kube.client import Obj
from kube.resources import CONFIG_MAPS, Resource
from kube.store import Store

log = structlog.get_logger()

LABEL_BENCHMARK: Final = f"{GROUP}/benchmark"
LABEL_MODEL_HASH: Final = f"{GROUP}/model-hash"
SELECTOR: Final = f"{LABEL_BENCHMARK}=true"
FLEXINFER_EXPORT: Final = "flexinfer-benchmarks"
"""Name of the ConfigMap that programs of FlexInfer read."""
MOST_BYTES: Final = 900_000
"""Size of the keys and values of one ConfigMap; the API server takes a MiB of the whole object."""
MOST_HOST_CLASSES: Final = 16
"""Device classes of hosts of which a namespace has a measurement of one model."""
_MOST_RECORD_BYTES: Final = 16_384
_MOST_MESSAGE: Final = 500
_PREFIX: Final = "bench-"
_SEPARATOR: Final = "_"
"""Neither a device class nor a namespace has one."""
_HASH: Final = re.compile(r"[0-9a-f]{8,64}")
_KEY: Final = re.compile(r"(?P<device_class>[a-z0-9][-.a-z0-9]{0,127})(_(?P<namespace>[a-z0-9][-a-z0-9]{0,62}))?")


class RecordKey(NamedTuple):
    """The key of a measurement within those of a model hash."""

    device_class: str
    namespace: str = ""
    """The only namespace in which it counts; empty: it counts in all."""

    def encode(self) -> str:
        """Return the key in the data of the ConfigMap."""
        return f"{self.device_class}{_SEPARATOR}{self.namespace}" if self.namespace else self.device_class


class DamagedRecord(NamedTuple):
    """A ConfigMap, or a key of one, that is no measurement."""

    config_map: str
    key: str
    """Empty: the whole object."""
    problem: str

    def __str__(self) -> str:
        """Return the place and the problem, with the way out."""
        key = f", key {self.key[:200]!r}" if self.key else ""
        place = f"ConfigMap {CONTROLLER_NAMESPACE}/{self.config_map}{key}"
        return f"{place}: {self.problem}: remove it, and the model is measured again"


class ModelRecords(NamedTuple):
    """The measurements of one model hash."""

    records: Mapping[RecordKey, MeasuredPerformance] = {}
    damaged: tuple[DamagedRecord, ...] = ()


class StoredData(NamedTuple):
    """The data of a ConfigMap after a change, and the keys that had no room in it any more."""

    data: dict[str, str]
    dropped: tuple[str, ...] = ()


def name_config_map(model_hash: str) -> str:
    """Return the name of the ConfigMap with the measurements of a model."""
    return f"{_PREFIX}{model_hash}"


def find_model_hash(config_map: Obj) -> str:
    """Return the model hash of a ConfigMap by its label and name.

    Empty: it is not labelled as one of ours, or label and name do not agree.
    """
    metadata = config_map["metadata"]
    labels = metadata.get("labels") or {}
    model_hash: str = labels.get(LABEL_MODEL_HASH, "")
    is_ours = labels.get(LABEL_BENCHMARK) == "true" and _HASH.fullmatch(model_hash) is not None
    return model_hash if is_ours and metadata["name"] == name_config_map(model_hash) else ""


def build_config_map(model_hash: str, data: Mapping[str, str]) -> Obj:
    """Return the ConfigMap with the measurements of a model."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name_config_map(model_hash),
            "namespace": CONTROLLER_NAMESPACE,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY, LABEL_BENCHMARK: "true", LABEL_MODEL_HASH: model_hash},
        },
        "data": dict(data),
    }


def encode_record(record: MeasuredPerformance) -> str:
    """Return the value of a measurement in the data of a ConfigMap."""
    return msgspec.json.encode(record, order="deterministic").decode()


def decode_records(config_map: Obj) -> ModelRecords:
    """Return the measurements of a ConfigMap; what is damaged is skipped and named."""
    name: str = config_map["metadata"]["name"]
    records, damaged = dict[RecordKey, MeasuredPerformance](), list[DamagedRecord]()
    for key, value in (config_map.get("data") or {}).items():
        try:
            record_key, record = _decode_record(key, value)
        except ValueError as error:
            damaged.append(DamagedRecord(name, key, str(error)))
        else:
            records[record_key] = record
    return ModelRecords(records, tuple(damaged))


def _decode_record(key: str, value: object) -> tuple[RecordKey, MeasuredPerformance]:
    """Return a measurement with its key. Raises ValueError: key or value is invalid; the message says how."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError("the key is no device class")
    if not isinstance(value, str) or len(value) > _MOST_RECORD_BYTES:
        raise ValueError(f"the value is no text of at most {_MOST_RECORD_BYTES} characters")
    try:
        record = msgspec.json.decode(value, type=MeasuredPerformance)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the value is no measurement ({error})") from error
    return RecordKey(match["device_class"], match["namespace"] or ""), record


def put_record(
    data: Mapping[str, str], key: RecordKey, record: MeasuredPerformance, most_bytes: int = MOST_BYTES
) -> StoredData:
    """Return the data of a ConfigMap with this measurement; without room, damaged values go first, then the oldest.

    Args:
        data: what the ConfigMap has; damaged values stay as long as there is room, because a person may mend them.
        key: device class and namespace of the measurement.
        record: the measurement.
        most_bytes: the size of all keys and values together.
    """
    new_name = key.encode()
    kept = {**data, new_name: encode_record(record)}
    size = sum(_count_bytes(name, value) for name, value in kept.items())
    if size <= most_bytes:
        return StoredData(kept)

    dropped = list[str]()
    # Drop other measurements until there is room. Damaged values have no time, so they come before the oldest.
    for name in sorted(kept.keys() - {new_name}, key=lambda name: (_read_measured_at(name, kept[name]), name)):
        size -= _count_bytes(name, kept.pop(name))
        dropped.append(name)
        if size <= most_bytes:
            break
    return StoredData(kept, tuple(dropped))


def put_host_record(
    data: Mapping[str, str], key: RecordKey, record: MeasuredPerformance, most_bytes: int = MOST_BYTES
) -> StoredData:
    """Return the data of a ConfigMap with this measurement that a host reports, or without it if there is no room.

    A host is not trusted, so its measurement never drops one of a Job or of another namespace: without room it is
    itself the one that is dropped. Beyond `MOST_HOST_CLASSES`, it drops the oldest ones of hosts in its namespace.
    """
    stored = put_record(data, key, record, most_bytes)
    if stored.dropped:
        # There was no room: return the data as it was, and name the new record as dropped.
        return StoredData(dict(data), (key.encode(),))
    return limit_host_records(stored.data, key.namespace)


def limit_host_records(data: Mapping[str, str], namespace: str, most: int = MOST_HOST_CLASSES) -> StoredData:
    """Return the data of a ConfigMap with only the `most` latest measurements of hosts that count in a namespace.

    A host states its device class itself, so one that stated another each minute would fill the ConfigMap.
    """
    measured_at: dict[str, str] = {}
    for name, value in data.items():
        with contextlib.suppress(ValueError):
            key, record = _decode_record(name, value)
            if key.namespace == namespace and record.source == "host":
                measured_at[name] = record.measured_at
    # Newest first, so all but the first `most`.
    dropped = sorted(measured_at, key=lambda name: (measured_at[name], name), reverse=True)[most:]
    return StoredData({name: value for name, value in data.items() if name not in dropped}, tuple(sorted(dropped)))


def _count_bytes(name: str, value: str) -> int:
    """Return the bytes of a key and its value."""
    return len(name.encode()) + len(str(value).encode())


def _read_measured_at(name: str, value: str) -> str:
    """Return the time of a measurement; "" for a damaged one, which sorts first."""
    try:
        _, record = _decode_record(name, value)
    except ValueError:
        return ""
    return record.measured_at


class PerformanceTable:
    """All measurements that are stored, by model hash; a change of one ConfigMap touches that model alone."""

    def __init__(self) -> None:
        self._records_by_hash: dict[str, ModelRecords] = {}
        """The measurements of each model, by model hash."""
        self._listeners: list[Callable[[str], None]] = []
        """Called with the model hash after each change."""
        self.corrections = CorrectionTable()
        """Corrections of the estimates of other models, learned from these measurements."""

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener(model_hash)` after each change of the measurements of a model."""
        self._listeners.append(listener)

    def report_change(self, model_hash: str) -> None:
        """Call the listeners for a model."""
        for listener in self._listeners:
            listener(model_hash)

    def update(self, config_map: Obj) -> tuple[DamagedRecord, ...]:
        """Replace the measurements of one model by those of its ConfigMap; return what is damaged in it.

        If its labels do not fit its name, the measurements under that name are forgotten.
        """
        model_hash = find_model_hash(config_map)
        if not model_hash:
            self.remove(config_map["metadata"]["name"])
            problem = f"the labels {LABEL_BENCHMARK} and {LABEL_MODEL_HASH} do not fit the name"
            return (DamagedRecord(config_map["metadata"]["name"], "", problem),)
        self._records_by_hash[model_hash] = records = decode_records(config_map)
        self.corrections.put(model_hash, _list_ratios(records.records))
        return records.damaged

    def remove(self, name: str) -> None:
        """Forget the measurements of a ConfigMap that is gone."""
        # Names are `bench-` and the model hash; other ConfigMaps are not read.
        if name.startswith(_PREFIX):
            model_hash = name.removeprefix(_PREFIX)
            self._records_by_hash.pop(model_hash, None)
            self.corrections.put(model_hash)

    def find(self, model_hash: str, device_class: str, namespace: str = "") -> MeasuredPerformance | None:
        """Return the measurement of a model on a device class that counts in a namespace, or None.

        One that counts for all comes first: no tenant of the namespace can have forged it.
        """
        records = self._records_by_hash.get(model_hash, _NO_RECORDS).records
        shared = records.get(RecordKey(device_class))
        return shared if shared is not None else records.get(RecordKey(device_class, namespace))

    def find_exact(self, model_hash: str, key: RecordKey) -> MeasuredPerformance | None:
        """Return the measurement that is stored under a key, or None."""
        return self._records_by_hash.get(model_hash, _NO_RECORDS).records.get(key)

    def list_classes(self, model_hash: str, namespace: str = "") -> dict[str, MeasuredPerformance]:
        """Return the measurements of a model that count in a namespace, by device class.

        For a device class with several, that which counts for all is returned, as by `find`.
        """
        records = self._records_by_hash.get(model_hash, _NO_RECORDS).records
        shared = {key.device_class: record for key, record in records.items() if not key.namespace}
        return {key.device_class: record for key, record in records.items() if key.namespace == namespace} | shared

    def list_shared(self) -> Iterator[tuple[str, str, MeasuredPerformance]]:
        """Yield model hash, device class and record of each measurement that all namespaces may trust.

        For each model and device class that is the record without a namespace, which an administrator has stated, else
        the one of the controller's namespace, where only administrators make services.
        """
        for model_hash, (records, _damaged) in self._records_by_hash.items():
            for key, record in records.items():
                has_stated_record = RecordKey(key.device_class) in records
                is_next_best = key.namespace == CONTROLLER_NAMESPACE and not has_stated_record
                if not key.namespace or is_next_best:
                    yield model_hash, key.device_class, record


_NO_RECORDS: Final = ModelRecords()


def follow_measurements(store: Store) -> PerformanceTable:
    """Return a table of the measurements in a store, which follows each later change; damaged ones are logged."""
    table = PerformanceTable()

    def take_change(resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Update the table and call its listeners after a change of one object of the store.

        Args:
            resource: the kind of the object; only ConfigMaps of the controller's namespace count.
            old: the object before; None: it is new.
            new: the object after; None: it was deleted.
        """
        versions = [obj for obj in (old, new) if obj is not None]
        metadata = versions[0]["metadata"]
        if resource != CONFIG_MAPS or metadata.get("namespace") != CONTROLLER_NAMESPACE:
            return

        # Update the table.
        if new is None:
            table.remove(metadata["name"])
        else:
            for damaged in table.update(new):
                log.warning("measurement_damaged", problem=str(damaged)[:_MOST_MESSAGE])

        # By a changed label, a ConfigMap may become that of its model, or of none (an empty hash): both are reported.
        for model_hash in {find_model_hash(obj) for obj in versions}:
            table.report_change(model_hash)

    # Take what the store has already, then each change.
    for obj in store.list(CONFIG_MAPS):
        take_change(CONFIG_MAPS, None, obj)
    store.subscribe(take_change)
    return table


def _list_ratios(records: Mapping[RecordKey, MeasuredPerformance]) -> tuple[MeasuredRatio, ...]:
    """Return the measured beside the estimated speed of each record, for the corrections of other estimates.

    Records without the estimate that was made at their time, the vendor or the engine are left out.
    """
    return tuple(
        MeasuredRatio(
            # Empty: the measurement counts in all namespaces.
            key.namespace,
            SpeedRatio(
                vendor=record.accelerator,
                device_class=key.device_class,
                runtime=record.runtime,
                measured=record.tokens_per_second,
                estimated=record.estimated_tokens_per_second,
            ),
        )
        for key, record in records.items()
        if record.accelerator and record.runtime and record.estimated_tokens_per_second
    )


class _FlexInferRecord(msgspec.Struct, frozen=True, rename="camel"):
    tokens_per_second: float
    model: str
    timestamp: str


def build_flexinfer_export(table: PerformanceTable, most_bytes: int = MOST_BYTES) -> StoredData:
    """Return the measurements that everybody may believe in the one flat ConfigMap that programs of FlexInfer read.

    Its keys are `<model hash>-<device class>`, its values have the fields of that project. If not all have room, the
    oldest are dropped.
    """
    # Rows of model hash, device class and record.
    newest_first = sorted(table.list_shared(), key=lambda row: (row[2].measured_at, row[0], row[1]), reverse=True)

    data, dropped, size = dict[str, str](), list[str](), 0
    for model_hash, device_class, record in newest_first:
        name = f"{model_hash}-{device_class}"
        shown = _FlexInferRecord(record.tokens_per_second, record.model or model_hash, record.measured_at)
        value = msgspec.json.encode(shown).decode()
        size += _count_bytes(name, value)
        if size > most_bytes:
            dropped.append(name)
        else:
            data[name] = value
    return StoredData(data, tuple(dropped))
