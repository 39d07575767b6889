"""A store follows a real API server, through all that interrupts a watch."""

import asyncio

import pytest

from kube import credentials
from kube import watch as reflection
from kube.client import Client
from kube.errors import Gone, Unreachable
from kube.resources import (
    SECRETS,
    Resource,
)
from kube.store import Store
from kube.transport import AiohttpTransport, Request, Response
from kube.watch import reflect
from tests.background import running
from tests.controlplane.plane import ControlPlane
from tests.eventually import eventually
from tests.faults import Fault, FaultyTransport
from tests.objects import secret

MANAGER = "pomona-test"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "FIRST_RETRY_SECONDS", 0.01)


def names(store: Store, resource: Resource = SECRETS) -> set[str]:
    return {obj["metadata"]["name"] for obj in store.list(resource)}


async def test_a_reflection_follows_the_server(client: Client, namespace: str) -> None:
    store, synced = Store(), asyncio.Event()
    await client.create(SECRETS, secret(namespace, "one"))
    async with running(reflect(client, store, SECRETS, namespace, synced=synced)):
        await synced.wait()
        assert names(store) == {"one"}
        await client.create(SECRETS, secret(namespace, "two"))
        await eventually(lambda: names(store) == {"one", "two"})
        await client.apply(SECRETS, secret(namespace, "two") | {"data": {"a": "YmFy"}}, field_manager=MANAGER)
        await eventually(lambda: (store.get(SECRETS, "two", namespace) or {})["data"] == {"a": "YmFy"})
        await client.delete(SECRETS, "one", namespace)
        await eventually(lambda: names(store) == {"two"})


async def test_a_selector_is_the_servers(client: Client, namespace: str) -> None:
    await client.create(SECRETS, secret(namespace, "one"))
    store, synced = Store(), asyncio.Event()
    async with running(reflect(client, store, SECRETS, namespace, field_selector="metadata.name=two", synced=synced)):
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
    async with running(reflect(faulty, store, SECRETS, namespace, synced=synced)):
        await synced.wait()
        for number in range(10):
            await client.create(SECRETS, secret(namespace, f"s-{number}"))
            await client.delete(SECRETS, f"s-{number - 1}", namespace) if number else None
        await eventually(lambda: names(store) == {"s-9"})
    lists = [request for request in transport.sent if "watch" not in request.query]
    assert len(lists) == 1


@pytest.mark.usefixtures("quick")
async def test_what_vanished_behind_a_compaction_is_removed(
    faulty: Client, transport: FaultyTransport, client: Client, namespace: str
) -> None:
    """The version to continue from is gone (410), and with it the news of a deletion."""
    for name in ("kept", "vanishes"):
        await client.create(SECRETS, secret(namespace, name))
    store, synced = Store(), asyncio.Event()
    store.replace(SECRETS, (await client.list(SECRETS, namespace)).items)
    expired = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
    watches = 0

    def plan(request: Request) -> Response | None:
        nonlocal watches
        watches += "watch" in request.query
        return Response(200, expired) if watches == 1 and "watch" in request.query else None

    transport.plan = plan
    await client.delete(SECRETS, "vanishes", namespace)
    async with running(reflect(faulty, store, SECRETS, namespace, synced=synced)):
        await eventually(lambda: watches == 2)
        assert names(store) == {"kept"}
        await client.create(SECRETS, secret(namespace, "new"))
        await eventually(lambda: names(store) == {"kept", "new"})


async def test_the_server_says_gone_for_a_version_that_it_forgot(client: Client, namespace: str) -> None:
    with pytest.raises(Gone, match=f"watch secrets {namespace}: 410 Expired: too old resource version"):
        async for _ in client.watch(SECRETS, namespace, resource_version="1"):
            pass


async def test_a_quiet_watch_gets_bookmarks(client: Client, namespace: str) -> None:
    """They come each minute: what tells a dead connection from one where nothing happens."""
    found = await client.list(SECRETS, namespace)
    async with asyncio.timeout(75):
        async for event in client.watch(SECRETS, namespace, resource_version=found.resource_version):
            assert event.type == "BOOKMARK"
            assert int(event.object["metadata"]["resourceVersion"]) >= int(found.resource_version)
            break


async def test_a_reflection_outlives_refusals(plane: ControlPlane, client: Client, namespace: str) -> None:
    """RBAC that comes after the process is an every-day case."""
    transport = AiohttpTransport(credentials.load(await plane.service_account_kubeconfig(namespace, "late")))
    store, synced = Store(), asyncio.Event()
    await client.create(SECRETS, secret(namespace, "one"))
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]}
    role = {"metadata": {"namespace": namespace, "name": "late"}, "rules": [rule]}
    subject = {"kind": "ServiceAccount", "namespace": namespace, "name": "late"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "late"}
    binding = {"metadata": role["metadata"], "subjects": [subject], "roleRef": reference}
    async with running(reflect(Client(transport), store, SECRETS, namespace, synced=synced)):
        rbac = ("rbac.authorization.k8s.io", "v1")
        await client.create(Resource(*rbac, "roles", "Role"), role)
        await client.create(Resource(*rbac, "rolebindings", "RoleBinding"), binding)
        await synced.wait()
        assert names(store) == {"one"}
    await transport.close()


async def test_sweep_removes_ghosts_only(client: Client, namespace: str) -> None:
    store = Store()
    for name in ("ghost", "alive"):
        store.put(SECRETS, await client.create(SECRETS, secret(namespace, name)))
    await client.delete(SECRETS, "ghost", namespace)
    assert await store.sweep(client, SECRETS, namespace=namespace) == 1
    assert names(store) == {"alive"}
    assert await store.sweep(client, SECRETS, namespace=namespace) == 0


async def test_a_sweep_that_fails_removes_nothing(faulty: Client, transport: FaultyTransport, namespace: str) -> None:
    store = Store()
    store.put(SECRETS, await faulty.create(SECRETS, secret(namespace, "one")))
    await faulty.delete(SECRETS, "one", namespace)
    transport.plan = lambda _: Fault.FAIL
    with pytest.raises(Unreachable):
        await store.sweep(faulty, SECRETS, namespace=namespace)
    assert names(store) == {"one"}
