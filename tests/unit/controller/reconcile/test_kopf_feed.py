"""The times at which the store is swept; kopf's events are tested with a real API server."""

import asyncio
from collections.abc import Callable
from typing import Any

from controller.reconcile.kopf_feed import SETTLING_SECONDS, SWEEP_SECONDS, _keep_swept, _store_event, load
from kube.client import Client, Obj, ObjectList
from kube.errors import Unreachable
from kube.resources import MODELS, Resource
from kube.store import Store
from kube.watch import Selection
from tests.support import virtual_time
from tests.support.api_objects import model

GHOST = {"metadata": {"name": "ghost", "namespace": "team", "uid": "1", "resourceVersion": "1"}}


class Empty(Client):
    """An empty cluster, whose first `failures` lists fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.asked = 0

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        del resource
        self.asked += 1
        if self.asked <= self.failures:
            raise Unreachable("list: try again")
        return ObjectList([], "9")


def sweep_for(seconds: float, client: Client, happens: Callable[[Store, asyncio.Event], None]) -> Store:
    async def main() -> Store:
        store, relisted = Store(), asyncio.Event()
        store.put(MODELS, GHOST)
        task = asyncio.create_task(_keep_swept(client, store, [Selection(MODELS)], relisted))
        await asyncio.sleep(SWEEP_SECONDS / 2)
        assert store.list(MODELS), "nothing asks for a sweep"
        happens(store, relisted)
        await asyncio.sleep(seconds)
        task.cancel()
        return store

    return virtual_time.run(main())


def seen(kind: str | None, **metadata: Any) -> Callable[[Store, asyncio.Event], None]:
    obj: Obj = {"metadata": {"name": "there", "namespace": "team", "uid": "2", "resourceVersion": "2", **metadata}}

    def happens(store: Store, relisted: asyncio.Event) -> None:
        _store_event(store, MODELS, {"type": kind, "object": obj}, relisted)  # type: ignore[typeddict-item] # as kopf sends it

    return happens


def test_a_list_of_kopf_is_followed_by_one_sweep() -> None:
    client = Empty()
    assert sweep_for(2 * SETTLING_SECONDS, client, seen(None)).list(MODELS) == []
    assert client.asked == 1


def test_an_event_causes_no_sweep() -> None:
    assert sweep_for(2 * SETTLING_SECONDS, Empty(), seen("ADDED")).list(MODELS)


def test_a_sweep_that_fails_is_repeated_soon() -> None:
    client = Empty(failures=2)
    assert sweep_for(4 * SETTLING_SECONDS, client, seen(None)).list(MODELS) == []
    assert client.asked == 3


def test_store_is_swept_periodically() -> None:
    assert sweep_for(SWEEP_SECONDS, Empty(), lambda *_: None).list(MODELS) == []


class OnePage(Empty):
    """A cluster with one Model."""

    async def list(  # type: ignore[override] # what is not given is not needed
        self, resource: Resource, *_: Any, part: Callable[[Obj], Obj], **__: Any
    ) -> ObjectList:
        del resource
        return ObjectList([part(model())], "9")


async def test_listed_objects_are_reduced_once_and_in_time() -> None:
    store, reduced = Store(), list[Obj]()

    def reduce(obj: Obj) -> Obj:
        reduced.append(obj)
        return {"metadata": obj["metadata"]}

    store.set_reduction(MODELS, reduce)
    await load(OnePage(), store, [Selection(MODELS)])
    assert store.list(MODELS) == [{"metadata": model()["metadata"]}]
    assert len(reduced) == 1
