"""The running controller: which reconcilers there are, what feeds them, and who leads.

Every replica follows the cluster, so that a new leader starts with a warm store; only the leader reconciles. Nothing
in here ends because the API server is away: sources list again, the queue backs off, the elector stands again, and a
new leader first lists everything and then decides every object anew.
"""

import asyncio
import itertools
import os
import secrets
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

import structlog

from controller import hosts, models, processes, services
from controller.binder import Binder
from controller.execute import Executor
from controller.plan import OWNER_INDEX, Key, Kind, LeaderTask, Leading, controller_of
from controller.readiness import Prober
from controller.source import Watched, follow, load
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import ApiError, Unreachable
from kube.events import Recorder
from kube.lease import Elector, LeadershipLost
from kube.queue import WorkQueue, run_workers
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    PVCS,
    SERVICES,
    Resource,
)
from kube.store import Store
from kube.watch import reflect

NAMESPACE: Final = "pomona-system"
LEASE: Final = "pomona-controller"
WORKERS: Final = 8
RECONCILE_SECONDS: Final = 60.0
RESYNC_SECONDS: Final = 600.0
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0

OURS: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
WATCHED: Final = (
    *(Watched(resource) for resource in (MODELS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES)),
    *(Watched(resource, OURS) for resource in (DEPLOYMENTS, SERVICES, JOBS, PODS, PVCS)),
)

log = structlog.get_logger()


class Options(NamedTuple):
    """What the command line decides."""

    image: str
    """Image with `pomona` as its entry point, for the Jobs."""
    environment: dict[str, str]
    """Variables that are handed on to the Jobs."""
    trust: ssl.SSLContext | None = None
    """What certificates of hosts are trusted; None: those of the system's roots."""


class Item(NamedTuple):
    """One object of one kind in the queue."""

    resource: Resource
    key: Key


def registrations(options: Options, watch: hosts.Watch) -> tuple[tuple[Kind, ...], tuple[LeaderTask, ...]]:
    """Return all reconcilers, and the tasks that run beside them while this replica leads."""
    prober = Prober(options.trust)
    binder = Binder(watch.bindable)
    watch.subscribe(binder.wake)
    kinds = (
        models.kind(options.image, options.environment),
        services.kind(prober),
        processes.release_kind(watch.wait_seconds),
        hosts.kind(watch),
    )
    return kinds, (watch.run, binder.run, prober.run)


class Controller:
    """One replica."""

    def __init__(self, client: Client, credentials: Callable[[], Credentials], options: Options) -> None:
        self._client = client
        self._credentials = credentials
        self._watch = hosts.Watch()
        kinds, self._leader_tasks = registrations(options, self._watch)
        self._kinds = {kind.resource: kind for kind in kinds}
        self._identity = f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self._recorder = Recorder(client, "pomona.dev/controller", self._identity)
        self._queue: WorkQueue[Item] | None = None
        """There only while this replica leads: a standby would gather keys for ever."""
        self.store = Store()
        for resource, _ in WATCHED:
            self.store.index(resource, OWNER_INDEX, _owner_uids)
        self.store.subscribe(self._enqueue_concerned)
        self._executor = Executor(client, self.store, self._recorder, lambda: datetime.now(UTC))

    async def run(self) -> None:
        """Follow the cluster, stand for leader, reconcile while leading; ends only by cancellation."""
        followed, reflected = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._client, self.store, WATCHED, self._credentials, followed))
            tasks.create_task(reflect(self._client, self.store, ENDPOINT_SLICES, label_selector=OURS, synced=reflected))
            await followed.wait()
            await reflected.wait()
            log.info("store is complete", identity=self._identity)
            await self._stand()

    async def _stand(self) -> None:
        elector = Elector(self._client, NAMESPACE, LEASE, self._identity)
        while True:
            try:
                await elector.run(self._lead)
            except LeadershipLost as error:
                log.warning("leadership lost", error=str(error))

    async def _lead(self) -> None:
        self._queue = queue = WorkQueue[Item]()
        try:
            await self._load()
            self._watch.lives.restart()
            leading = Leading(self._client, self.store, self._recorder, self._enqueue)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._resync())
                tasks.create_task(run_workers(queue, self._reconcile, WORKERS, RECONCILE_SECONDS))
                for task in self._leader_tasks:
                    tasks.create_task(_forever(task, leading))
        finally:
            self._queue = None

    async def _reconcile(self, item: Item) -> float | None:
        with structlog.contextvars.bound_contextvars(kind=item.resource.kind, key="/".join(item.key)):
            return await self._executor.reconcile(self._kinds[item.resource], item.key)

    async def _load(self) -> None:
        """List everything until that succeeds: what a standby last saw may be old."""
        for failures in itertools.count(1):
            try:
                await load(self._client, self.store, (*WATCHED, Watched(ENDPOINT_SLICES, OURS)))
            except (ApiError, Unreachable) as error:
                log.warning("leader cannot list", error=str(error))
                await asyncio.sleep(_pause_seconds(failures))
            else:
                return

    async def _resync(self) -> None:
        """Have every object decided anew: at first, and from time to time."""
        while True:
            for resource in self._kinds:
                for obj in self.store.list(resource):
                    self._enqueue(resource, _key(obj))
            await asyncio.sleep(RESYNC_SECONDS)

    def _enqueue(self, resource: Resource, key: Key) -> None:
        if self._queue is not None:
            self._queue.add(Item(resource, key))

    def _enqueue_concerned(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Have all objects decided anew that a change concerns: itself, its owner, and what a kind maps it to."""
        for obj in (each for each in (old, new) if each is not None):
            for kind in self._kinds.values():
                if resource == kind.resource:
                    self._enqueue(resource, _key(obj))
                if resource in kind.owns and (key := _owner_key(kind.resource, obj)):
                    self._enqueue(kind.resource, key)
                if resource in kind.maps:
                    for key in kind.maps[resource](self.store, obj):
                        self._enqueue(kind.resource, key)


async def _forever(task: LeaderTask, leading: Leading) -> None:
    """Run a leader's task until it is cancelled: a defect in one stops neither the others nor the process."""
    for failures in itertools.count(1):
        try:
            await task(leading)
        except Exception:  # the boundary of the task
            log.exception("leader's task crashed", task=repr(task))
        else:
            log.error("leader's task returned", task=repr(task))
        await asyncio.sleep(_pause_seconds(failures))


def _pause_seconds(failures: int) -> float:
    return backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)


def _key(obj: Obj) -> Key:
    return Key(obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def _owner_key(resource: Resource, obj: Obj) -> Key | None:
    owner = controller_of(obj)
    if owner is None or (owner["apiVersion"], owner["kind"]) != (resource.api_version, resource.kind):
        return None
    return Key(obj["metadata"].get("namespace", "") if resource.namespaced else "", owner["name"])


def _owner_uids(obj: Obj) -> list[str]:
    owner = controller_of(obj)
    return [owner["uid"]] if owner else []
