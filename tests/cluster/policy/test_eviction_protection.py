"""Eviction protection by namespace: the platform team's word, by a label that tenants cannot edit."""

import pytest

from crds.meta import GROUP
from kube.client import Client
from kube.errors import ApiError, Forbidden
from kube.resources import INFERENCE_SERVICES, NAMESPACES
from tests.cluster.policy.test_tenant_token import tenant
from tests.support.eventually import eventually
from tests.support.refused_manifests import make_manifest

__all__ = ["tenant"]

LABEL = f"{GROUP}/allow-eviction-protection"


async def allow(admin: Client, namespace: str, value: str, *, is_allowed: bool) -> None:
    """Label the namespace, and wait until the API server's policies see it: they read a copy of the Namespace."""
    patch = {"metadata": {"labels": {LABEL: value}}}
    await admin.patch_merge(NAMESPACES, namespace, None, patch, field_manager="admin")

    async def is_seen() -> bool:
        try:
            await create(admin, namespace, "probe")
        except ApiError:
            return not is_allowed
        await admin.delete(INFERENCE_SERVICES, "probe", namespace)
        return is_allowed

    await eventually(is_seen)


async def create(api: Client, namespace: str, name: str, *, protects: bool = True) -> None:
    await api.create(
        INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace, name, evictionProtection=protects)
    )


async def edit(api: Client, namespace: str, name: str, field: str, value: object) -> None:
    operation = {"op": "add", "path": f"/spec/{field}", "value": value}
    await api.patch_json(INFERENCE_SERVICES, name, namespace, [operation])


async def test_namespace_without_the_label_goes_by_the_chart(tenant: Client, namespace: str) -> None:
    await create(tenant, namespace, "mine")


@pytest.mark.parametrize("value", ["false", "", "yes"])
async def test_tenant_protects_nothing_where_the_label_does_not_allow_it(
    tenant: Client, client: Client, namespace: str, value: str
) -> None:
    await allow(client, namespace, value, is_allowed=False)
    message = rf"evictionProtection is not allowed in namespace {namespace}: remove it, or ask .* {LABEL}=true"
    with pytest.raises(Forbidden, match=message):
        await create(tenant, namespace, "mine")
    await create(tenant, namespace, "mine", protects=False)
    with pytest.raises(Forbidden, match=message):
        await edit(tenant, namespace, "mine", "evictionProtection", value=True)
    await allow(client, namespace, "true", is_allowed=True)
    await edit(tenant, namespace, "mine", "evictionProtection", value=True)


async def test_what_was_protected_before_can_be_edited(tenant: Client, client: Client, namespace: str) -> None:
    await create(tenant, namespace, "mine")
    await allow(client, namespace, "false", is_allowed=False)
    await edit(tenant, namespace, "mine", "replicas", value=2)
    await edit(tenant, namespace, "mine", "evictionProtection", value=False)
    with pytest.raises(Forbidden):
        await edit(tenant, namespace, "mine", "evictionProtection", value=True)


async def test_tenant_allows_itself_nothing(tenant: Client, namespace: str) -> None:
    patch = {"metadata": {"labels": {LABEL: "true"}}}
    with pytest.raises(Forbidden, match="cannot patch"):
        await tenant.patch_merge(NAMESPACES, namespace, None, patch, field_manager="tenant")
