"""The highest priority of a namespace: the platform team's word, by a label that tenants cannot edit."""

import pytest

from crds.meta import GROUP
from kube.client import Client, Obj
from kube.errors import ApiError, Forbidden
from kube.resources import INFERENCE_SERVICES, NAMESPACES
from tests.cluster.policy.test_stolen_controller_token import Thief, thief
from tests.cluster.policy.test_tenant_token import tenant
from tests.support.eventually import eventually
from tests.support.refused_manifests import make_manifest

__all__ = ["tenant", "thief"]

LIMIT = f"{GROUP}/max-priority"


async def limit(admin: Client, namespace: str, value: str) -> None:
    """Label the namespace, and wait until the API server's policies see it: they read a copy of the Namespace."""
    patch = {"metadata": {"labels": {LIMIT: value}}}
    await admin.patch_merge(NAMESPACES, namespace, None, patch, field_manager="admin")

    async def is_seen() -> bool:
        message = await refusal(admin, namespace)
        return f"use {value} or a lower one" in message or f"max-priority={value} " in message

    await eventually(is_seen)


async def refusal(api: Client, namespace: str) -> str:
    """Return why a critical service may not be created; empty if it may."""
    try:
        await api.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace, "probe", priority="critical"))
    except ApiError as error:
        return error.message
    await api.delete(INFERENCE_SERVICES, "probe", namespace)
    return ""


def service(namespace: str, priority: str | None, name: str = "mine") -> Obj:
    return make_manifest(INFERENCE_SERVICES, namespace, name, priority=priority)


def state(priority: str) -> list[Obj]:
    return [{"op": "add", "path": "/spec/priority", "value": priority}]


async def test_tenant_states_no_priority_above_the_limit(tenant: Client, client: Client, namespace: str) -> None:
    await limit(client, namespace, "normal")
    for priority in ("critical", "high"):
        with pytest.raises(
            Forbidden, match=rf"priority {priority} is not allowed in namespace {namespace}: use normal"
        ):
            await tenant.create(INFERENCE_SERVICES, service(namespace, priority))
    await tenant.create(INFERENCE_SERVICES, service(namespace, None))
    for priority in ("low", "batch", "normal"):
        await tenant.patch_json(INFERENCE_SERVICES, "mine", namespace, state(priority))
    with pytest.raises(Forbidden, match=r"priority high is not allowed"):
        await tenant.patch_json(INFERENCE_SERVICES, "mine", namespace, state("high"))


async def test_default_priority_is_limited_too(tenant: Client, client: Client, namespace: str) -> None:
    await limit(client, namespace, "low")
    with pytest.raises(Forbidden, match=r"priority normal is not allowed"):
        await tenant.create(INFERENCE_SERVICES, service(namespace, None))
    await tenant.create(INFERENCE_SERVICES, service(namespace, "low"))


async def test_namespace_without_the_label_has_the_limit_of_the_chart(tenant: Client, namespace: str) -> None:
    await tenant.create(INFERENCE_SERVICES, service(namespace, "critical"))


async def test_label_that_is_no_priority_allows_none(tenant: Client, client: Client, namespace: str) -> None:
    await limit(client, namespace, "urgent")
    with pytest.raises(Forbidden, match=r"max-priority=urgent .* is no priority: ask the platform team"):
        await tenant.create(INFERENCE_SERVICES, service(namespace, "batch"))


async def test_tenant_does_not_raise_its_limit(tenant: Client, namespace: str) -> None:
    with pytest.raises(Forbidden, match="cannot patch"):
        await tenant.patch_merge(
            NAMESPACES, namespace, None, {"metadata": {"labels": {LIMIT: "critical"}}}, field_manager="tenant"
        )


async def test_lower_limit_holds_up_no_edit_of_what_was_there(thief: Thief, tenant: Client) -> None:
    """A service of a higher priority goes on: it can be edited, scaled, labelled by the controller, and deleted."""
    namespace = thief.namespace
    await thief.admin.create(INFERENCE_SERVICES, service(namespace, "critical"))
    await limit(thief.admin, namespace, "low")
    await tenant.patch_json(
        INFERENCE_SERVICES, "mine", namespace, [{"op": "add", "path": "/spec/replicas", "value": 2}]
    )
    labels = {f"{GROUP}/a": "b"}
    await thief.api.patch_json(
        INFERENCE_SERVICES, "mine", namespace, [{"op": "add", "path": "/metadata/labels", "value": labels}]
    )
    await tenant.patch_json(INFERENCE_SERVICES, "mine", namespace, state("low"))
    with pytest.raises(Forbidden, match="use low"):
        await tenant.patch_json(INFERENCE_SERVICES, "mine", namespace, state("critical"))
    await tenant.delete(INFERENCE_SERVICES, "mine", namespace)
