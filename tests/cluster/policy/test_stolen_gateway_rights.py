"""The Secrets with the tokens of all services: who reads them, who writes them, and what the gateway's token opens."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from controller.services.tokens import token_name
from crds.meta import CONTROLLER_NAMESPACE, GATEWAY_SHARDS, LABEL_MANAGED_BY, MANAGED_BY
from kube import credentials
from kube.client import Client, Obj, connect
from kube.errors import Forbidden
from kube.resources import (
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    GATEWAY_QUOTAS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    MODEL_ROUTES,
    PODS,
    SECRETS,
    Resource,
)
from tests.cluster.policy.attempts import find_unrefused
from tests.cluster.policy.test_stolen_controller_token import DATA, Thief, thief
from tests.cluster.policy.test_tenant_token import owner, tenant
from tests.controlplane.plane import ControlPlane
from tests.support.refused_manifests import make_manifest

__all__ = ["owner", "tenant", "thief"]

SHARD = GATEWAY_SHARDS[3]
GATEWAY_ACCOUNT = "pomona-gateway"
MANAGER = "pomona-controller"


def shard(name: str = SHARD, namespace: str = CONTROLLER_NAMESPACE, **changes: Any) -> tuple[Resource, Obj]:
    """Return a Secret as the controller writes it for the gateway."""
    metadata = {"namespace": namespace, "name": name, "labels": {LABEL_MANAGED_BY: MANAGED_BY}}
    body = {"metadata": metadata | changes.pop("metadata", {}), "type": "Opaque", "data": {"a_b_token": "Zm9v"}}
    return SECRETS, body | changes


@pytest.fixture
async def stored_shard(client: Client, plane: ControlPlane) -> AsyncIterator[None]:
    """A shard, as long as a test runs; a controller of another test may have left one."""
    await plane.request("DELETE", SECRETS.path(CONTROLLER_NAMESPACE, SHARD), accept={404})
    await client.create(*shard())
    yield
    await client.delete(SECRETS, SHARD, CONTROLLER_NAMESPACE)


@pytest.fixture
async def gateway(plane: ControlPlane) -> AsyncIterator[Client]:
    """The API, with the gateway's token."""
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, GATEWAY_ACCOUNT)
    async with connect(credentials.load(kubeconfig)) as api:
        yield api


@pytest.mark.usefixtures("stored_shard")
async def test_gateway_reads_what_it_routes_by(gateway: Client, client: Client, namespace: str) -> None:
    await client.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, namespace))
    for resource in (INFERENCE_SERVICES, GATEWAY_KEYS, GATEWAY_QUOTAS, MODEL_ROUTES, ENDPOINT_SLICES):
        await gateway.list(resource)
    selector = f"metadata.name={SHARD}"
    found = await gateway.list(SECRETS, CONTROLLER_NAMESPACE, field_selector=selector)
    assert [secret["data"] for secret in found.items] == [{"a_b_token": "Zm9v"}]
    changes = gateway.watch(
        SECRETS, CONTROLLER_NAMESPACE, resource_version=found.resource_version, field_selector=selector
    )
    async with contextlib.aclosing(changes) as events:
        await client.patch_json(SECRETS, SHARD, CONTROLLER_NAMESPACE, DATA)
        event = await anext(events)
        assert event.object["data"] == {"a": "Zm9v"}


@pytest.mark.usefixtures("stored_shard")
async def test_stolen_gateway_token_opens_nothing_else(gateway: Client, client: Client, namespace: str) -> None:
    service = await client.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace))
    await client.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, namespace))
    await client.create(SECRETS, {"metadata": {"namespace": namespace, "name": token_name("one")}})
    await client.create(SECRETS, {"metadata": {"namespace": namespace, "name": "one-key"}})
    edit = [{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}}]
    status = {"metadata": {"namespace": namespace, "name": "one"}, "status": {"digest": "0" * 64}}
    attempts: dict[str, Callable[[], Awaitable[object]]] = {
        "token of a service": lambda: gateway.get(SECRETS, token_name("one"), namespace),
        "key of a client": lambda: gateway.get(SECRETS, "one-key", namespace),
        "Secrets of a tenant": lambda: gateway.list(SECRETS, namespace),
        "all Secrets of its namespace": lambda: gateway.list(SECRETS, CONTROLLER_NAMESPACE),
        "all Secrets": lambda: gateway.list(SECRETS),
        "another Secret of its namespace": lambda: gateway.get(SECRETS, "pomona-preflight", CONTROLLER_NAMESPACE),
        "change of a shard": lambda: gateway.patch_json(SECRETS, SHARD, CONTROLLER_NAMESPACE, DATA),
        "end of a shard": lambda: gateway.delete(SECRETS, SHARD, CONTROLLER_NAMESPACE),
        "a shard of its own": lambda: gateway.create(*shard(GATEWAY_SHARDS[4])),
        "a key of its own": lambda: gateway.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, namespace, "mine")),
        "digest of a key": lambda: gateway.apply(GATEWAY_KEYS, status, field_manager="thief", subresource="status"),
        "change of a key": lambda: gateway.patch_json(GATEWAY_KEYS, "one", namespace, edit),
        "a route of its own": lambda: gateway.create(MODEL_ROUTES, make_manifest(MODEL_ROUTES, namespace, "mine")),
        "change of a service": lambda: gateway.patch_json(
            INFERENCE_SERVICES, service["metadata"]["name"], namespace, edit
        ),
        "pods": lambda: gateway.list(PODS, namespace),
        "hosts": lambda: gateway.list(METAL_HOSTS),
    }
    refusals = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
        except Forbidden as error:
            refusals[name] = error.message
    assert refusals.keys() == attempts.keys()


@pytest.mark.usefixtures("stored_shard")
async def test_tenants_read_no_shard(tenant: Client, owner: Client) -> None:
    attempts: tuple[Callable[[Client], Awaitable[object]], ...] = (
        lambda api: api.get(SECRETS, SHARD, CONTROLLER_NAMESPACE),
        lambda api: api.list(SECRETS, CONTROLLER_NAMESPACE, field_selector=f"metadata.name={SHARD}"),
        lambda api: api.patch_json(SECRETS, SHARD, CONTROLLER_NAMESPACE, DATA),
    )
    for api in (tenant, owner):
        for attempt in attempts:
            with pytest.raises(Forbidden, match="cannot"):
                await attempt(api)


Attempt = Callable[[Thief], Awaitable[object]]


def key_secret(thief: Thief, kind: str = "GatewayKey", name: str = "one-key") -> tuple[Resource, Obj]:
    return thief.owned(kind, SECRETS, name, type="Opaque", data={"key": "Zm9v"})


def create(build: Callable[..., tuple[Resource, Obj]], *arguments: Any, **changes: Any) -> Attempt:
    return lambda thief: thief.api.create(*build(thief, *arguments, **changes))


def create_shard(name: str = SHARD, namespace: str = CONTROLLER_NAMESPACE, **changes: Any) -> Attempt:
    return lambda thief: thief.api.create(*shard(name, namespace, **changes))


ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    "ninth shard": ("writes only secrets that", create_shard("pomona-gateway-8")),
    "shard with a longer name": ("writes only secrets that", create_shard("pomona-gateway-3-x")),
    "shard in a tenant's namespace": (
        "writes only secrets that",
        lambda thief: thief.api.create(*shard(namespace=thief.namespace)),
    ),
    "shard without the label": ("has the label", create_shard(metadata={"labels": {}})),
    "shard that gets a ServiceAccount's token": (
        "type Opaque only",
        create_shard(
            type="kubernetes.io/service-account-token",
            metadata={"annotations": {"kubernetes.io/service-account.name": "pomona-gateway"}},
        ),
    ),
    "shard that cannot be deleted": ("adds no finalizer", create_shard(metadata={"finalizers": ["thief.example/s"]})),
    "end of a shard": ("cannot delete", lambda thief: thief.api.delete(SECRETS, SHARD, CONTROLLER_NAMESPACE)),
    "key that a service owns": ("that a GatewayKey controls", create(key_secret, "InferenceService")),
    "key of another name": ("has not the name of its GatewayKey", create(key_secret, name="two-key")),
    "token that a key owns": ("that a InferenceService controls", create(key_secret, name="one-token")),
    "spec of a key": (
        "cannot patch",
        lambda thief: thief.api.patch_json(
            GATEWAY_KEYS, "one", thief.namespace, [{"op": "add", "path": "/spec/suspend", "value": False}]
        ),
    ),
    "a key": (
        "cannot create",
        lambda thief: thief.api.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, thief.namespace, "mine")),
    ),
}


@pytest.fixture
async def keyed_thief(thief: Thief) -> Thief:
    """The thief of the controller's token, in a namespace with a GatewayKey."""
    thief.owners["GatewayKey"] = await thief.admin.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, thief.namespace))
    return thief


async def test_stolen_controller_token_writes_keys_and_shards_in_their_form_only(keyed_thief: Thief) -> None:
    assert await find_unrefused(ATTEMPTS, keyed_thief) == {}


async def test_controller_writes_keys_and_shards(keyed_thief: Thief) -> None:
    api = keyed_thief.api
    await api.create(*key_secret(keyed_thief))
    await api.patch_json(SECRETS, "one-key", keyed_thief.namespace, DATA)
    for data in ({"a_b_token": "Zm9v"}, {"a_c_token": "Zm9v"}):
        written = await api.apply(*shard(data=data), field_manager=MANAGER)
        assert written["data"] == data
    await keyed_thief.admin.delete(SECRETS, SHARD, CONTROLLER_NAMESPACE)
