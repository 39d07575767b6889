"""A kind that a cluster may have or not: found at a later look, left alone while it is missing, and forgotten."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from structlog.testing import capture_logs

from controller.reconcile.optional_kinds import DISCOVERY_SECONDS, OptionalKind
from kube.client import ObjectList, WatchEvent
from kube.errors import Forbidden, NotFound
from kube.resources import NODES, POD_MONITORS, Resource
from kube.store import Store
from tests.support import virtual_time
from tests.support.background import running
from tests.support.eventually import eventually


class ClusterWithKind:
    """An API server that serves the kind while `exists`."""

    def __init__(self) -> None:
        self.exists = False
        self.lists = 0

    async def try_list(self, resource: Resource, _namespace: str | None = None) -> None:
        await self.list(resource)

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        self.lists += 1
        if not self.exists:
            raise NotFound(f"list {resource}", status=404)
        metadata = {"name": "chat", "namespace": "team", "uid": "a", "resourceVersion": "1"}
        return ObjectList([{"metadata": metadata}], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[WatchEvent]:
        await eventually(lambda: not self.exists, 10 * DISCOVERY_SECONDS)
        no_events: list[WatchEvent] = []
        for event in no_events:
            yield event
        raise NotFound("watch", status=404)


async def follow_kind() -> None:
    api, store, kind = ClusterWithKind(), Store(), OptionalKind(POD_MONITORS, "")
    async with running(kind.follow(api, store)):  # type: ignore[arg-type] # a part of the client
        await eventually(lambda: api.lists == 1)
        assert not kind.exists
        api.exists = True
        await eventually(lambda: kind.exists, 2 * DISCOVERY_SECONDS)
        assert len(store.list(POD_MONITORS)) == 1
        api.exists = False
        await eventually(lambda: not kind.exists, 2 * DISCOVERY_SECONDS)
        await eventually(lambda: not store.list(POD_MONITORS))


def test_kind_that_is_installed_later_is_found_and_one_that_is_removed_forgotten() -> None:
    virtual_time.run(follow_kind())


class RefusesNodes(ClusterWithKind):
    """An API server that refuses lists while `refuses`."""

    refuses = True

    async def try_list(self, resource: Resource, _namespace: str | None = None) -> None:
        if self.refuses:
            self.lists += 1
            raise Forbidden(f"list {resource}", status=403)
        await self.list(resource)


async def follow_refused_kind() -> None:
    api, store, kind = RefusesNodes(), Store(), OptionalKind(NODES, "")
    with capture_logs() as logs:
        async with running(kind.follow(api, store)):  # type: ignore[arg-type] # a part of the client
            await eventually(kind.settled.is_set)
            assert not kind.exists
            await eventually(lambda: api.lists == 3, 3 * DISCOVERY_SECONDS)
            api.exists, api.refuses = True, False
            await eventually(lambda: kind.exists, 2 * DISCOVERY_SECONDS)
    assert [log["event"] for log in logs].count("optional_kind_refused") == 1
    assert not [log for log in logs if log["event"] == "discovery_failed"]


def test_kind_that_may_not_be_read_is_said_once_and_found_when_it_may() -> None:
    virtual_time.run(follow_refused_kind())


async def follow_kind_through_refusals(seconds: float) -> list[bool]:
    """Refuse the kind for some time from a look on; return of each change since whether an object has vanished."""
    api, store, kind = RefusesNodes(), Store(), OptionalKind(NODES, "")
    api.exists, api.refuses = True, False
    vanished = list[bool]()
    async with running(kind.follow(api, store)):  # type: ignore[arg-type] # a part of the client
        await eventually(lambda: kind.exists, DISCOVERY_SECONDS)
        store.subscribe(lambda _resource, _old, new: vanished.append(new is None))
        api.refuses, lists = True, api.lists
        await eventually(lambda: api.lists > lists, 2 * DISCOVERY_SECONDS)
        await asyncio.sleep(seconds)
        api.refuses = False
        await asyncio.sleep(2 * DISCOVERY_SECONDS)
        assert kind.exists
        assert len(store.list(NODES)) == 1
        return list(vanished)


def test_single_refusal_lets_no_object_vanish() -> None:
    assert virtual_time.run(follow_kind_through_refusals(1)) == []


def test_objects_are_back_once_the_kind_may_be_read_again() -> None:
    assert virtual_time.run(follow_kind_through_refusals(2 * DISCOVERY_SECONDS)) == [True, False]
