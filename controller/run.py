"""The running controller: its reconcilers, the watches that feed them, and leader election.

Every replica follows the cluster, so that a new leader starts with a warm store; only the leader reconciles. No part
ends because the API server is unreachable: watches list again, the queue backs off, the elector competes again, and a
new leader first lists everything and then reconciles every object.
"""

import asyncio
import functools
import itertools
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import structlog

from controller.benchmarks.flexinfer_export import FlexInferExport
from controller.controller_options import ControllerOptions
from controller.gateway.key_reconciler import KeySecrets, key_reconciler
from controller.gateway.route_reconciler import route_reconciler
from controller.gateway.token_shards import TokenShards
from controller.gateway.usage_reader import UsageReader
from controller.hosts.reachability import ReachabilityProber
from controller.hosts.reconciler import LeaseReader, host_reconciler
from controller.http_endpoints import ControllerHealth
from controller.leader_queue import LeaderQueue, build_queue
from controller.metrics import ControllerMetrics, ReconcileResult
from controller.models.reconciler import model_reconciler
from controller.placement.cell_registry import CellRegistry
from controller.placement.cluster_view import ClusterView
from controller.placement.device_feed import DeviceFeed
from controller.placement.kueue import KueueQueues
from controller.pools.reconciler import pool_reconciler
from controller.preflight.preflight_verdict import FitFacts, find_fit_facts
from controller.preflight.preflight_webhook import PreflightWebhook
from controller.reconcile.executor import Executor
from controller.reconcile.feed import Feed
from controller.reconcile.kopf_feed import load
from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.paced_call import PacedCall
from controller.reconcile.plan import LeaderTask, Leading, Reconciler, Snapshot, lead_alone
from controller.reconcile.precedence import AdmissionPrecedence
from controller.reconcile.triggers import Trigger
from controller.services.class_speeds import SpeedAssessor
from controller.services.metal_processes import release_reconciler
from controller.services.performance_source import PerformanceSource
from controller.services.pods.replica_reservation import reserve_replica
from controller.services.pods.update_pacer import UpdatePacer
from controller.services.readiness_probe import Prober
from controller.services.reconciler import ServiceSources, service_reconciler
from controller.services.speed_replacer import SpeedReplacer
from controller.services.speed_report import SpeedSources
from controller.services.speed_watch import SpeedWatch
from controller.services.tokens import KnownTokens
from controller.services.traffic_meter import TrafficMeter
from crds.inferenceservice import InferenceService
from crds.meta import CONTROLLER_NAMESPACE, OURS
from fitness.correction_table import CorrectionGroup
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import ApiError, Forbidden, LeadershipLost, Unreachable
from kube.events import EventRecorder
from kube.lease import Elector
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, NODE_FITNESSES, NODES, POD_MONITORS, ObjectKey, Resource, object_key
from kube.transport import CONNECTIONS
from kube.watch import Selection

LEASE: Final = "pomona-controller"
WORKERS: Final = 8
LISTS: Final = CONNECTIONS // 2
"""Lists at once of a new leader: the renewal of its Lease must not wait for all of them."""
RECONCILE_SECONDS: Final = 60.0
RESYNC_SECONDS: Final = 3600.0
"""Time in which every object is decided again, whatever triggers have missed. What is not watched needs no resync: a
decision that reads a Secret says by itself when it is due again."""
PAUSE_SECONDS: Final = 0.3
"""Pause of an object after each reconcile: the changes that follow a first one mostly come together."""
CLASSES_SECONDS: Final = 10.0
"""Least time between two decisions of all services after changes of device classes, which one node can cause."""
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0
STABLE_SECONDS: Final = 60.0
"""After a run of this length, the back-off of a leader's task starts anew."""

log = structlog.get_logger()


class Item(NamedTuple):
    """One object of one kind in the queue."""

    resource: Resource
    key: ObjectKey


class Controller:
    """One replica; `election` is its client for the Lease, with connections of its own, or None for `client`."""

    def __init__(
        self,
        client: Client,
        credentials: Callable[[], Credentials],
        options: ControllerOptions,
        metrics: ControllerMetrics | None = None,
        health: ControllerHealth | None = None,
        *,
        election: Client | None = None,
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._metrics = metrics = metrics or ControllerMetrics()
        self._health = health or ControllerHealth()
        monitors = OptionalKind(POD_MONITORS, OURS, options.namespaces)
        # A controller of the whole cluster follows nodes as all else. Labels tell their hardware, too: a cluster that
        # has no NodeFitness yet is served.
        self._node_kind = OptionalKind(NODES if options.namespaces else NODE_FITNESSES, "")
        self._kueue = KueueQueues(options.namespaces)

        # Leadership, and the queue of keys.
        self._identity = f"{os.uname().nodename}-{secrets.token_hex(4)}"
        # _elector None: this controller runs alone, and always leads.
        candidate = Elector(election or client, CONTROLLER_NAMESPACE, LEASE, self._identity)
        self._elector = candidate if options.elects else None
        self._recorder = EventRecorder(client, "pomona.dev/controller", self._identity)
        self._precedence = AdmissionPrecedence()
        """Lets the admissions of the queue go before reconciles."""
        self._queue: WorkQueue[Item] | None = None
        """Set only while this replica leads: a standby would collect keys for ever."""
        self._incomplete_namespaces: set[str | None] = set(options.namespaces)
        """Namespaces whose objects are not all in the store yet: nothing of them is reconciled."""

        # The store, and what feeds it.
        leases = LeaseReader()
        view = ClusterView(options.pods.vendors, (), is_alive=leases.bindable)
        self.store = view.store
        self._feeds = [Feed(client, self.store, namespace) for namespace in options.namespaces or (None,)]
        self._registry = None if options.namespaces else view.registry
        """All cells, the nodes and hosts with their room; None: a controller of some namespaces does not read them."""
        self._enqueue_service = functools.partial(self._enqueue, INFERENCE_SERVICES)
        # Devices that pods claim, the measured speeds of models, and the kinds that a cluster may lack.
        self._devices = DeviceFeed(self.store, options.namespaces)
        self._measured = PerformanceSource(self.store, view.measured, self._enqueue_service)
        self._optional_kinds = (monitors, self._measured.kind, self._kueue.local_queues, self._node_kind)

        # The reconcilers, the tasks that run beside them, and what follows the store.
        reconcilers, self._leader_tasks = self._make_reconcilers(options, leases, monitors)
        self._preflight = self._make_preflight(options)
        self._reconcilers = {reconciler.resource: reconciler for reconciler in reconcilers}
        self._triggers = _group_triggers(reconcilers)
        # Each change of the store enqueues the objects that it concerns, and is counted.
        self.store.subscribe(self._enqueue_concerned)
        metrics.follow_store(self.store)
        metrics.observe_queue(self._queue_length, self._queue_age_seconds)
        self._require_leadership = self._elector.require_leadership if self._elector else lead_alone
        self._executor = Executor(client, self.store, self._recorder, _read_clock, self._require_leadership)

    def _make_reconcilers(
        self, options: ControllerOptions, leases: LeaseReader, monitors: OptionalKind
    ) -> tuple[Sequence[Reconciler], Sequence[LeaderTask]]:
        """Return all reconcilers, and the tasks that run beside them while this replica leads.

        Each needs some of the parts that are made here, and many parts have a task that feeds them. A controller of
        some namespaces has no reconciler of hosts or pools and no queue, which are of the whole cluster.
        """
        metrics, pods, measured = self._metrics, options.pods, self._measured

        # 1. The queue and the speeds of the whole cluster, if this controller reads it (if it has a registry).
        queue, watch = None, None
        speeds = SpeedSources(measured)
        if self._registry is not None:
            queue = self._make_queue(self._registry, options)
            assessor = self._make_assessor(self._registry, options)
            watch = SpeedWatch(options.replacement, self._enqueue_service)
            replacer = SpeedReplacer(watch, queue.rooms, pods, assessor.assess, metrics.queue.count_replacement)
            speeds = SpeedSources(measured, assessor, queue.notes, queue.benchmarks, replacer)

        # 2. Models, and services in pods: their tokens, the pace of their updates, their probes and their traffic.
        tokens, pacer = KnownTokens(), UpdatePacer()
        prober = Prober(options.trust, metrics.count_probe, tokens.read_again)
        meter = TrafficMeter(metrics.models.set_tokens, watch)
        # `sources` is all that the reconciler of services reads beside the store.
        sources = ServiceSources(
            prober, pods, tokens, pacer, monitors, meter, kueue=self._kueue, devices=self._devices, speeds=speeds
        )
        if queue is not None:
            sources = sources._replace(find_standing=queue.board.find_standing, rooms=queue.rooms)
        reserve = functools.partial(reserve_replica, settings=pods)
        in_pods = (model_reconciler(pods, reserve), service_reconciler(sources))
        tasks: list[LeaderTask] = [prober.run, meter.run, pacer.run, self._kueue.run]
        if queue is None:  # a controller of some namespaces
            return in_pods, tasks

        # 3. Hosts and pools, and the tasks of the queue. A change of the liveness of hosts wakes the admissions.
        leases.subscribe(queue.admission.wake)
        hosts = ReachabilityProber()
        tasks = [leases.run, queue.board.run, queue.pools.run, queue.volumes.run, queue.rooms.run, *tasks]
        tasks += [queue.admission.run, queue.host_results.run, hosts.run]
        if queue.benchmarks is not None:
            tasks.append(queue.benchmarks.run)
        if options.flexinfer_export:
            tasks.append(FlexInferExport(measured).run)
        usage = UsageReader(self.store)
        if options.gateway:
            tasks += [TokenShards(self.store, tokens).run, usage.run]
        on_hosts = (release_reconciler(leases.wait_seconds), host_reconciler(leases, tokens, hosts))
        has_gateway = options.gateway
        keys = key_reconciler(KeySecrets(), usage, has_gateway=has_gateway)
        of_gateway = (keys, route_reconciler(has_gateway=has_gateway))
        return (*in_pods, *on_hosts, pool_reconciler(queue.pools.standing), *of_gateway), tasks

    def _make_assessor(self, registry: CellRegistry, options: ControllerOptions) -> SpeedAssessor:
        """Return the source of the speeds by device class, and have each change of them enqueue services.

        A change of a device class concerns all services, so that is paced. A change of the corrections, by which
        measurements of other models correct estimates, concerns those with its vendor and engine.
        """
        paced = PacedCall(self._enqueue_services, CLASSES_SECONDS)
        registry.classes.subscribe(lambda _accelerator: paced.ask())
        assessor = SpeedAssessor(registry.list_classes, self._measured.table, options.pods.vendors)

        def enqueue_corrected(groups: Iterable[CorrectionGroup]) -> None:
            for key in assessor.list_corrected(groups):
                self._enqueue_service(key)

        self._measured.table.corrections.subscribe(enqueue_corrected)
        return assessor

    def _make_queue(self, registry: CellRegistry, options: ControllerOptions) -> LeaderQueue:
        """Return the queue over the cells of the whole cluster, not yet running."""
        return build_queue(
            self.store,
            registry,
            self._measured,
            options,
            identity=self._identity,
            metrics=self._metrics,
            precedence=self._precedence,
            enqueue=self._enqueue,
        )

    def _enqueue_services(self) -> None:
        """Enqueue all services, since speeds by device class have changed."""
        for service in self.store.list(INFERENCE_SERVICES):
            self._enqueue_service(object_key(service))

    def _make_preflight(self, options: ControllerOptions) -> PreflightWebhook | None:
        """Return the webhook; None: it is off, or this controller does not read nodes and hosts."""
        registry = self._registry
        if registry is None or options.preflight is None:
            return None

        def find_fit(service: InferenceService) -> FitFacts | None:
            """Return the facts by which the webhook judges a written service; None: the cluster is not read yet."""
            if not self._health.is_ready:
                return None
            snapshot = Snapshot(self.store, _read_clock())
            assessor = SpeedAssessor(registry.list_classes, self._measured.table, options.pods.vendors)
            return find_fit_facts(snapshot, service, options.pods, assessor.assess, registry.has_unknown_devices)

        return PreflightWebhook(options.preflight, options.preflight_folder, find_fit)

    async def run(self) -> None:
        """Follow the cluster, compete for leadership, reconcile while leading; ends only by cancellation.

        Leadership is sought only after the objects that decisions depend on have been listed once, or their namespace
        has refused that: until then this replica is not ready.
        """
        async with asyncio.TaskGroup() as tasks:
            # 1. Follow the cluster, each part in a task of its own.
            tasks.create_task(self._health.beat())
            on_restart = functools.partial(self._metrics.count_watch_restart, "kopf")
            for feed in self._feeds:
                tasks.create_task(feed.run(self._credentials, on_complete=self._start_namespace, on_restart=on_restart))
            for kind in self._optional_kinds:
                tasks.create_task(kind.follow(self._client, self.store))
            if self._registry is not None:
                tasks.create_task(self._registry.foreign.follow(self._client))
            tasks.create_task(self._devices.follow(self._client))
            if self._preflight is not None:
                tasks.create_task(self._preflight.run())

            # 2. Wait until the objects are in the store. Without a look at Kueue, each service that is given to it
            # would be said to lack it. Without measured speeds, each would be written as estimated first, and placed
            # by that.
            kinds = (self._node_kind, self._kueue.local_queues, self._measured.kind)
            settled_events = [feed.settled for feed in self._feeds] + [kind.settled for kind in kinds]
            for settled in settled_events:
                await settled.wait()
            if self._registry is not None:
                await self._registry.foreign.synced.wait()
            await self._devices.settle()

            # 3. Lead, for ever: whenever this replica has the Lease, or always without an election.
            self._health.is_ready = True
            log.info("store_complete", identity=self._identity)
            await (self._compete(self._elector) if self._elector else self._lead())

    def _start_namespace(self, namespace: str | None) -> None:
        """Start to reconcile a namespace whose objects are now all in the store."""
        if namespace not in self._incomplete_namespaces:  # such as None, the whole cluster
            return
        self._incomplete_namespaces.discard(namespace)
        for item in self._list_items():
            if item.key.namespace == namespace:
                self._enqueue(*item)

    async def _compete(self, elector: Elector) -> None:
        """Lead whenever this replica has the Lease, for ever."""
        while True:
            try:
                await elector.run(self._lead)
            except LeadershipLost as error:
                log.warning("leadership_lost", error=str(error))

    async def _lead(self) -> None:
        """List everything, then reconcile and run the leader's tasks until leadership is lost."""
        self._metrics.set_leader(leads=True)
        self._queue = queue = WorkQueue[Item](PAUSE_SECONDS)  # from now on, changes are enqueued
        try:
            # Begin with a fresh store, and without what an earlier leadership has read.
            await self._load()
            for reconciler in self._reconcilers.values():
                if reconciler.restart is not None:
                    reconciler.restart()

            # Work until leadership is lost, which cancels these tasks.
            leading = Leading(self._client, self.store, self._recorder, self._enqueue, self._require_leadership)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._resync())
                tasks.create_task(run_workers(queue, self._reconcile, WORKERS, RECONCILE_SECONDS))
                for task in self._leader_tasks:
                    tasks.create_task(_run_for_ever(task, leading))
        finally:
            self._queue = None
            self._metrics.set_leader(leads=False)
            self._metrics.models.clear_tokens()
            self._metrics.queue.set_depths({})

    def _queue_length(self) -> int:
        return len(self._queue) if self._queue is not None else 0

    def _queue_age_seconds(self) -> float:
        queue = self._queue  # read once: metrics are read in another thread
        return queue.oldest_seconds() if queue is not None else 0.0

    async def _reconcile(self, item: Item) -> float | None:
        """Reconcile an object and count that; return the seconds after which it is due again, or None."""
        async with self._precedence.reconciling():
            started, kind = time.monotonic(), item.resource.kind
            result: ReconcileResult = "error"
            try:
                with structlog.contextvars.bound_contextvars(kind=kind, key=str(item.key)):
                    again_seconds = await self._executor.reconcile(self._reconcilers[item.resource], item.key)
                result = "success" if again_seconds is None else "requeue_after"
                return again_seconds
            finally:
                self._metrics.count_reconcile(kind, result, time.monotonic() - started)

    async def _load(self) -> None:
        """List everything, as the store of a standby may be out of date; each kind is retried until that succeeds.

        To list all again after one failure would take for ever on a server that refuses a list now and then.
        """
        listing = asyncio.Semaphore(LISTS)
        async with asyncio.TaskGroup() as tasks:
            for feed in self._feeds:
                if feed.namespace not in self._incomplete_namespaces:
                    for selection in feed.watched:
                        tasks.create_task(self._load_kind(feed.namespace, selection, listing))

    async def _load_kind(self, namespace: str | None, selection: Selection, listing: asyncio.Semaphore) -> None:
        """List one kind into the store, and retry until that succeeds or the namespace refuses the controller."""
        for failures in itertools.count(1):
            try:
                async with listing:
                    await load(self._client, self.store, (selection,), namespace)
            except (ApiError, Unreachable) as error:
                log.warning("list_failed", namespace=namespace, error=str(error))
                if namespace is not None and isinstance(error, Forbidden):
                    return  # it is gone, or the controller is not bound there any more: no other waits for it
                await asyncio.sleep(_pause_seconds(failures))
            else:
                return

    async def _resync(self) -> None:
        """Enqueue every object: all at first, and then one after the other, each every `RESYNC_SECONDS`."""
        for item in self._list_items():
            self._enqueue(*item)
        while True:
            items = self._list_items()
            for item in items:
                await asyncio.sleep(RESYNC_SECONDS / len(items))
                self._enqueue(*item)
            if not items:
                await asyncio.sleep(RESYNC_SECONDS)

    def _list_items(self) -> list[Item]:
        return [Item(resource, object_key(obj)) for resource in self._reconcilers for obj in self.store.list(resource)]

    def _enqueue(self, resource: Resource, key: ObjectKey) -> None:
        """Enqueue an object to be decided again, while this replica leads and its namespace is listed."""
        if self._queue is not None and key.namespace not in self._incomplete_namespaces:
            stored = self.store.get(resource, key.name, key.namespace or None)
            # In a burst, an object that was never decided goes before those that are decided again.
            self._queue.add(Item(resource, key), urgent=stored is not None and not stored.get("status"))

    def _enqueue_concerned(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Enqueue all objects that a change of the store concerns, while this replica leads.

        The triggers of the changed kind say which objects these are. One that is being reconciled is not enqueued by
        the event of its own write, or each write would cause another reconcile: the write notes this version in place
        of that, and compares it with the API server's answer to see whether others have written, too.
        """
        if self._queue is None:
            return
        for enqueued_kind, trigger in self._triggers[resource]:
            if not trigger.concerns(old, new):
                continue

            if trigger.finds_by_status:
                # The trigger finds those that wait for this change by their status. One that is being decided may be
                # about to wait, which its status shows too late.
                for item in self._queue.processing():
                    if item.resource == enqueued_kind:
                        self._enqueue(*item)

            versions = [obj for obj in (old, new) if obj is not None]
            # Our own write of this object, if one is under way; `write.writer` is the object for which it is made.
            write = self._executor.writer.under_way.get((resource, object_key(versions[-1])))
            # The objects that it concerns, each once: most are found by the object before the change and that after it.
            for key in dict.fromkeys(key for obj in versions for key in trigger.keys(self.store, obj)):
                if write is not None and (enqueued_kind, key) == write.writer:
                    write.watched_versions.add(new["metadata"]["resourceVersion"] if new is not None else "")
                else:
                    self._enqueue(enqueued_kind, key)


def _read_clock() -> datetime:
    return datetime.now(UTC)


def _group_triggers(reconcilers: Iterable[Reconciler]) -> Mapping[Resource, Sequence[tuple[Resource, Trigger]]]:
    """Return the triggers of each resource with the resource that each enqueues."""
    triggers: defaultdict[Resource, list[tuple[Resource, Trigger]]] = defaultdict(list)
    for reconciler in reconcilers:
        # A change of an object enqueues the object itself, too.
        itself = Trigger(reconciler.resource, lambda _store, obj: [object_key(obj)], reconciler.reads)
        for trigger in (itself, *reconciler.triggers):
            triggers[trigger.resource].append((reconciler.resource, trigger))
    return triggers


async def _run_for_ever(task: LeaderTask, leading: Leading) -> None:
    """Run a leader's task until it is cancelled: a defect in one stops neither the others nor the process."""
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        started = loop.time()
        try:
            await task(leading)
        except Exception:  # the boundary of the task
            log.exception("leader_task_crashed", task=repr(task))
        else:
            log.error("leader_task_returned", task=repr(task))
        failures = 1 if loop.time() - started > STABLE_SECONDS else failures + 1
        await asyncio.sleep(_pause_seconds(failures))


def _pause_seconds(failures: int) -> float:
    return backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
