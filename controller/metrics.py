"""The metrics of the controller, on a registry of their own.

Names are those that operators know from controllers built with controller-runtime, where it has a like; the others
start with `pomona_`. docs/metrics.md lists them all, and a test compares that list with what is served. Everything is
counted when it happens: nothing is searched when the metrics are read.
"""

import functools
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Final, Literal, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from controller.model_metrics import ModelMetrics
from controller.placement.admission_parts import AdmissionOutcome
from controller.placement.start_history import UnitStart
from crds.meta import MEMORY_PRESSURE, METRIC_PREFIX, Priority
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from kube.store import Store

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of the histograms."""
WAIT_SECONDS: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 43200.0, 86400.0, 604800.0)
"""Bounds of the time in the queue."""
ERROR_RATIOS: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)
"""Bounds of real waits, as multiples of the estimated ones."""
MOST_POOLS: Final = 128
"""Pools that have a label of their own; tenants can name pools that do not exist."""
OTHER_POOLS: Final = "<other>"
"""Label of all further pools."""
PREEMPTED_FOR_PRIORITY: Final = "Priority"
"""The `reason` of a replica that ended for a more important one."""
NO_ANSWER: Final = "<error>"
"""The `code` of a call that was not answered, as in client-go."""

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations

ReconcileResult = Literal["success", "requeue_after", "error"]


class ControllerMetrics:
    """The metrics of one controller. Every method may be called for each event: it takes microseconds.

    Args:
        prefix: beginning of the names that another project has, too.
    """

    def __init__(self, prefix: str = METRIC_PREFIX) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = functools.partial(Counter, registry=registry)
        gauge = functools.partial(Gauge, registry=registry)
        histogram = functools.partial(Histogram, registry=registry, buckets=SECONDS)

        # Reconciles, and the queue of objects that wait for one.
        self._reconciles = counter(
            "controller_runtime_reconcile",
            "Reconciles by kind and result: success, requeue_after (due again after a time), error (retried).",
            ("controller", "result"),
        )
        self._reconcile_errors = counter(
            "controller_runtime_reconcile_errors", "Failed reconciles by kind.", ("controller",)
        )
        self._reconcile_seconds = histogram(
            "controller_runtime_reconcile_time_seconds", "Duration of a reconcile by kind.", ("controller",)
        )
        self._depth = gauge("workqueue_depth", "Keys that wait for a worker.", ("name",))
        self._oldest = gauge("pomona_workqueue_oldest_seconds", "Time for which the oldest key has waited.", ("name",))

        # Requests to the API server, and leader election.
        self._calls = counter(
            "rest_client_requests",
            "Requests to the API server by verb, resource and HTTP status; <error>: no answer.",
            ("verb", "resource", "code"),
        )
        self._call_seconds = histogram(
            "rest_client_request_duration_seconds",
            "Time until the API server answered, by verb and resource; watches are not included.",
            ("verb", "resource"),
        )
        self._leader = gauge("leader_election_master_status", "1 while this replica leads, else 0.", ("name",))

        # Admissions, probes and watches.
        self._bindings = counter(
            "pomona_queue_admissions",
            "Admissions of the queue by outcome: admitted, stale (the cell was lost or full before the write), failed.",
            ("outcome",),
        )
        # An increase is seen from 0 only if the series exists before: so series are made here, and "kopf" below.
        for outcome in get_args(AdmissionOutcome):
            self._bindings.labels(outcome)
        self._probes = counter(
            "pomona_readiness_probes", "Probes of services by the reason of the result.", ("outcome",)
        )
        self._watch_restarts = counter(
            "pomona_watch_restarts", "Watches that were started again, by resource.", ("resource",)
        )
        self._watch_restarts.labels("kopf")
        self._watched: set[str] = set()
        """Resources of which a watch was started before: each further one is a restart."""
        gauge("pomona_build_info", "1, with the version as a label.", ("version",)).labels(version("pomona")).set(1)

        # The metrics of objects, of the queue of replicas, and of models have classes of their own.
        self.objects = ObjectTally(registry)
        self.queue = QueueMetrics(registry)
        self.models = ModelMetrics(registry, prefix)
        self.set_leader(leads=False)

    def render(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self.registry)

    def follow_store(self, store: Store) -> None:
        """Count the objects of the store at each of its changes."""
        store.subscribe(self.objects.count_change)
        self.models.follow_store(store)

    def observe_queue(self, depth: Callable[[], int], oldest_seconds: Callable[[], float]) -> None:
        """Call these functions whenever the metrics are read, in another thread."""
        self._depth.labels("controller").set_function(depth)
        self._oldest.labels("controller").set_function(oldest_seconds)

    def count_reconcile(self, kind: str, result: ReconcileResult, seconds: float) -> None:
        """Count one reconcile of a kind."""
        self._reconciles.labels(kind, result).inc()
        self._reconcile_seconds.labels(kind).observe(seconds)
        if result == "error":
            self._reconcile_errors.labels(kind).inc()

    def count_call(self, verb: str, resource: Resource, status: int, seconds: float) -> None:
        """Count one request to the API server; `status` 0: no answer.

        The first watch of a resource is noted, and each later one counts as a restart.
        """
        self._calls.labels(verb, resource.plural, str(status) if status else NO_ANSWER).inc()
        if verb != "watch":
            self._call_seconds.labels(verb, resource.plural).observe(seconds)
        elif resource.plural in self._watched:  # its first watch was seen before
            self.count_watch_restart(resource.plural)
        else:
            self._watched.add(resource.plural)

    def count_admission(self, outcome: AdmissionOutcome) -> None:
        """Count one admission of the queue."""
        self._bindings.labels(outcome).inc()

    def count_probe(self, outcome: str) -> None:
        """Count one probe of a service."""
        self._probes.labels(outcome).inc()

    def count_watch_restart(self, resource: str) -> None:
        """Count one watch that was started again."""
        self._watch_restarts.labels(resource).inc()

    def set_leader(self, *, leads: bool) -> None:
        """Report whether this replica leads."""
        self._leader.labels("pomona-controller").set(leads)


class QueueMetrics:
    """The metrics of the queue, which the leader's loop counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)

        # Replicas that wait, and how long.
        self._depth = Gauge(
            "pomona_queue_depth", "Replicas that wait in the queue.", ("pool", "priority"), registry=registry
        )
        self._wait_seconds = histogram(
            "pomona_queue_wait_seconds",
            "Time in the queue of the replicas that were admitted.",
            ("pool", "priority"),
            buckets=WAIT_SECONDS,
        )

        # Replicas that end for others. Each `labels` makes a series: an increase is seen from 0 only if it exists.
        self._preemptions = counter(
            "pomona_preemptions", "Replicas that ended for another one, by reason.", ("reason",)
        )
        self._preemptions.labels(PREEMPTED_FOR_PRIORITY)
        self._replacements = counter(
            "pomona_speed_replacements",
            "Replacements of slow replicas that have ended, by outcome: Moved, GivenUp.",
            ("outcome",),
        )
        for outcome in ("Moved", "GivenUp"):
            self._replacements.labels(outcome)

        # Rounds, and how good the estimates of waits were.
        self._plan_seconds = histogram(
            "pomona_queue_plan_seconds", "Duration of a round of the queue.", buckets=SECONDS
        )
        self._starts = counter(
            "pomona_queue_starts",
            "Starts by the first estimate that was given: in_range, early, late, or none.",
            ("pool", "estimate"),
        )
        self._error_ratio = histogram(
            "pomona_queue_estimate_error_ratio",
            "Wait since the first estimate of a start, as a multiple of the middle of its range.",
            ("pool",),
            buckets=ERROR_RATIOS,
        )

        # What was reported before, which `set_depths` and `_label_pool` change.
        self._depths: dict[tuple[str, Priority], int] = {}
        """The depth that each series shows, by the label of its pool and the priority."""
        self._pools: set[str] = set()
        """The pools that have a label of their own."""
        # A time without a series is not one in which nothing waited, so there is a series before a replica waits.
        for priority in get_args(Priority):
            self._depth.labels(OTHER_POOLS, priority).set(0)

    def set_depths(self, depths: Mapping[tuple[str, Priority], int]) -> None:
        """Set the number of waiting replicas by pool and priority; it is 0 for pairs that are not in `depths`.

        Beyond `MOST_POOLS`, all further pools are counted as one.
        """
        # Each series of before begins at 0, so one that `depths` lacks is set to 0.
        tally = Tally[tuple[str, Priority]](dict.fromkeys(self._depths, 0))
        for (pool, priority), depth in depths.items():
            tally[self._label_pool(pool), priority] += depth
        for key, depth in tally.items():
            if self._depths.get(key) != depth:
                self._depth.labels(*key).set(depth)
                self._depths[key] = depth

    def count_start(self, start: UnitStart) -> None:
        """Count a replica that was admitted."""
        pool = self._label_pool(start.unit.pools[0] if start.unit.pools else "")
        self._wait_seconds.labels(pool, start.unit.priority).observe(start.wait_seconds)
        self._starts.labels(pool, start.outcome).inc()
        error_ratios = self._error_ratio.labels(pool)  # makes the series of the pool, even without a ratio
        if (ratio := start.error_ratio) is not None:
            error_ratios.observe(ratio)

    def _label_pool(self, pool: str) -> str:
        """Return the name of a pool as a label, or `OTHER_POOLS` once `MOST_POOLS` have one: a series never ends."""
        if pool not in self._pools:
            if len(self._pools) >= MOST_POOLS:
                return OTHER_POOLS
            self._pools.add(pool)
        return pool

    def count_preemption(self, reason: str) -> None:
        """Count a replica that ended for another one."""
        self._preemptions.labels(reason).inc()

    def count_replacement(self, outcome: str) -> None:
        """Count the replacement of a slow replica that has ended."""
        self._replacements.labels(outcome).inc()

    def observe_plan(self, seconds: float) -> None:
        """Count one round of the queue."""
        self._plan_seconds.observe(seconds)


class ObjectTally:
    """The numbers of our objects by kind and phase, and of waiting processes, kept by the events of the store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge("pomona_objects", "Objects by kind and phase.", ("kind", "phase"), registry=registry)
        self._waiting = Gauge("pomona_waiting_processes", "MetalProcesses that wait for a host.", registry=registry)
        self._tally: Tally[tuple[str, str]] = Tally()

    def count_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Count one change of the store: from `old`, None for a new object, to `new`, None for one that is gone."""
        if resource not in _COUNTED:
            return
        before, after = _read_phase(resource, old), _read_phase(resource, new)
        if before != after:
            # One less in the phase before, and one more in that after the change.
            for phase, step in ((before, -1), (after, 1)):
                if phase is not None:
                    key = (resource.kind, phase)
                    self._tally[key] += step
                    self._gauge.labels(*key).set(self._tally[key])
        if resource == METAL_PROCESSES:
            waited, waits = _waits_for_host(old), _waits_for_host(new)
            if waited != waits:
                self._waiting.inc(1 if waits else -1)


_COUNTED: Final = frozenset({INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS})


def _read_phase(resource: Resource, obj: Obj | None) -> str | None:
    """Return the phase of an object, for a MetalHost by its conditions; None: there is no object."""
    if obj is None:
        return None
    status = obj.get("status") or {}
    if resource != METAL_HOSTS:
        return str(status.get("phase") or "Pending")
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
    if conditions.get("Ready") != "True":
        return "NotReady"
    return MEMORY_PRESSURE if conditions.get(MEMORY_PRESSURE) == "True" else "Ready"


def _waits_for_host(obj: Obj | None) -> bool:
    """Return whether a MetalProcess has no host yet."""
    return obj is not None and "hostName" not in obj["spec"] and "deletionTimestamp" not in obj["metadata"]
