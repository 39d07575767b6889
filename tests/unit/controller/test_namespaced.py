"""A controller of some namespaces: one that refuses holds up no other, and is served when it answers."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from controller.controller_options import ControllerOptions
from controller.metrics import ControllerMetrics
from controller.pod_settings import PodSettings
from controller.reconcile import feed
from controller.run import Controller
from kube.client import Client, Obj, ObjectList
from kube.errors import Forbidden, NotFound
from kube.resources import LEASES, METAL_HOSTS, METAL_PROCESSES, MODELS, NODES, Resource
from kube.transport import CONNECTIONS
from tests.support import virtual_time
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.watched_controller import follow_by_watches, no_credentials


def model(namespace: str) -> Obj:
    metadata = {"name": "big", "namespace": namespace, "uid": namespace, "resourceVersion": "1", "generation": 1}
    spec = {"source": "file:///models/big.gguf", "memoryBytes": 5}
    return {"apiVersion": MODELS.api_version, "kind": MODELS.kind, "metadata": metadata, "spec": spec}


class Namespaces(Client):
    """An API with one Model in each namespace, some of which refuse to be read."""

    def __init__(self, *refusing: str) -> None:
        self.refusing = set(refusing)
        self.read: set[tuple[Resource, str | None]] = set()
        self.refused = 0
        self.written: list[str] = []

    async def list(self, resource: Resource, namespace: str | None = None, **_: Any) -> ObjectList:
        self.read.add((resource, namespace))
        if namespace in self.refusing:
            self.refused += 1
            raise Forbidden(f"list {resource}", status=403)
        return ObjectList([model(namespace)] if resource == MODELS and namespace else [], "1")

    async def try_list(self, resource: Resource, *_: Any) -> None:
        raise NotFound(f"list {resource}", status=404)

    async def watch(self, *_: Any, **__: Any) -> Any:
        await eventually(lambda: False, 10_000)
        yield

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        assert resource == MODELS
        self.written.append(obj["metadata"]["namespace"])
        return model(obj["metadata"]["namespace"]) | {"status": obj.get("status", {})}

    async def create(self, _resource: Resource, obj: Any) -> Obj:
        return dict(obj)


def namespaced(api: Client, *namespaces: str) -> Controller:
    options = ControllerOptions(PodSettings("pomona:test"), elects=False, namespaces=namespaces)
    return Controller(api, no_credentials, options, ControllerMetrics())


async def bind_later() -> None:
    api = Namespaces("b")
    controller = namespaced(api, "a", "b")
    # What was read of a namespace before it refused is no reason to write there.
    controller.store.put(MODELS, model("b"))
    with capture_logs() as logs:
        async with running(controller.run()):
            await eventually(lambda: "a" in api.written)
            await eventually(lambda: api.refused == 3, 4 * feed.REFUSED_SECONDS)
            assert set(api.written) == {"a"}
            api.refusing.clear()
            await eventually(lambda: "b" in api.written, 2 * feed.REFUSED_SECONDS)
    assert [log["namespace"] for log in logs if log["event"] == "namespace_refused"] == ["b"]
    assert {namespace for _, namespace in api.read} == {"a", "b"}
    assert {LEASES, METAL_HOSTS, METAL_PROCESSES, NODES}.isdisjoint(resource for resource, _ in api.read)


def test_namespace_that_is_not_bound_holds_up_no_other_and_is_served_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "follow", follow_by_watches)
    virtual_time.run(bind_later())


async def test_new_leader_waits_for_no_namespace_that_is_gone() -> None:
    api = Namespaces()
    controller = namespaced(api, "a", "b")
    controller._incomplete_namespaces.clear()
    api.refusing.add("a")
    async with running(controller._lead()):
        await eventually(lambda: "b" in api.written)


async def test_lists_of_a_new_leader_leave_connections_for_its_lease() -> None:
    """With all of them a slow server would keep the renewal waiting until leadership is lost, again and again."""
    listing, most = 0, 0

    class Counted(Namespaces):
        async def list(self, *arguments: Any, **options: Any) -> ObjectList:
            nonlocal listing, most
            listing += 1
            most = max(most, listing)
            await asyncio.sleep(0)
            listing -= 1
            return await super().list(*arguments, **options)

    names = [f"team-{number}" for number in range(2 * CONNECTIONS)]
    api = Counted()
    controller = namespaced(api, *names)
    controller._incomplete_namespaces.clear()
    async with running(controller._lead()):
        await eventually(lambda: set(names) <= {*api.written})
    assert 1 < most <= CONNECTIONS // 2
