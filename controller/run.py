"""The running controller: which reconcilers there are, what feeds them, and who leads.

Every replica follows the cluster, so that a new leader starts with a warm store; only the leader reconciles. Nothing
in here ends because the API server is away: sources list again, the queue backs off, the elector stands again, and a
new leader first sweeps what vanished unseen and then decides every object anew.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

import structlog

from controller import hosts, models, processes, services
from controller.binder import Binder
from controller.execute import Executor
from controller.plan import OWNER_INDEX, Key, Kind, LeaderTask, Leading, controller_of
from controller.readiness import Prober
from controller.source import Watched, follow
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
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
SWEEP_SECONDS: Final = 600.0

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


class Item(NamedTuple):
    """One object of one kind in the queue."""

    resource: Resource
    key: Key


def registrations(options: Options) -> tuple[tuple[Kind, ...], tuple[LeaderTask, ...]]:
    """Return all reconcilers, and the tasks that run beside them while this replica leads."""
    watch, prober = hosts.Watch(), Prober()
    binder = Binder(watch.bindable)
    watch.subscribe(binder.wake)
    kinds = (
        models.kind(options.image, options.environment),
        services.kind(prober),
        processes.release_kind(watch.wait_seconds),
        hosts.HostKind(watch).kind(),
    )
    return kinds, (watch.run, binder.run, prober.run)


class Controller:
    """One replica."""

    def __init__(self, client: Client, credentials: Callable[[], Credentials], options: Options) -> None:
        self._client = client
        self._credentials = credentials
        kinds, self._leader_tasks = registrations(options)
        self._kinds = {kind.resource: kind for kind in kinds}
        self._identity = f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self._recorder = Recorder(client, "pomona.dev/controller", self._identity)
        self._queue: WorkQueue[Item] = WorkQueue()
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
        leading = Leading(self._client, self.store, self._recorder, self._enqueue)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            tasks.create_task(run_workers(self._queue, self._reconcile, WORKERS, RECONCILE_SECONDS))
            for task in self._leader_tasks:
                tasks.create_task(_forever(task, leading))

    async def _reconcile(self, item: Item) -> float | None:
        with structlog.contextvars.bound_contextvars(kind=item.resource.kind, key="/".join(item.key)):
            return await self._executor.reconcile(self._kinds[item.resource], item.key)

    async def _sweep(self) -> None:
        """Find what vanished unseen, and have every object decided anew: at first, and from time to time."""
        while True:
            try:
                for resource, label_selector in WATCHED:
                    if ghosts := await self.store.sweep(self._client, resource, label_selector=label_selector):
                        log.info("swept", resource=str(resource), ghosts=ghosts)
            except (ApiError, Unreachable) as error:
                log.warning("sweep failed", error=str(error))
            for resource in self._kinds:
                for obj in self.store.list(resource):
                    self._enqueue(resource, _key(obj))
            await asyncio.sleep(SWEEP_SECONDS)

    def _enqueue(self, resource: Resource, key: Key) -> None:
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
    await task(leading)
    raise RuntimeError(f"{task!r} returned, but a leader's task runs until it is cancelled")


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
