"""A store follows a real API server through every interruption of a watch."""

import asyncio
from http import HTTPStatus

import msgspec
import pytest

from kube import watch as reflection
from kube.client import Client
from kube.errors import ApiError, Gone, Unreachable
from kube.resources import (
    METAL_HOSTS,
    SECRETS,
    Resource,
)
from kube.store import Store
from kube.transport import Request, Response
from kube.watch import Selection, load, reflect
from tests.support.api_faults import Fault, FaultyTransport, nth
from tests.support.api_objects import secret
from tests.support.background import running
from tests.support.eventually import eventually

SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "FIRST_RETRY_SECONDS", 0.01)


def names(store: Store, resource: Resource = SECRETS) -> set[str]:
    return {obj["metadata"]["name"] for obj in store.list(resource)}


async def test_a_selector_is_applied_by_the_server(client: Client, namespace: str) -> None:
    await client.create(SECRETS, secret(namespace, "one"))
    store, synced = Store(), asyncio.Event()
    async with running(
        reflect(client, store, Selection(SECRETS, namespace, field_selector="metadata.name=two"), synced)
    ):
        await synced.wait()
        await client.create(SECRETS, secret(namespace, "three"))
        await client.create(SECRETS, secret(namespace, "two"))
        await eventually(lambda: names(store) == {"two"})


@pytest.mark.usefixtures("quick")
async def test_a_cut_watch_continues_where_it_was(
    faulty: Client, transport: FaultyTransport, client: Client, namespace: str
) -> None:
    store, synced = Store(), asyncio.Event()
    transport.plan = lambda request: Fault.CUT if "watch" in request.query else None
    async with running(reflect(faulty, store, Selection(SECRETS, namespace), synced)):
        await synced.wait()
        for number in range(10):
            await client.create(SECRETS, secret(namespace, f"s-{number}"))
            await client.delete(SECRETS, f"s-{number - 1}", namespace) if number else None
        await eventually(lambda: names(store) == {"s-9"})
    lists = [request for request in transport.sent if "watch" not in request.query]
    assert len(lists) == 1


@pytest.mark.usefixtures("quick")
async def test_objects_that_vanished_before_a_relist_are_removed(faulty: Client, transport: FaultyTransport) -> None:
    """A list from long ago, as after a sleep of the machine: its version is refused (410), and a new list is read."""
    ghost = await faulty.create(METAL_HOSTS, {"metadata": {"name": "vanishes"}, "spec": {}})
    long_ago = msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": [ghost]})
    await faulty.delete(METAL_HOSTS, "vanishes")
    store, synced = Store(), asyncio.Event()
    changes: list[tuple[str, bool]] = []
    store.subscribe(lambda _, old, new: changes.append(((new or old or {})["metadata"]["name"], new is not None)))
    transport.plan = nth(0, Response(200, long_ago), methods=frozenset({"GET"}))
    async with running(reflect(faulty, store, Selection(METAL_HOSTS), synced)):
        await eventually(lambda: ("vanishes", False) in changes)
        assert changes[0] == ("vanishes", True)
        host = await faulty.create(METAL_HOSTS, {"metadata": {"name": "comes"}, "spec": {}})
        await eventually(lambda: changes[-1] == ("comes", True))
    await faulty.delete(METAL_HOSTS, "comes", uid=host["metadata"]["uid"])


async def test_a_forgotten_version_is_gone(client: Client) -> None:
    # A server that has just started answers 429 until its watch cache is filled.
    await eventually(lambda: is_served(client, METAL_HOSTS))
    with pytest.raises(Gone, match=r"watch metalhosts\.inference\.pomona\.dev: 410 Expired: too old resource version"):
        async for _ in client.watch(METAL_HOSTS, resource_version="1"):
            pass


async def is_served(client: Client, resource: Resource) -> bool:
    """Return whether a watch of `resource` is answered with anything but 429 Too Many Requests."""
    try:
        async for _ in client.watch(resource, resource_version="1"):
            return True
    except ApiError as error:
        return error.status != HTTPStatus.TOO_MANY_REQUESTS
    return True


async def test_a_watch_that_the_server_ends_gets_a_bookmark_first(transport: FaultyTransport, namespace: str) -> None:
    """With the bookmark the next watch starts where this one ended, even if no object has changed."""
    query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": "0", "timeoutSeconds": "4"}

    async def ends_with_bookmark() -> bool:
        async with transport.stream(Request("GET", SECRETS.path(namespace), query), idle_seconds=60) as stream:
            return b'"type":"BOOKMARK"' in b"".join([chunk async for chunk in stream.chunks])

    # The server sends it two seconds before the end, and a busy one may skip it.
    await eventually(ends_with_bookmark)


async def test_list_removes_vanished_objects_only(client: Client, namespace: str) -> None:
    store = Store()
    for name in ("ghost", "alive"):
        store.put(SECRETS, await client.create(SECRETS, secret(namespace, name)))
    await client.delete(SECRETS, "ghost", namespace)
    await load(client, store, Selection(SECRETS, namespace))
    assert names(store) == {"alive"}


async def test_list_reads_what_changed_or_appeared_without_an_event(client: Client, namespace: str) -> None:
    store = Store()
    store.put(SECRETS, await client.create(SECRETS, secret(namespace, "changed")))
    change = [{"op": "add", "path": "/data", "value": {"a": "YmFy"}}]
    await client.patch_json(SECRETS, "changed", namespace, change)
    await client.create(SECRETS, secret(namespace, "new"))
    await load(client, store, Selection(SECRETS, namespace))
    assert names(store) == {"changed", "new"}
    assert (store.get(SECRETS, "changed", namespace) or {})["data"] == {"a": "YmFy"}


async def test_a_list_that_fails_removes_nothing(faulty: Client, transport: FaultyTransport, namespace: str) -> None:
    store = Store()
    store.put(SECRETS, await faulty.create(SECRETS, secret(namespace, "one")))
    await faulty.delete(SECRETS, "one", namespace)
    transport.plan = lambda _: Fault.FAIL
    with pytest.raises(Unreachable):
        await load(faulty, store, Selection(SECRETS, namespace))
    assert names(store) == {"one"}
