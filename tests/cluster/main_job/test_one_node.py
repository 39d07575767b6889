"""Pods beside a ReadWriteOnce volume, with the real scheduler: the services of one Model share a node."""

import pytest

from crds.meta import LABEL_SERVICE
from kube.resources import PODS
from tests.cluster.main_job.cluster import Cluster

pytestmark = pytest.mark.usefixtures("gpu_node")


async def nodes_of(cluster: Cluster, label: str) -> set[str]:
    found = await cluster.client.list(PODS, cluster.namespace, label_selector=label)
    return {pod["spec"]["nodeName"] for pod in found.items}


@pytest.mark.parametrize(("mode", "nodes"), [("ReadWriteOnce", 1), ("ReadWriteMany", 2)])
async def test_replicas_of_two_services_run_where_their_volume_can_be(cluster: Cluster, mode: str, nodes: int) -> None:
    names = ("chat", "other")
    services = [cluster.service(name, "cpu", replicas=2) for name in names]
    await cluster.apply(cluster.model(cache={"accessMode": mode}), *services)
    await cluster.ready(*names)
    assert len(await nodes_of(cluster, f"{LABEL_SERVICE} in ({', '.join(names)})")) == nodes
