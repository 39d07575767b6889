"""The client's verbs and errors against a real API server."""

import asyncio
from typing import Any

import pytest

from kube import credentials
from kube.client import PAGE, Client
from kube.errors import Conflict, Forbidden, Invalid, NotFound
from kube.resources import (
    MODELS,
    SECRETS,
    Resource,
)
from kube.transport import AiohttpTransport, Request, Response
from tests.controlplane.plane import ControlPlane
from tests.support.api_faults import FaultyTransport, nth
from tests.support.api_objects import secret

MANAGER = "pomona-test"


async def test_create_get_delete(client: Client, namespace: str) -> None:
    created = await client.create(SECRETS, secret(namespace, "one"))
    assert await client.get(SECRETS, "one", namespace) == created
    with pytest.raises(Conflict, match=f"create secrets {namespace}/one: 409 AlreadyExists") as exists:
        await client.create(SECRETS, secret(namespace, "one"))
    assert exists.value.reason == "AlreadyExists"
    with pytest.raises(Conflict, match="UID in the precondition"):
        await client.delete(SECRETS, "one", namespace, uid="another")
    await client.delete(SECRETS, "one", namespace, uid=created["metadata"]["uid"])
    with pytest.raises(NotFound, match=f'get secrets {namespace}/one: 404 NotFound: secrets "one" not found'):
        await client.get(SECRETS, "one", namespace)


async def test_apply_conflicts_with_another_manager_unless_forced(client: Client, namespace: str) -> None:
    await client.apply(SECRETS, secret(namespace, "one"), field_manager="first")
    changed = secret(namespace, "one") | {"data": {"a": "YmFy"}}
    with pytest.raises(Conflict, match='conflict with "first"'):
        await client.apply(SECRETS, changed, field_manager="second", force=False)
    assert (await client.apply(SECRETS, changed, field_manager="second"))["data"] == {"a": "YmFy"}


async def test_apply_to_an_object_of_another_uid_or_version_conflicts(client: Client, namespace: str) -> None:
    stale = await client.create(SECRETS, secret(namespace, "one"))
    identity = {key: stale["metadata"][key] for key in ("namespace", "name", "uid")}
    await client.delete(SECRETS, "one", namespace)
    with pytest.raises(Conflict):
        await client.apply(SECRETS, {"metadata": identity}, field_manager=MANAGER)
    new = await client.create(SECRETS, secret(namespace, "one"))
    with pytest.raises(Conflict):
        await client.apply(SECRETS, {"metadata": identity}, field_manager=MANAGER)
    current = {**identity, "uid": new["metadata"]["uid"], "resourceVersion": stale["metadata"]["resourceVersion"]}
    with pytest.raises(Conflict):
        await client.apply(SECRETS, {"metadata": current}, field_manager=MANAGER)


async def test_an_immutable_field_is_invalid_and_named(client: Client, namespace: str) -> None:
    await client.create(SECRETS, secret(namespace, "one", immutable=True))
    with pytest.raises(Invalid, match="immutable") as invalid:
        await client.apply(SECRETS, secret(namespace, "one") | {"data": {"a": "YmFy"}}, field_manager=MANAGER)
    assert invalid.value.causes[0][0] == "data"


async def test_a_json_patch_whose_test_fails_conflicts(client: Client, namespace: str) -> None:
    created = await client.create(SECRETS, secret(namespace, "one"))
    version = created["metadata"]["resourceVersion"]
    patch = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/data/b", "value": "YmFy"},
    ]
    assert (await client.patch_json(SECRETS, "one", namespace, patch))["data"] == {"a": "Zm9v", "b": "YmFy"}
    with pytest.raises(Conflict, match="not as the patch expects"):
        await client.patch_json(SECRETS, "one", namespace, patch)
    with pytest.raises(Conflict, match="not as the patch expects"):
        await client.patch_json(SECRETS, "one", namespace, [{"op": "remove", "path": "/data/c"}])
    with pytest.raises(Invalid):
        await client.patch_json(SECRETS, "one", namespace, [{"op": "add", "path": "/data/b!", "value": "YmFy"}])


async def test_a_refusal_by_rbac_is_forbidden(plane: ControlPlane, client: Client, namespace: str) -> None:
    accounts = Resource("", "v1", "serviceaccounts", "ServiceAccount")
    await client.create(accounts, {"metadata": {"namespace": namespace, "name": "nobody"}})
    account = credentials.load(await plane.service_account_kubeconfig(namespace, "nobody"))
    transport = AiohttpTransport(account)
    try:
        with pytest.raises(Forbidden, match="cannot list resource"):
            await Client(transport).list(SECRETS, namespace)
    finally:
        await transport.close()


async def test_a_list_is_read_in_pages_and_its_items_have_their_kind(
    faulty: Client, transport: FaultyTransport, namespace: str
) -> None:
    names = [f"s-{number:04}" for number in range(PAGE + 5)]
    for start in range(0, len(names), 16):
        async with asyncio.TaskGroup() as group:
            for name in names[start : start + 16]:
                group.create_task(faulty.create(SECRETS, secret(namespace, name, type="pomona/test")))
    transport.sent.clear()
    listed = await faulty.list(SECRETS, namespace, field_selector="type=pomona/test")
    assert [item["metadata"]["name"] for item in listed.items] == names
    assert {(item["apiVersion"], item["kind"]) for item in listed.items} == {("v1", "Secret")}
    assert len(transport.sent) == 2
    metadata = await faulty.list_metadata(SECRETS, namespace)
    assert [item["metadata"]["name"] for item in metadata.items] == names
    assert "data" not in metadata.items[0]


async def test_a_list_with_an_expired_page_is_read_at_once(
    faulty: Client, transport: FaultyTransport, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.client.PAGE", 2)
    for number in range(5):
        await faulty.create(SECRETS, secret(namespace, f"s-{number}"))
    expired = Response(410, b'{"kind":"Status","reason":"Expired","code":410}')
    transport.plan = lambda request: expired if "continue" in request.query else None
    assert len((await faulty.list(SECRETS, namespace)).items) == 5


async def test_throttled_request_is_retried_but_not_for_ever(faulty: Client, transport: FaultyTransport) -> None:
    throttled = Response(429, b'{"reason":"TooManyRequests"}', retry_after_seconds=0.01)
    transport.plan = nth(0, throttled, methods=frozenset({"GET"}))
    assert (await faulty.list(MODELS)).resource_version
    asked = 0

    def always(_: Request) -> Response:
        nonlocal asked
        asked += 1
        return throttled

    transport.plan = always
    with pytest.raises(Exception, match=r"list models\.inference\.pomona\.dev: 429 TooManyRequests"):
        await faulty.list(MODELS)
    assert asked == 4


async def test_a_rotated_token_is_picked_up(plane: ControlPlane, namespace: str, tmp_path: Any) -> None:
    loaded = credentials.load(plane.kubeconfig())
    token = tmp_path / "token"
    token.write_text("expired")
    transport = AiohttpTransport(credentials.load(plane.kubeconfig(), token))
    client = Client(transport)
    with pytest.raises(Exception, match="401 Unauthorized"):
        await client.list(SECRETS, namespace)
    header = await loaded.authorization()
    assert header
    token.write_text(header.removeprefix("Bearer "))
    assert (await client.list(SECRETS, namespace)).items == []
    await transport.close()
