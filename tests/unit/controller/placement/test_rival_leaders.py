"""Leaders of the queue that follow and overlap each other, in virtual time, on an API whose writes arrive late.

A write takes up to 33 seconds, is refused, or is made and never answered; watches lag; pods come and go; the ledger is
deleted. A leader ends, or works on after another has taken over. At each change, the devices of each node are counted.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest

from controller.placement.ledger import LEDGER
from controller.placement.pod_requests import find_pinned_node, is_gated
from controller.reconcile.plan import Leading
from crds.meta import CONTROLLER_NAMESPACE, LABEL_GANG, LABEL_GANG_SIZE, LABEL_SERVICE
from kube.client import Obj
from kube.errors import Conflict, Invalid, LeadershipLost, Unreachable
from kube.resources import CONFIG_MAPS, PODS, ObjectKey, Resource, object_key
from kube.store import Store
from tests.support import virtual_time
from tests.support.admission_api import AdmissionApi, AdmissionBench, Place, SilentRecorder
from tests.support.queue_objects import queue_pod
from tests.unit.controller.placement.test_admission_pods import bench, node
from tests.unit.controller.placement.test_admission_takeover import LEDGER_PLACE

T = TypeVar("T")

SERVICES = ("chat", "mail", "vip", "low")
GANG_SERVICE = "gang"
CLIENT_SECONDS = 30.0
"""Time after which the client gives a request up."""
LONGEST_WRITE_SECONDS = 33.0
"""Time after which the API server has made a write, or makes it no more."""
MOST_PODS = 14
SEEDS = 6


class World:
    """The objects of all, and the watches that follow them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self.devices = {f"n{number}": self.chance.choice((1, 1, 2)) for number in range(self.chance.randint(2, 4))}
        self.objects: dict[Place, Obj] = {}
        self.watches: list[tuple[Store, float]] = []
        """The watch cache of each leader, and its lag in seconds."""
        self.booked_twice: list[str] = []
        self.admitted: set[str] = set()
        self._version = 1000
        self._count = 0

    def put(self, resource: Resource, obj: Obj) -> Obj:
        """Store an object, with another version, and show it to all watches."""
        self._version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version)}}
        self.objects[resource, object_key(obj)] = stored
        if resource == PODS:
            for watch, lag_seconds in self.watches:
                asyncio.get_running_loop().call_later(lag_seconds, watch.put, PODS, stored)
            self._count_devices()
        return stored

    def remove_pod(self, name: str) -> Obj | None:
        """Delete a pod, and show that to all watches."""
        pod = self.objects.pop((PODS, ObjectKey("team", name)), None)
        if pod is None:
            return None
        self._version += 1
        version = str(self._version)

        def show(known: Store) -> None:
            known.remove(PODS, "team", name, uid=pod["metadata"]["uid"], resource_version=version)

        for watch, lag_seconds in self.watches:
            asyncio.get_running_loop().call_later(lag_seconds, show, watch)
        return pod

    def replace_pod(self, name: str) -> None:
        """Delete a pod; the controller of its ReplicaSet makes another."""
        if (pod := self.remove_pod(name)) is not None:
            labels = pod["metadata"]["labels"]
            gang = {label: labels[label] for label in (LABEL_GANG, LABEL_GANG_SIZE) if label in labels}
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 2), self.make_pod, labels[LABEL_SERVICE], gang)

    def make_pod(self, service: str, labels: Mapping[str, str]) -> None:
        """Make a pod that waits; without annotations, as some do, it has no place of its own yet."""
        self._count += 1
        pod = queue_pod(f"p{self._count:03}", service=service, labels=dict(labels))
        if self.chance.random() < 0.5:
            del pod["metadata"]["annotations"]
        self.put(PODS, pod)

    def make_pods(self, *, gangs: bool) -> None:
        """Make a pod, or two that are one gang."""
        if gangs and self.chance.random() < 0.4:
            gang = {LABEL_GANG: f"g{self._count}", LABEL_GANG_SIZE: "2"}
            for _ in range(2):
                self.make_pod(GANG_SERVICE, gang)
        else:
            self.make_pod(self.chance.choice(SERVICES), {})

    def list_pods(self) -> list[Obj]:
        """Return all pods."""
        return [obj for (resource, _), obj in self.objects.items() if resource == PODS]

    def _count_devices(self) -> None:
        taken = Counter[str]()
        for pod in self.list_pods():
            if not is_gated(pod["spec"]):
                requests = pod["spec"]["containers"][0]["resources"]["requests"]
                taken[find_pinned_node(pod["spec"])] += int(requests["nvidia.com/gpu"])
                self.admitted.add(pod["metadata"]["uid"])
        self.booked_twice += [name for name, number in taken.items() if number > self.devices[name]]


class LateApi(AdmissionApi):
    """The API as one leader reaches it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.objects = world.objects
        self._world = world

    def put(self, resource: Resource, obj: Obj) -> Obj:
        return self._world.put(resource, obj)

    async def _make(self, write: Callable[[], Coroutine[Any, Any, T]], *, is_quick: bool) -> T:
        """Make a write at some time, and answer it or not."""
        chance = self._world.chance
        kind = chance.random()
        slow_seconds = chance.uniform(0, 3) if kind < 0.8 else chance.uniform(3, LONGEST_WRITE_SECONDS)
        seconds = chance.uniform(0, 0.05) if is_quick or kind < 0.6 else slow_seconds
        if (fault := chance.random()) < 0.1:
            await asyncio.sleep(0.01)
            raise Invalid("patch", status=422) if fault < 0.05 else Unreachable("not sent")

        async def arrive() -> T:
            await asyncio.sleep(seconds)
            return await write()

        made = asyncio.ensure_future(arrive())
        # Nobody may wait for the answer any more.
        made.add_done_callback(lambda done: done.cancelled() or done.exception())
        if chance.random() < 0.08:
            await asyncio.sleep(chance.uniform(0, min(seconds, CLIENT_SECONDS)))
            raise Unreachable("the answer is lost")
        try:
            async with asyncio.timeout(CLIENT_SECONDS):
                return await asyncio.shield(made)
        except TimeoutError:
            raise Unreachable("no answer in time") from None

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        if self._world.chance.random() < 0.05:
            raise Unreachable("get")
        return await super().get(resource, name, namespace)

    async def create(self, resource: Resource, obj: Mapping[str, Any]) -> Obj:
        async def write() -> Obj:
            if (resource, object_key(obj)) in self.objects:
                raise Conflict("create", status=409)
            return self.put(resource, dict(obj))

        return await self._make(write, is_quick=self._world.chance.random() < 0.9)

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
    ) -> Obj:
        write = partial(super().patch_json, resource, name, namespace, operations, subresource=subresource)
        return await self._make(write, is_quick=resource == CONFIG_MAPS and self._world.chance.random() < 0.9)

    async def patch_merge(
        self, resource: Resource, name: str, namespace: str | None, patch: Mapping[str, Any], *, field_manager: str
    ) -> Obj:
        stored = self.objects.get((resource, ObjectKey(namespace or "", name)))
        if stored is not None and stored["metadata"]["uid"] != patch["metadata"]["uid"]:
            raise Conflict("patch", status=409)
        write = partial(super().patch_merge, resource, name, namespace, patch, field_manager=field_manager)
        return await self._make(write, is_quick=False)

    async def create_subresource(
        self, resource: Resource, name: str, namespace: str | None, subresource: str, obj: Mapping[str, Any]
    ) -> Obj:
        async def evict() -> Obj:
            self._world.replace_pod(self.find(resource, name, namespace)["metadata"]["name"])
            return dict(obj)

        del subresource
        return await self._make(evict, is_quick=False)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        propagation: str = "Background",
    ) -> None:
        async def delete() -> None:
            if uid is not None and self.find(resource, name, namespace)["metadata"]["uid"] != uid:
                raise Conflict("delete", status=409)
            self._world.replace_pod(name)

        del propagation
        await self._make(delete, is_quick=False)


class Leader:
    """One leader, from its election on."""

    def __init__(self, world: World, name: str) -> None:
        self.is_elected = True
        templates = [queue_pod(f"template-{service}", service=service) for service in (*SERVICES, GANG_SERVICE)]
        nodes = tuple(node(name, devices) for name, devices in world.devices.items())
        self._bench: AdmissionBench = bench(*templates, nodes=nodes, identity=name)
        self.known = self._bench.known
        for template in templates:
            self.known.remove(PODS, "team", template["metadata"]["name"], uid=template["metadata"]["uid"])
        for pod in world.list_pods():
            self.known.put(PODS, pod)
        world.watches.append((self.known, world.chance.choice((0.0, 0.01, 0.5))))
        self._api = LateApi(world)

    async def run(self) -> None:
        """Lead, and go on until a write shows that another leads."""
        recorder: Any = SilentRecorder()
        leading = Leading(self._api, self.known, recorder, lambda *_: None, self._require_leadership)
        # The tasks of a leader end together, with a group of what they raise.
        with contextlib.suppress(LeadershipLost):
            try:
                await self._bench.loop.run(leading)
            except* LeadershipLost as lost:
                raise LeadershipLost("another leads") from lost

    def _require_leadership(self) -> None:
        if not self.is_elected:
            raise LeadershipLost("another leads")


async def use(world: World, *, gangs: bool, loses_ledger: bool) -> None:
    """Make, end and delete pods for ever."""
    for _ in range(world.chance.randint(4, 8)):
        world.make_pods(gangs=gangs)
    while True:
        await asyncio.sleep(world.chance.uniform(0.5, 8))
        what, names = world.chance.random(), [pod["metadata"]["name"] for pod in world.list_pods()]
        if what < 0.3 and len(names) < MOST_PODS:
            world.make_pods(gangs=gangs)
        elif what < 0.6 and names:
            world.replace_pod(world.chance.choice(names))
        elif what < 0.7 and names:
            world.remove_pod(world.chance.choice(names))
        elif what < 0.73 and loses_ledger:
            world.objects.pop(LEDGER_PLACE, None)


async def follow_each_other(world: World, *, gangs: bool, loses_ledger: bool) -> None:
    """Run leaders one after the other; half of them work on for some time."""
    world.put(CONFIG_MAPS, {"metadata": {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE}, "data": {}})
    users = asyncio.ensure_future(use(world, gangs=gangs, loses_ledger=loses_ledger))
    terms: list[asyncio.Task[None]] = []
    for number in range(world.chance.randint(2, 5)):
        leader = Leader(world, f"leader-{number}")
        terms.append(asyncio.create_task(leader.run()))
        await asyncio.sleep(world.chance.choice((3, 20, 60, 120)))
        if terms[-1].done():
            terms[-1].result()
        leader.is_elected = False
        if world.chance.random() < 0.5:
            terms[-1].cancel()
        await asyncio.sleep(world.chance.choice((0, 5)))
    for task in (users, *terms):
        task.cancel()
    await asyncio.gather(users, *terms, return_exceptions=True)


@pytest.mark.parametrize("loses_ledger", [False, True], ids=["", "and lose the ledger"])
@pytest.mark.parametrize("gangs", [False, True], ids=["pods", "gangs"])
def test_no_leaders_book_a_device_twice(*, gangs: bool, loses_ledger: bool) -> None:
    admitted = 0
    for seed in range(SEEDS):
        world = World(seed)
        virtual_time.run(follow_each_other(world, gangs=gangs, loses_ledger=loses_ledger))
        assert world.booked_twice == [], seed
        admitted += len(world.admitted)
    assert admitted > SEEDS
