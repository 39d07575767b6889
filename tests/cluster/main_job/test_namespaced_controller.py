"""A controller of some namespaces, with the roles that docs/security.md names for it and no others."""

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from kube.client import Client
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_PROCESSES,
    MODELS,
    NODES,
    POD_MONITORS,
    SECRETS,
    SERVICES,
)
from tests.cluster.main_job.cluster import Cluster, condition
from tests.cluster.shared_controller import SharedController
from tests.controlplane.members import controller_may
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.namespaces import open_namespace
from tests.support.shell import Shell

METRICS = "127.0.0.1:18090"
DOCUMENT = (CHECKOUT / "docs" / "security.md").read_text()
SECTION = DOCUMENT.partition("**A controller of some namespaces.**")[2].partition("| where | right |")[0]
(COMMANDS,) = list_blocks(SECTION)


@pytest.fixture
async def second(plane: ControlPlane) -> AsyncIterator[str]:
    """Another namespace of the controller."""
    async with open_namespace(plane) as name:
        yield name


@pytest.fixture
def other(plane: ControlPlane, client: Client, second: str, files: FileServer, tmp_path: Path) -> Cluster:
    """The other namespace, as a user handles it."""
    return Cluster(plane, client, second, files, tmp_path)


@pytest.fixture
async def foreign(plane: ControlPlane, client: Client, files: FileServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A namespace that the controller is not started for."""
    async with open_namespace(plane) as name:
        yield Cluster(plane, client, name, files, tmp_path)


@pytest.fixture
async def bound(
    plane: ControlPlane, namespace: str, second: str, pod_monitors: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[None]:
    """The rights of the document, in both namespaces."""
    del pod_monitors  # a kind that the controller looks for when it starts
    shell = Shell(plane, tmp_path_factory.mktemp("shell"))
    commands = COMMANDS.replace("NAMESPACE", f"{namespace},{second}")
    grant, *_ = commands.replace("\\\n", "").splitlines()
    try:
        await shell.run(commands)
        # The rights of three bindings, which the controller uses at once.
        for name in (namespace, second):
            await eventually(partial(controller_may, plane, "watch", INFERENCE_SERVICES, name))
            await eventually(partial(controller_may, plane, "create", DEPLOYMENTS, name))
        await eventually(partial(controller_may, plane, "list", NODES))
        yield
    finally:
        await plane.apply(CHECKOUT / "deploy" / "install" / "rbac.yaml")
        await shell.run(grant.replace("kubectl apply --server-side", "kubectl delete"))


@pytest.fixture
async def controller(
    bound: None, namespace: str, second: str, shared_controller: SharedController
) -> AsyncIterator[Process]:
    """A controller of two namespaces; it ends before its rights do."""
    del bound  # the rights, before the controller
    scope = (f"--namespace={namespace}", f"--namespace={second}")
    yield await shared_controller.lend_new(*scope, f"--metrics-bind-address={METRICS}")
    await shared_controller.end()


async def test_controller_of_some_namespaces_serves_there_in_pods_and_touches_nothing_else(
    plane: ControlPlane, cluster: Cluster, other: Cluster, foreign: Cluster, controller: Process
) -> None:
    bindings = (await plane.kubectl("get", "clusterrolebindings", "--output=name")).split()
    assert [name.partition("/")[2] for name in bindings if "/pomona-controller" in name] == ["pomona-controller-nodes"]
    for tenant in (foreign, cluster, other):
        await tenant.apply(tenant.model(), tenant.service("chat", "cpu"))
    await cluster.apply(cluster.service("on-mac", "metal"))
    await cluster.ready("chat")
    await other.ready("chat")
    for tenant in (cluster, other):
        answer = await tenant.ask("chat")
        assert (answer.status, answer.text.startswith("Hello from a tiny model")) == (200, True)
        assert (await tenant.ask("chat", token="wrong")).status == 401

    refused = condition(await cluster.wait_for_phase("on-mac", "Failed", "HostsOutOfScope"))
    assert "set hardware.accelerator to one of amd, cpu, " in refused.message
    assert await cluster.names(METAL_PROCESSES) == []
    assert await cluster.names(POD_MONITORS) == ["chat"]
    # An edit and a deletion are followed, too.
    await other.edit("chat", replicas=2)
    await eventually(lambda: has_replicas(other, 2))
    await other.kubectl("delete", "isvc", "chat")
    await eventually(lambda: has_replicas(other, 0))

    for resource in (INFERENCE_SERVICES, MODELS):
        assert ["status" in item for item in (await foreign.client.list(resource, foreign.namespace)).items] == [False]
    for resource in (JOBS, SERVICES, SECRETS):
        assert await foreign.names(resource) == []
    assert await refused_calls() == []
    log = controller.tail(1000).splitlines()
    assert [line for line in log if re.search("forbidden|refused|kopf_ended", line, re.IGNORECASE)] == []


async def has_replicas(cluster: Cluster, count: int) -> bool:
    return len(await cluster.replicas("chat")) == count


async def refused_calls() -> list[str]:
    """Return the metrics of calls that the API server refused."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{METRICS}/metrics") as response:
        lines = (await response.text()).splitlines()
    assert any('code="200"' in line for line in lines)
    return [line for line in lines if re.match(r'rest_client_requests_total\{code="40[13]"', line)]
