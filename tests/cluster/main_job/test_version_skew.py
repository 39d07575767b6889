"""Controller and agent that are one release apart, on either side: both serve, and a host gets only what it knows."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from controller.hosts.grants import grants_name
from crds.features import AGENT_FEATURES
from crds.meta import HOSTS_NAMESPACE, LABEL_SERVICE, QUEUE_GATE
from kube.client import Client
from kube.resources import DEPLOYMENTS, METAL_HOSTS, PODS, ROLE_BINDINGS, ROLES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, READY_SECONDS, Cluster, EndlessStream, condition
from tests.cluster.shared_controller import SharedController
from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.previous_version import marked, unpack

pytestmark = pytest.mark.long

PREVIOUS = "previous"
STREAMS = 32
TOKENS = 20000
"""Tokens of one answer: all of them together take minutes, an update takes seconds."""
OPTIONS = ("--memory-budget", str(64 * GIB))


@pytest.fixture
async def controller(
    request: pytest.FixtureRequest,
    plane: ControlPlane,
    shared_controller: SharedController,
    tmp_path: Path,
    watched: list[Process],
) -> AsyncIterator[Process]:
    """The controller of this version, or that of the previous one with the CRDs of that one."""
    if getattr(request, "param", None) != PREVIOUS:
        yield await shared_controller.lend()
        return
    await shared_controller.end()
    # The previous version does not take over what a former host of this name had, but waits for the garbage collector.
    for kind in (ROLES, ROLE_BINDINGS):
        for each in (await plane.request("GET", kind.path(HOSTS_NAMESPACE)))["items"]:
            if (name := each["metadata"]["name"]).startswith(grants_name("")):
                await plane.request("DELETE", kind.path(HOSTS_NAMESPACE, name), accept={HTTPStatus.NOT_FOUND})
    previous = unpack()
    await plane.apply(previous.folder / "crds")
    process = previous.controller(await members.controller(plane, tmp_path))
    watched.append(process)
    process.start()
    yield process
    watched.remove(process)
    await process.stop()
    await members.delete_leadership(plane)
    await plane.apply(CHECKOUT / "crds")
    await members.wait_for_kinds(plane)


async def test_previous_agent_serves_and_is_not_given_what_it_does_not_know(
    cluster: Cluster, client: Client, idle_host: StartMetalHost, watched: list[Process]
) -> None:
    host = await idle_host("studio-1", *OPTIONS)
    old = unpack().agent(host)
    watched.append(old)
    old.start()
    try:
        await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
        await cluster.ready("chat")
        assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
        assert "features" not in (await client.get(METAL_HOSTS, "studio-1"))["status"]

        # The release of the agent knows nothing of protection, so that it would be without effect there.
        await cluster.apply(cluster.service("protected", "metal", evictionProtection=True))
        found = await cluster.wait_for_phase("protected", "WaitingForGPU", "AgentTooOld")
        assert "studio-1" in condition(found).message
        await cluster.apply(cluster.service("unprotected", "metal"))
        await cluster.ready("unprotected")
        assert condition(await cluster.get("protected")).reason == "AgentTooOld"
    finally:
        watched.remove(old)
        await old.kill()


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_update_of_controller_agent_and_proxy_breaks_none_of_32_streams(
    plane: ControlPlane,
    cluster: Cluster,
    *,
    client: Client,
    idle_host: StartMetalHost,
    shared_controller: SharedController,
    controller: Process,
    watched: list[Process],
) -> None:
    host = await idle_host("studio-1", *OPTIONS)
    previous = unpack()
    old = previous.agent(host)
    watched.append(old)
    old.start()
    slots: dict[str, Any] = {"contextLength": TOKENS + 500, "parallel": STREAMS}
    on_host, in_pod = cluster.service("by-host", "metal", **slots), cluster.service("by-pod", "cpu")
    await cluster.apply(cluster.model(file="loop.gguf"), on_host, in_pod)
    await cluster.ready("by-host", "by-pod")
    (url,) = await cluster.urls("by-host")
    token = await cluster.token("by-host")
    streams = [EndlessStream(url, token, TOKENS) for _ in range(STREAMS)]
    before = marked(host.state_folder)
    (pod,) = await cluster.engines("by-pod")
    async with running(*(each.run() for each in streams)):
        await eventually(lambda: all(each.lines > 0 for each in streams))
        await plane.apply(CHECKOUT / "crds", CHECKOUT / "deploy" / "install" / "rbac.yaml")
        await controller.stop()
        await shared_controller.lend_new()
        await old.stop()
        watched.remove(old)
        host.agent.start()

        async def is_updated() -> bool:
            status = (await client.get(METAL_HOSTS, "studio-1"))["status"]
            proxies = [each for each in marked(host.state_folder) - before if not previous.runs(each)]
            return status.get("features") == list(AGENT_FEATURES) and "controllerVersion" in status and bool(proxies)

        await eventually(is_updated)
        await asyncio.gather(*(each.flows() for each in streams))
        assert [each.has_ended for each in streams] == [False] * STREAMS, "the update took longer than the answers"
    # The pod of the previous version has no proxy: it is replaced, and the next one is ready before it ends.
    await cluster.ready("by-pod")
    await eventually(lambda: not is_alive(pod))
    assert (await cluster.ask("by-pod")).status == 200
    assert len(before & marked(host.state_folder)) >= 1, "the engine is the same"


@pytest.mark.usefixtures("gpu_node")
@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_update_that_brings_queue_and_proxy_replaces_a_pod_once(
    plane: ControlPlane, cluster: Cluster, client: Client, shared_controller: SharedController, controller: Process
) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "nvidia"))
    await cluster.ready("chat")
    pods = await serving_pods(cluster)
    await plane.apply(CHECKOUT / "crds", CHECKOUT / "deploy" / "install" / "rbac.yaml")
    await controller.stop()
    await shared_controller.lend_new()

    async def is_replaced() -> bool:
        return len(serving := await serving_pods(cluster)) == 1 and not serving & pods

    await eventually(is_replaced, READY_SECONDS)
    await cluster.ready("chat")
    updated = await client.get(DEPLOYMENTS, "chat", cluster.namespace)
    assert updated["spec"]["template"]["spec"]["schedulingGates"] == [{"name": QUEUE_GATE}]
    assert updated["spec"]["progressDeadlineSeconds"] == 2147483647
    # Fields that the previous version does not know restart nothing.
    (name,) = await serving_pods(cluster)
    await cluster.edit("chat", evictionProtection=True, priority="high")
    await cluster.ready("chat")
    assert await serving_pods(cluster) == {name}
    admitted = (await client.get(PODS, name, cluster.namespace))["spec"]
    required = admitted["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchFields"] for term in required["nodeSelectorTerms"]] == [
        [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]
    ]


async def serving_pods(cluster: Cluster) -> set[str]:
    """Return the pods of `chat` that are not ending."""
    found = await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=chat")
    return {each["metadata"]["name"] for each in found.items if "deletionTimestamp" not in each["metadata"]}


@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_agent_serves_for_the_previous_controller_and_its_resources(
    plane: ControlPlane, cluster: Cluster, client: Client, metal_host: StartMetalHost, controller: Process
) -> None:
    host = await metal_host("studio-1", *OPTIONS)
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    assert controller.running
    status = (await client.get(METAL_HOSTS, "studio-1"))["status"]
    # The API server refuses a status with a field that it does not know: the agent leaves it out.
    assert (status["inspects"], "features" in status) == (True, False)
    assert "status_fields_unknown" in host.agent.tail(100)

    await plane.apply(CHECKOUT / "crds")
    await host.agent.stop()
    host.agent.start()

    async def reports_features() -> bool:
        found = (await client.get(METAL_HOSTS, "studio-1"))["status"].get("features")
        return bool(found == list(AGENT_FEATURES))

    await eventually(reports_features)
    assert (await cluster.ask("chat")).status == 200
