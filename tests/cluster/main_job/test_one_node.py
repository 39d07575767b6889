"""Pods beside a ReadWriteOnce volume, with the real scheduler: the services of one Model share a node, and leave it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crds.meta import LABEL_SERVICE
from kube.client import Obj
from kube.resources import PODS
from tests.cluster.main_job.cluster import READY_SECONDS, Cluster
from tests.cluster.nodes import joined
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("gpu_node")
LEFT = "disk-1"
"""The node that pods leave."""
OTHERS = f"--selector=kubernetes.io/hostname!={LEFT}"
"""All other nodes."""


@pytest_asyncio.fixture
async def left(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[Process]:
    """The kubelet of a node that alone takes pods at first."""
    async with joined(plane, LEFT, tmp_path, watched) as kubelet:
        await plane.kubectl("cordon", OTHERS)
        try:
            yield kubelet
        finally:
            await plane.kubectl("uncordon", OTHERS)


async def list_pods(cluster: Cluster) -> list[Obj]:
    listed = await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=chat")
    return listed.items


async def serve_elsewhere(cluster: Cluster, *, replicas: int) -> None:
    """Wait until all replicas serve on another node."""

    async def moved() -> bool:
        nodes = [pod["spec"].get("nodeName") for pod in await list_pods(cluster) if pod["status"]["phase"] == "Running"]
        serving = [node for node in nodes if node != LEFT]
        assert len(serving) == replicas, nodes
        return len(set(serving)) == 1

    async def counted() -> bool:
        return (await cluster.get("chat")).status.ready_replicas == replicas

    await eventually(moved)
    await cluster.ready("chat")
    await eventually(counted)


async def nodes_of(cluster: Cluster, label: str) -> set[str]:
    listed = await cluster.client.list(PODS, cluster.namespace, label_selector=label)
    return {pod["spec"]["nodeName"] for pod in listed.items}


async def test_replicas_of_two_services_run_on_the_node_of_their_volume(cluster: Cluster) -> None:
    services = [cluster.service(name, "cpu", replicas=2) for name in ("chat", "other")]
    await cluster.apply(cluster.model(), *services)
    await cluster.ready("chat", "other")
    assert len(await nodes_of(cluster, f"{LABEL_SERVICE} in (chat, other)")) == 1


async def test_replicas_run_on_two_nodes_where_all_nodes_reach_the_volume(cluster: Cluster) -> None:
    spread = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    service = cluster.service("chat", "cpu", replicas=2, pod={"topologySpreadConstraints": [spread]})
    await cluster.apply(cluster.model(cache={"accessMode": "ReadWriteMany"}), service)
    await cluster.ready("chat")
    assert len(await nodes_of(cluster, f"{LABEL_SERVICE}=chat")) == 2


async def test_drained_node_is_left_at_once(cluster: Cluster, left: Process) -> None:
    """The scheduler tries the replica that waited for the earlier one only after minutes."""
    del left
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    assert [pod["spec"]["nodeName"] for pod in await list_pods(cluster)] == [LEFT]
    await cluster.kubectl("uncordon", OTHERS)
    await cluster.kubectl(
        "drain", LEFT, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={READY_SECONDS:.0f}s"
    )
    await serve_elsewhere(cluster, replicas=1)


async def test_lost_node_is_left_although_its_pods_stay(cluster: Cluster, left: Process) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", replicas=2))
    await cluster.ready("chat")
    lost = [pod["metadata"]["name"] for pod in await list_pods(cluster)]
    assert {pod["spec"]["nodeName"] for pod in await list_pods(cluster)} == {LEFT}
    await left.kill()
    await cluster.kubectl("cordon", LEFT)
    await cluster.kubectl("uncordon", OTHERS)
    # As Kubernetes' controller of lost nodes does after five minutes.
    await cluster.kubectl("delete", "pods", "--grace-period=1", "--wait=false", *lost)
    await serve_elsewhere(cluster, replicas=2)
    assert set(lost) < {pod["metadata"]["name"] for pod in await list_pods(cluster)}
