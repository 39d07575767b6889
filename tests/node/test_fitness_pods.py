"""Node agents, the scheduler with its extender, and the density API as the chart's pods on real nodes."""

import json
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import pytest_asyncio

from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.resources import NODE_FITNESSES, NODES, PODS
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.plane import ControlPlane
from tests.node.preparation import PAUSE, SCHEDULER
from tests.node.real_node import RealNode
from tests.support.eventually import eventually

DEVICE = "nvidia.com/gpu"
WAIT_SECONDS = 120.0


@pytest_asyncio.fixture
async def installed(plane: ControlPlane) -> AsyncIterator[None]:
    """The scheduler and the density API beside what the chart runs anyway, all ready."""
    values = ("scheduler.enabled=true", f"scheduler.image={SCHEDULER}", "console.enabled=true")
    settings = [f"--set={value}" for value in values]
    await run_helm("upgrade", "pomona", str(CHART), "--reuse-values", "--wait", *settings, plane=plane)
    yield
    settings = ["--set=scheduler.enabled=false", "--set=console.enabled=false"]
    await run_helm("upgrade", "pomona", str(CHART), "--reuse-values", "--wait", *settings, plane=plane)


async def list_pods(client: Client, component: str) -> list[Obj]:
    """Return the pods of a part of Pomona that are not about to end."""
    listed = await client.list(PODS, CONTROLLER_NAMESPACE, label_selector=f"app.kubernetes.io/component={component}")
    return [item for item in listed.items if "deletionTimestamp" not in item["metadata"]]


def count_restarts(pods: list[Obj]) -> list[int]:
    return [status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"]]


async def test_node_agents_report_within_their_limit_of_memory(client: Client, nodes: dict[str, RealNode]) -> None:
    """The measurement of bandwidth is the most that an agent ever needs; the kernel would end it above its limit."""

    async def reported(name: str) -> bool:
        status = (await client.get(NODE_FITNESSES, name)).get("status", {})
        return bool(status.get("memoryBandwidthBytesPerSecond"))

    for name in nodes:
        await eventually(lambda name=name: reported(name), WAIT_SECONDS)  # type: ignore[misc]
    assert count_restarts(await list_pods(client, "node-agent")) == [0, 0]


async def test_scheduler_asks_its_extender_for_a_pod_with_a_device(
    plane: ControlPlane, client: Client, namespace: str, installed: None
) -> None:
    del installed
    await set_devices(plane, "cpu-2", "1")
    try:
        await client.create(PODS, describe_pod(namespace))

        async def runs() -> bool:
            pod = await client.get(PODS, "train", namespace)
            return (pod["spec"].get("nodeName"), pod["status"]["phase"]) == ("cpu-2", "Running")

        await eventually(runs, WAIT_SECONDS)
        pods = await list_pods(client, "scheduler")
        metrics = [(await ask(pod, 8080, "/metrics")).text for pod in pods]
        asked = re.compile(r'^pomona_extender_requests_total\{[^}]*verb="filter"', re.MULTILINE)
        assert any(asked.search(metric) for metric in metrics), metrics
        assert count_restarts(pods) == [0] * 4
        await client.delete(PODS, "train", namespace)
    finally:
        await set_devices(plane, "cpu-2", None)


async def test_density_api_answers_a_user_of_the_cluster(
    plane: ControlPlane, client: Client, namespace: str, nodes: dict[str, RealNode], installed: None
) -> None:
    del installed
    await plane.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    token = (await plane.kubectl("create", "token", "reader", "-n", namespace)).strip()
    (pod,) = await list_pods(client, "console")
    assert (await ask(pod, 8090, "/api/v1/density/nodes", token)).status == 403
    bound = ("clusterrolebinding", f"density-{namespace}", "--clusterrole=pomona-density-reader")
    await plane.kubectl("create", *bound, f"--serviceaccount={namespace}:reader")

    async def shows_nodes() -> bool:
        answer = await ask(pod, 8090, "/api/v1/density/nodes", token)
        return answer.status == 200 and {load["nodeName"] for load in json.loads(answer.text)["nodes"]} == set(nodes)

    try:
        await eventually(shows_nodes)
        assert count_restarts([pod]) == [0]
    finally:
        await plane.kubectl("delete", "clusterrolebinding", f"density-{namespace}")


class Answer(NamedTuple):
    """Answer of a pod."""

    status: int
    text: str


async def ask(pod: Obj, port: int, path: str, token: str = "") -> Answer:
    """Ask a pod at its address."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://{pod['status']['podIP']}:{port}{path}"
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        return Answer(response.status, await response.text())


async def set_devices(plane: ControlPlane, node: str, count: str | None) -> None:
    """State how many devices a node has, as no device plugin does here; a kubelet keeps what it does not know."""
    await plane.request("PATCH", f"{NODES.path(None, node)}/status", {"status": {"capacity": {DEVICE: count}}})


def describe_pod(namespace: str) -> Obj:
    """Return a pod of the chart's scheduler that wants a device."""
    container = {"name": "train", "image": PAUSE, "resources": {"limits": {DEVICE: "1"}}}
    spec = {"schedulerName": "pomona-scheduler", "containers": [container], "terminationGracePeriodSeconds": 0}
    return {"metadata": {"name": "train", "namespace": namespace}, "spec": spec}
