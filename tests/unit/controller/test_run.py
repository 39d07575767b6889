"""The start of a leader: its lists and its tasks, with an API of one Model."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from controller import run
from controller.controller_options import ControllerOptions
from controller.http_endpoints import ControllerHealth
from controller.placement.foreign_pods import FOREIGN
from controller.pod_settings import PodSettings
from controller.reconcile import feed
from controller.reconcile.feed import REPORTED, WRITTEN_BY_USERS
from controller.reconcile.plan import Leading, Plan, Reconciler, Snapshot
from controller.run import Controller, Item
from controller.services.tokens import token_secret
from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, Obj, ObjectList
from kube.errors import LeadershipLost, NotFound, Unreachable
from kube.queue import WorkQueue
from kube.resources import (
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    SECRETS,
    ObjectKey,
    Resource,
)
from tests.support import virtual_time
from tests.support.api_objects import NOW, as_service, host, process, service, store
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.watched_controller import follow_by_watches, no_credentials


def model(name: str) -> Obj:
    metadata = {"name": name, "namespace": "team", "uid": f"{name}-uid", "resourceVersion": "1", "generation": 1}
    spec = {"source": "file:///models/big.gguf", "memoryBytes": 5}
    return {"apiVersion": MODELS.api_version, "kind": MODELS.kind, "metadata": metadata, "spec": spec}


class World(Client):
    """An API with one Model."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Resource, str]] = []

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        self.calls.append(("list", resource, ""))
        return ObjectList([model("new")] if resource == MODELS else [], "1")

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        self.calls.append(("apply", resource, obj["metadata"]["name"]))
        return model("new") | {"status": obj.get("status", {})}

    async def create(self, _resource: Resource, obj: Any) -> Obj:
        return dict(obj)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_RETRY_SECONDS", 0.01)


class SlowForeignPods(World):
    """An API whose list of foreign pods is answered late."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.waits = False

    async def list(self, resource: Resource, *arguments: Any, **options: Any) -> ObjectList:
        if options.get("label_selector") == FOREIGN:
            self.waits = True
            await self.answers.wait()
        return await super().list(resource, *arguments, **options)

    async def try_list(self, resource: Resource, *_: Any) -> None:
        raise NotFound(f"list {resource}", status=404)

    async def watch(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()
        yield


async def test_nothing_is_decided_before_foreign_pods_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "follow", follow_by_watches)
    world, health = SlowForeignPods(), ControllerHealth()
    options = ControllerOptions(PodSettings("pomona:test"), elects=False)
    controller = Controller(world, no_credentials, options, health=health)
    async with running(controller.run()):
        await eventually(lambda: world.waits and all(feed.settled.is_set() for feed in controller._feeds))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not health.is_ready
        world.answers.set()
        await eventually(lambda: health.is_ready)


class RefusesFirstLists(World):
    """An API with one Model, of which the first list of each kind fails, once all kinds have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.all_asked = asyncio.Event()

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        self.calls.append(("list", resource, ""))
        if len(self.calls) == len(WRITTEN_BY_USERS) + len(REPORTED):
            self.all_asked.set()
        await self.all_asked.wait()
        if self.calls.count(("list", resource, "")) == 1:
            raise Unreachable("list: try again")
        return ObjectList([model("new")] if resource == MODELS else [], "1")


async def test_a_new_leader_lists_all_kinds_at_once_and_again_only_what_could_not_be_listed() -> None:
    world = RefusesFirstLists()
    controller = Controller(world, no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False))
    controller.store.put(MODELS, model("vanished-unseen"))
    async with running(controller._lead()):
        await eventually(lambda: ("apply", MODELS, "new") in world.calls)
    twice = Counter({selection.resource: 2 for selection in (*WRITTEN_BY_USERS, *REPORTED)})
    assert Counter(resource for _, resource, _ in world.calls[: twice.total()]) == twice
    assert {name for verb, _, name in world.calls if verb == "apply"} == {"new"}


async def test_replica_that_leads_again_forgets_what_it_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def decide(*_: Any) -> Plan:
        done.append("decide")
        return Plan()

    kind = Reconciler(resource=MODELS, decide=decide, restart=lambda: done.append("restart"))
    monkeypatch.setattr(Controller, "_make_reconcilers", lambda *_: ((kind,), ()))
    controller = Controller(World(), no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False))
    for _ in range(2):
        done.clear()
        async with running(controller._lead()):
            await eventually(lambda: "decide" in done)
        assert done[0] == "restart"


class SuspendedAtJob(World):
    """An API with these Models, at whose first Job the controller is suspended for longer than its lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *models: str) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch
        self._models = models

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        return ObjectList([model(name) for name in self._models] if resource == MODELS else [], "1")

    async def get(self, resource: Resource, *_: Any, **__: Any) -> Obj:
        raise NotFound(f"get {resource}", status=404)

    async def create(self, resource: Resource, obj: Any) -> Obj:
        if resource == JOBS:
            resumed = asyncio.get_running_loop().time() + 100
            self._monkeypatch.setattr("kube.lease._now", lambda: resumed)
        self.calls.append(("create", resource, obj["metadata"]["name"]))
        return {**obj, "metadata": obj["metadata"] | {"resourceVersion": "1"}}

    async def patch_json(self, *_: Any, **__: Any) -> Obj:
        raise Unreachable("patch: the lease is not renewed any more")


async def test_controller_that_was_suspended_beyond_its_lease_tries_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would fail at each object that waits, until the election looks at the clock again."""

    decided: list[ObjectKey] = []

    def decide(_: Snapshot, key: ObjectKey) -> Plan:
        decided.append(key)
        return Plan(create=((JOBS, {"metadata": {"name": key.name, "namespace": key.namespace}}),))

    monkeypatch.setattr(
        Controller, "_make_reconcilers", lambda *_, **__: ((Reconciler(resource=MODELS, decide=decide),), ())
    )
    controller = Controller(
        SuspendedAtJob(monkeypatch, *map(str, range(100))),
        no_credentials,
        ControllerOptions(PodSettings("pomona:test")),
    )
    assert controller._elector is not None
    with pytest.raises(LeadershipLost):
        await controller._elector.run(controller._lead)
    # Each worker pauses after it; how often until the election looks depends on the load of the machine.
    assert 0 < len(decided) <= 6 * run.WORKERS, "and not all 100"


async def test_a_defect_in_a_leaders_task_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = 0

    async def crash(_: Leading) -> None:
        nonlocal starts
        starts += 1
        raise ZeroDivisionError

    monkeypatch.setattr(Controller, "_make_reconcilers", lambda *_: ((), (crash,)))
    controller = Controller(World(), no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False))
    async with running(controller._lead()):
        await eventually(lambda: starts > 2)


def test_back_off_of_a_leaders_task_starts_anew_after_a_long_run() -> None:
    starts: list[float] = []

    async def crash(_: Leading) -> None:
        loop = asyncio.get_running_loop()
        starts.append(loop.time())
        if len(starts) == 8:
            await asyncio.sleep(600)
        raise ZeroDivisionError

    async def main() -> None:
        task = asyncio.create_task(run._run_for_ever(crash, Leading(*[None] * 4)))  # type: ignore[arg-type] # none is used
        await asyncio.sleep(1000)
        task.cancel()

    virtual_time.run(main())
    assert starts[7] - starts[6] > 10 * run.FIRST_RETRY_SECONDS
    assert starts[8] - starts[7] < 600 + 2 * run.FIRST_RETRY_SECONDS


def test_resync_enqueues_one_object_after_the_other() -> None:
    enqueued: list[float] = []

    class Timed(WorkQueue[Item]):
        def add(self, key: Item, *, urgent: bool = False) -> None:
            del key, urgent
            enqueued.append(asyncio.get_running_loop().time())

    async def main() -> None:
        controller = Controller(World(), no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False))
        for number in range(3):
            controller.store.put(MODELS, model(f"m{number}"))
        controller._queue = Timed()
        task = asyncio.create_task(controller._resync())
        await asyncio.sleep(run.RESYNC_SECONDS + 1)
        task.cancel()

    virtual_time.run(main())
    step = run.RESYNC_SECONDS / 3
    assert enqueued == pytest.approx([0, 0, 0, step, 2 * step, 3 * step])


class NothingIsRead(Client):
    """An API that refuses to read anything but a host's own Secret, which does not exist."""

    def __init__(self) -> None:
        pass

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, namespace) == (SECRETS, HOSTS_NAMESPACE), f"{namespace}/{name} is read"
        raise NotFound("get", status=404)


async def test_host_gets_the_token_of_a_new_service_without_a_read() -> None:
    controller = Controller(NothingIsRead(), no_credentials, ControllerOptions(PodSettings("pomona:test")))
    services, hosts = (controller._reconcilers[kind] for kind in (INFERENCE_SERVICES, METAL_HOSTS))
    assert services.written is not None
    assert hosts.observe is not None
    _, secret = token_secret(as_service(service()), "first")
    services.written(SECRETS, secret)
    cluster = store((METAL_HOSTS, host("studio-1", address="")), (METAL_PROCESSES, process("a-b-0", host="studio-1")))
    facts = await hosts.observe(NothingIsRead(), Snapshot(cluster, NOW), ObjectKey("", "studio-1"))
    assert facts.tokens == {"team_chat-token_token": secret["data"]["token"]}
