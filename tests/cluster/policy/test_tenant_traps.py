"""Objects of a tenant that look like the controller's, and deletions that leave some behind."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from kube.client import Client, Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_PROCESSES, SECRETS, SERVICES, Resource
from tests.cluster.controller.test_services import GIB, METAL, ServiceNamespace
from tests.cluster.policy.test_tenant_token import account
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent

ENDPOINTS = Resource("", "v1", "endpoints", "Endpoints")
PORTS = [{"name": "http", "port": 8080, "protocol": "TCP"}]
TRAPS: dict[str, tuple[Resource, str, Obj]] = {
    "Secret": (SECRETS, "chat-token", {"type": "Opaque", "data": {"token": "dHJhcA=="}}),
    "Service": (SERVICES, "chat", {"spec": {"type": "ExternalName", "externalName": "thief.example"}}),
}
FORGED: dict[str, tuple[Resource, str, Obj, str]] = {
    "Secret": (
        SECRETS,
        "chat-token",
        {"type": "kubernetes.io/basic-auth", "data": {"username": "YQ==", "token": "dHJhcA=="}},
        "type Opaque only",
    ),
    "Service": (
        SERVICES,
        "chat",
        {"spec": {"ports": PORTS, "selector": {LABEL_SERVICE: "chat"}, "externalIPs": ["10.77.0.1"]}},
        "no external address",
    ),
}


@pytest.fixture
def cluster(client: Client, namespace: str, controller: Process) -> ServiceNamespace:
    assert controller.running
    return ServiceNamespace(client, namespace)


@pytest.fixture
async def tenant(plane: ControlPlane, client: Client, namespace: str) -> AsyncIterator[ServiceNamespace]:
    async with account(plane, client, namespace, "edit", "ClusterRole") as api:
        yield ServiceNamespace(api, namespace)


def metadata_of(namespace: str, name: str, **more: Any) -> Obj:
    return {"namespace": namespace, "name": name, "labels": {LABEL_MANAGED_BY: MANAGED_BY}, **more}


async def reports(cluster: ServiceNamespace, *words: str) -> None:
    """Wait until a condition of the service says all that."""

    async def reported() -> bool:
        conditions = (await cluster.service()).status.conditions
        return any(all(word in condition.message for word in words) for condition in conditions)

    await eventually(reported)


@pytest.mark.parametrize("kind", TRAPS)
async def test_object_that_was_there_before_is_not_adopted(
    cluster: ServiceNamespace, tenant: ServiceNamespace, kind: str
) -> None:
    resource, name, body = TRAPS[kind]
    made = await tenant.client.create(resource, {"metadata": metadata_of(tenant.namespace, name), **body})
    await tenant.make_host_model()
    await tenant.make_service(hardware=METAL)
    await reports(cluster, f"{kind} {cluster.namespace}/{name} exists and was not made by Pomona: delete it")
    assert await cluster.client.get(resource, name, cluster.namespace) == made
    await tenant.client.delete(resource, name, tenant.namespace)
    await cluster.reaches("WaitingForGPU", reason="NoHost")


@pytest.mark.parametrize("kind", FORGED)
async def test_object_with_a_forged_owner_makes_the_controller_write_nothing_that_it_may_not(
    cluster: ServiceNamespace, tenant: ServiceNamespace, controller: Process, kind: str
) -> None:
    """The tenant puts an object that names the service as its owner in the place of the one of the controller."""
    resource, name, body, says = FORGED[kind]
    await tenant.make_host_model()
    await tenant.make_service(hardware=METAL)
    await cluster.reaches("WaitingForGPU", reason="NoHost")
    owned = await cluster.client.get(resource, name, cluster.namespace)
    await controller.stop()
    await tenant.client.delete(resource, name, tenant.namespace)
    metadata = metadata_of(tenant.namespace, name, ownerReferences=owned["metadata"]["ownerReferences"])
    made = await tenant.client.create(resource, {"metadata": metadata, **body})
    controller.start()
    await reports(cluster, says)
    assert await cluster.client.get(resource, name, cluster.namespace) == made
    await tenant.client.delete(resource, name, tenant.namespace)
    await cluster.reaches("WaitingForGPU", reason="NoHost")


async def cascade(plane: ControlPlane, namespace: str, how: str) -> None:
    await plane.kubectl("delete", "isvc", "chat", f"--namespace={namespace}", f"--cascade={how}", "--wait=false")


@pytest.mark.parametrize("how", ["orphan", "foreground"])
async def test_no_deletion_of_a_service_leaves_a_process_on_a_host(
    plane: ControlPlane, cluster: ServiceNamespace, how: str
) -> None:
    async with FakeMetalAgent(cluster.client, "studio-1", 4 * GIB).running():
        await cluster.make_host_model()
        await cluster.make_service(hardware=METAL)
        await cluster.reaches("Ready")
        await cascade(plane, cluster.namespace, how)

        async def is_gone() -> bool:
            left = await cluster.client.list(METAL_PROCESSES, cluster.namespace)
            services = await cluster.client.list(INFERENCE_SERVICES, cluster.namespace)
            return not left.items and not services.items

        await eventually(is_gone)


async def test_endpoints_by_hand_lead_no_request_of_a_service_elsewhere(client: Client, namespace: str) -> None:
    """Kubernetes mirrors Endpoints into slices, but not those of a Service that selects pods, as a service's does."""
    bodies: dict[str, Obj] = {"chat": {"selector": {LABEL_SERVICE: "chat"}}, "bare": {}}
    for name, spec in bodies.items():
        await client.create(SERVICES, {"metadata": metadata_of(namespace, name), "spec": {"ports": PORTS, **spec}})
    subsets = [{"addresses": [{"ip": "10.77.152.9"}], "ports": PORTS}]
    for name in bodies:
        body = {"metadata": {"namespace": namespace, "name": name}, "subsets": subsets}
        await client.apply(ENDPOINTS, body, field_manager="thief")

    async def mirrored() -> set[str]:
        slices = (await client.list(ENDPOINT_SLICES, namespace)).items
        led = [endpoint_slice for endpoint_slice in slices if "10.77.152.9" in str(endpoint_slice["endpoints"])]
        return {endpoint_slice["metadata"]["labels"]["kubernetes.io/service-name"] for endpoint_slice in led}

    assert await eventually(mirrored) == {"bare"}
