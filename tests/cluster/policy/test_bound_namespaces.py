"""A controller that writes, and reads Secrets, in some namespaces only, as docs/security.md describes it."""

import re
from collections.abc import AsyncIterator

import pytest

from kube import credentials
from kube.client import Client, connect
from kube.errors import Forbidden
from kube.resources import MODELS, SECRETS, SERVICES
from tests.cluster.controller.test_services import METAL, ServiceNamespace
from tests.cluster.shared_controller import SharedController
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE, controller_may
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.eventually import eventually
from tests.support.namespaces import open_namespace

RBAC = CHECKOUT / "deploy" / "install" / "rbac.yaml"
DOCUMENT = (CHECKOUT / "docs" / "security.md").read_text().replace("\\\n", "")
SECTION = DOCUMENT.partition("**Held to some namespaces.**")[2].partition("**A controller of some namespaces.**")[0]
COMMANDS = re.findall(r"^kubectl .*workloads.*$", SECTION, re.MULTILINE)


@pytest.fixture
async def bound(plane: ControlPlane, namespace: str) -> AsyncIterator[str]:
    """Bind the controller to the namespace by the commands of the document."""
    narrow, bind = COMMANDS
    try:
        for command in (narrow, bind.replace("NAMESPACE", namespace)):
            await plane.kubectl(*command.split()[1:])
        await eventually(lambda: writes_only_in(plane, namespace))
        yield namespace
    finally:
        await plane.apply(RBAC)
        # Otherwise the next test would be refused by rights that the API server has not learned yet.
        await eventually(lambda: controller_may(plane, "create", SECRETS))


@pytest.fixture
async def unbound(plane: ControlPlane) -> AsyncIterator[str]:
    """Another namespace."""
    async with open_namespace(plane) as name:
        yield name


@pytest.fixture
async def controller(bound: str, shared_controller: SharedController) -> Process:
    """A new controller: an open watch sees all namespaces until it ends, whatever the rights are by then."""
    del bound  # the rights, before the controller
    return await shared_controller.lend_new()


async def test_controller_serves_where_it_is_bound_and_reads_no_secret_elsewhere(
    plane: ControlPlane, client: Client, bound: str, unbound: str, controller: Process
) -> None:
    del controller
    here, there = ServiceNamespace(client, bound), ServiceNamespace(client, unbound)
    for service_namespace in (here, there):
        await service_namespace.make_host_model()
        await service_namespace.make_service(hardware=METAL)
    await client.create(SECRETS, {"metadata": {"namespace": unbound, "name": "bank"}})
    source = {"source": "http://models.example/tiny.gguf", "sourceSecretRef": {"name": "bank"}}
    await there.make(MODELS, "gated", **source)

    await here.reaches("WaitingForGPU", reason="NoHost")
    assert await here.exists(SECRETS, "chat-token")
    refused = await there.reaches("Failed", reason="Forbidden")
    assert f'cannot create resource "secrets" in API group "" in the namespace "{unbound}"' in str(refused.status)
    assert not await there.exists(SERVICES, "chat")
    await eventually(lambda: says_that_its_secret_is_not_read(there))
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    async with connect(credentials.load(kubeconfig)) as thief:
        await thief.get(SECRETS, "chat-token", bound)
        for name, namespace in (("bank", unbound), ("admin", "kube-system")):
            with pytest.raises(Forbidden, match='cannot get resource "secrets"'):
                await thief.get(SECRETS, name, namespace)

    # It notices by itself that it is bound to another namespace.
    await plane.kubectl(*COMMANDS[1].replace("NAMESPACE", unbound).split()[1:])
    await there.reaches("WaitingForGPU", reason="NoHost")


async def writes_only_in(plane: ControlPlane, namespace: str) -> bool:
    here = await controller_may(plane, "create", SECRETS, namespace)
    return here and not await controller_may(plane, "create", SECRETS)


async def says_that_its_secret_is_not_read(place: ServiceNamespace) -> bool:
    conditions = (await place.client.get(MODELS, "gated", place.namespace)).get("status", {}).get("conditions", [])
    return any(condition["reason"] == "SecretForbidden" for condition in conditions)
