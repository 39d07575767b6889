"""Metrics of services, engines and node agents: series that exist as long as the object that they are about.

The beginning of a name is `--metric-prefix` where another project has a metric of this name and meaning: its dashboards
work with ours then. Labels are names in objects that the API server has checked, never content of a request.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from controller.reconcile.conditions import has_condition
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.services.traffic import TokenSource
from crds.meta import LABEL_SERVICE, METRIC_PREFIX, PROXY_CONTAINER
from fitness.fact_freshness import FactFreshness
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, NODE_FITNESSES, PODS, ObjectKey, Resource, object_key
from kube.store import Store

_Owner = tuple[Resource, ObjectKey]
_Labels = tuple[str, ...]


class OwnedSeries:
    """The series of a gauge, each of which exists as long as an object that states a value for it.

    Args:
        gauge: the gauge, which nothing else sets.
        combine: combines the values that several objects state for one series.
    """

    def __init__(self, gauge: Gauge, combine: Callable[[Collection[float]], float]) -> None:
        self._gauge = gauge
        self._combine = combine
        self._labels: dict[_Owner, frozenset[_Labels]] = {}
        """By object (its owner), the labels of the series for which it states a value."""
        self._values: defaultdict[_Labels, dict[_Owner, float]] = defaultdict(dict)
        """By labels of a series, the value that each object states, all of which are combined."""

    def put(self, owner: _Owner, values: Mapping[TokenSource, float] | Mapping[_Labels, float]) -> None:
        """Replace the values that an object states."""
        before = self._labels.get(owner, frozenset())
        if not before and not values:
            return
        for labels in before - values.keys():  # the series for which it states no value any more
            del self._values[labels][owner]
            self._update_series(labels)
        for labels, value in values.items():
            if self._values[labels].get(owner) != value:
                self._values[labels][owner] = value
                self._update_series(labels)
        if values:
            self._labels[owner] = frozenset(values)
        else:
            del self._labels[owner]

    def clear(self) -> None:
        """Remove all series."""
        for owner in list(self._labels):
            self.put(owner, {})

    def _update_series(self, labels: _Labels) -> None:
        """Set a series to the combined value of its objects, or remove it if no object states one."""
        values = self._values[labels].values()
        if values:
            self._gauge.labels(*labels).set(self._combine(values))
        else:
            del self._values[labels]
            self._gauge.remove(*labels)


class ModelMetrics:
    """The metrics of services, engines and node agents. Each event of the store takes a few microseconds.

    Args:
        registry: the registry of the controller.
        prefix: prefix of the metric names that are shared with another project.
        read_now: seconds since 1970, by the clock of this process.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str = METRIC_PREFIX,
        *,
        read_now: Callable[[], float] = time.time,
    ) -> None:

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        # A series exists as long as an object states a value for it; `sum` and `max` combine those of several objects.
        self._tokens = OwnedSeries(
            gauge(
                f"{prefix}_tokens_per_second",
                "Tokens that pods generate per second, the mean of a minute.",
                *TokenSource._fields,
            ),
            sum,
        )
        self._loads = OwnedSeries(
            gauge(
                f"{prefix}_model_load_seconds",
                "Time from the start of an engine until it answered, the longest of those that run.",
                "namespace",
                "model",
                "node",
            ),
            max,
        )
        self._ready = OwnedSeries(
            gauge(
                "pomona_service_ready",
                "1 while the condition Ready of a service is True, else 0; none of one that is suspended.",
                "namespace",
                "service",
                "priority",
            ),
            max,
        )
        self._degraded = OwnedSeries(
            gauge(
                "pomona_service_degraded",
                "1 while the condition SpeedDegraded or FitDegraded of a service is True; none else.",
                "namespace",
                "service",
                "condition",
            ),
            max,
        )
        self._observed = OwnedSeries(
            gauge("pomona_node_observed_timestamp_seconds", "Time of the last report of a node agent.", "node"), max
        )
        self._freshness = FactFreshness(read_now, lambda: datetime.fromtimestamp(read_now(), UTC))
        self._store: Store | None = None
        """None until `follow_store`: without it, the service of a pod, which names the Model, is not found."""

    def follow_store(self, store: Store) -> None:
        """Keep the series by the events of the store, which has an index of pods by service."""
        self._store = store
        store.subscribe(self._update_series_of)

    def set_tokens(self, service: ObjectKey, rates: Mapping[TokenSource, float]) -> None:
        """Replace the tokens per second of a service in pods; empty: they are unknown."""
        self._tokens.put((INFERENCE_SERVICES, service), rates)

    def clear_tokens(self) -> None:
        """Forget all speeds: another replica reads them from now on."""
        self._tokens.clear()

    def _update_series_of(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Set or remove the series of an object that has changed; those of a new service's pods, too."""
        obj = new or old
        if resource not in _FOLLOWED or obj is None:
            return

        # `put` replaces the values that this object states; without any, its series are removed.
        key = object_key(obj)
        owner = (resource, key)
        if resource == PODS:
            self._loads.put(owner, self._read_pod_load(new))
        elif resource == METAL_PROCESSES:
            self._loads.put(owner, _read_process_load(new))
        elif resource == NODE_FITNESSES:  # the report of a node agent
            if _read_report_time(old) != _read_report_time(new):
                seen_at = self._freshness.note_heartbeat(key.name, _read_report_time(new))
                report_times: dict[_Labels, float] = {} if seen_at is None else {(key.name,): seen_at}
                self._observed.put(owner, report_times)
        else:  # a service
            self._ready.put(owner, _read_readiness(new))
            self._degraded.put(owner, _read_degradation(new))
            if old is None and self._store is not None:
                # A pod may be known before its service, which names the Model.
                for pod in self._store.by_index(PODS, SERVICE_INDEX, namespaced(key.namespace, key.name)):
                    self._loads.put((PODS, object_key(pod)), self._read_pod_load(pod))

    def _read_pod_load(self, pod: Obj | None) -> dict[_Labels, float]:
        """Return the seconds that the engine of a pod took to load; empty if they, node or service are unknown."""
        if pod is None or self._store is None:
            return {}
        metadata, node = pod["metadata"], pod.get("spec", {}).get("nodeName")
        service_name = metadata.get("labels", {}).get(LABEL_SERVICE)
        if not service_name or not node:
            return {}
        service = self._store.get(INFERENCE_SERVICES, service_name, metadata["namespace"])
        seconds = find_pod_load_seconds(pod)
        if service is None or seconds is None:
            return {}
        return {(metadata["namespace"], service["spec"]["modelRef"], node): seconds}


_FOLLOWED: Final = frozenset({INFERENCE_SERVICES, METAL_PROCESSES, NODE_FITNESSES, PODS})


def find_pod_load_seconds(pod: Obj) -> float | None:
    """Return the time from the last start of the engine of a pod until the pod was ready.

    None: the pod is not ready, its engine does not run, or the pod was ready before that start.
    """
    status = pod.get("status", {})
    # One or none.
    ready_conditions = [
        condition
        for condition in status.get("conditions") or ()
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    # The proxy's container is no engine.
    engine_starts = [
        container["state"]["running"]["startedAt"]
        for container in status.get("containerStatuses") or ()
        if container["name"] != PROXY_CONTAINER and container.get("state", {}).get("running", {}).get("startedAt")
    ]
    if not ready_conditions or not engine_starts:
        return None
    return _measure_seconds(max(engine_starts), ready_conditions[0].get("lastTransitionTime"))


def _read_process_load(process: Obj | None) -> dict[_Labels, float]:
    """Return the seconds that the engine of a MetalProcess took to load; empty if they are not known."""
    if process is None:
        return {}
    spec, status = process["spec"], process.get("status") or {}
    seconds = _measure_seconds(status.get("startedAt"), status.get("readyAt"))
    if seconds is None or not spec.get("hostName"):
        return {}
    return {(process["metadata"]["namespace"], spec["modelName"], spec["hostName"]): seconds}


def _read_report_time(fitness: Obj | None) -> str | None:
    """Return the time of the last report in a NodeFitness, or None."""
    return (fitness.get("status") or {}).get("observedAt") if fitness is not None else None


def _read_readiness(service: Obj | None) -> dict[_Labels, float]:
    """Return 1 or 0 for the condition Ready of a service; empty for a service that is suspended or gone."""
    if service is None or (service.get("status") or {}).get("phase") == "Suspended":
        return {}
    metadata, priority = service["metadata"], service["spec"].get("priority", "normal")
    return {(metadata["namespace"], metadata["name"], priority): float(has_condition(service, "Ready"))}


def _read_degradation(service: Obj | None) -> dict[_Labels, float]:
    """Return 1 for each condition of a service by which a replica is slow or does not fit."""
    if service is None:
        return {}
    metadata = service["metadata"]
    kinds = (kind for kind in ("SpeedDegraded", "FitDegraded") if has_condition(service, kind))
    return {(metadata["namespace"], metadata["name"], kind): 1.0 for kind in kinds}


def _measure_seconds(begun: str | None, ended: str | None) -> float | None:
    """Return the seconds between two times of the API; None if one is missing, or the second is the earlier one."""
    first, last = _read_time(begun), _read_time(ended)
    if first is None or last is None or last < first:
        return None
    return last - first


def _read_time(text: str | None) -> float | None:
    """Return a time of the API in seconds since 1970; None if it is missing or invalid: nodes and hosts write it."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None
