"""The catalog follows a list of many slices at once, and each change of one; weights follow the speeds of nodes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from gateway.cluster import catalog
from gateway.cluster.cluster_feed import ClusterFeed
from gateway.cluster.limiter import Limiter
from gateway.cluster.routed_service import RoutedService
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.request_body import BodyBudget
from kube.resources import INFERENCE_SERVICES, ObjectKey
from tests.unit.gateway.cluster.running_gateway import FedCluster

MAC, GPU, OTHER = (f"http://10.0.0.{number}:18000" for number in (1, 2, 3))


@pytest.fixture
async def cluster() -> AsyncIterator[FedCluster]:
    async with UpstreamPool() as pool:
        shared = SharedResources(BodyBudget(), asyncio.Lock(), pool, HealthMonitor(), KeepAlive())
        yield FedCluster(ClusterFeed(Limiter()), shared)


async def find_chat(cluster: FedCluster) -> RoutedService:
    """Return the service after this pass of the loop, which brings changes of its endpoints."""
    await asyncio.sleep(0)
    return cluster.feed.catalog.services[ObjectKey("team-a", "chat")]


async def read_weights(cluster: FedCluster) -> dict[str, float]:
    """Return the weight of each endpoint that takes requests, by its URL."""
    group = (await find_chat(cluster))._group
    return {endpoint.uid.partition(" ")[2]: endpoint.weight for endpoint in group.endpoints}


async def test_slices_of_one_pass_are_read_once(cluster: FedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    map_urls_to_nodes = catalog.map_urls_to_nodes

    def count(slices: Sequence[Any]) -> dict[str, str]:
        reads.append(len(slices))
        return map_urls_to_nodes(slices)

    monkeypatch.setattr(catalog, "map_urls_to_nodes", count)
    cluster.serve("team-a", "chat", *[f"http://10.0.0.{number}:18000" for number in range(1, 51)])
    service = await find_chat(cluster)
    assert (reads, len(service.config.backends)) == ([50], 50)

    cluster.put_slice("team-a", "chat", "chat.host7", "http://10.0.0.8:18000", ready=False)
    await asyncio.sleep(0)
    assert (reads, len(service.config.backends)) == ([50, 50], 49)


async def test_endpoints_of_hosts_and_pods_are_weighted_by_the_speed_of_their_node(cluster: FedCluster) -> None:
    cluster.serve("team-a", "chat", MAC, node_speeds={"host0": "30.0", "gpu-a": "120"})
    cluster.put_slice("team-a", "chat", "chat-abc12", GPU, node="gpu-a")
    cluster.put_slice("team-a", "chat", "chat-abc13", OTHER, node="unknown")
    weights = await read_weights(cluster)
    assert weights == pytest.approx({MAC: 30, GPU: 120, OTHER: 60}, rel=0.05)

    cluster.put_slice("team-a", "chat", "chat-abc12", GPU, node="gpu-a", ready=False)
    assert await read_weights(cluster) == {url: weights[url] for url in (MAC, OTHER)}, "only its conversations move"


async def test_endpoints_without_speeds_have_the_same_weight(cluster: FedCluster) -> None:
    cluster.serve("team-a", "chat", MAC, GPU)
    assert await read_weights(cluster) == {MAC: 1.0, GPU: 1.0}


async def test_endpoint_keeps_its_work_and_health_when_its_weight_changes(cluster: FedCluster) -> None:
    cluster.serve("team-a", "chat", MAC, GPU)
    service = await find_chat(cluster)
    before, former = service._group, service._group.endpoints[0]
    former.begin_request(1000, 0.0)
    former.health.note_unreachable(0.0)
    cluster.serve("team-a", "chat", MAC, GPU, node_speeds={"host0": "30.0", "host1": "120"})
    assert (await find_chat(cluster))._group is not before, "the orders of conversations are kept by group"
    endpoint = service._group.endpoints[0]
    assert endpoint is former
    assert (endpoint.outstanding_tokens, endpoint.health.ejected_until > 0) == (1000, True)
    assert endpoint.weight == pytest.approx(30, rel=0.05)
    cluster.serve("team-a", "chat", MAC, GPU)
    assert await read_weights(cluster) == {MAC: 1.0, GPU: 1.0}


async def test_only_a_status_that_changes_a_weight_rebuilds_the_group(
    cluster: FedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"host0": "30.0", "host1": "120"}
    cluster.serve("team-a", "chat", MAC, GPU, node_speeds=speeds)
    service = await find_chat(cluster)
    group, reads = service._group, list[Sequence[Any]]()
    monkeypatch.setattr(catalog, "map_urls_to_nodes", reads.append)

    def write_status(phase: str, speeds: Mapping[str, str]) -> None:
        shown = [{"node": node, "tokensPerSecond": rate} for node, rate in speeds.items()]
        status = {"phase": phase, "requestsPerMinute": 7, "nodeSpeeds": shown}
        cluster.put(INFERENCE_SERVICES, "team-a", "chat", spec={}, status=status)

    write_status("Degraded", speeds)
    assert ((await find_chat(cluster)).watched.status.phase, reads) == ("Degraded", [])
    assert service._group is group

    monkeypatch.undo()
    write_status("Ready", {"host0": "30.1", "host1": "119"})
    assert (await find_chat(cluster))._group is group

    write_status("Ready", {"host0": "60", "host1": "120"})
    assert await read_weights(cluster) == pytest.approx({MAC: 60, GPU: 120}, rel=0.05)


@pytest.mark.parametrize("false", ["0", "", "nan", "inf", "-5", "1e999", "much", "9999999999999999", "0.000001"])
async def test_false_speed_takes_no_endpoint_its_conversations(cluster: FedCluster, false: str) -> None:
    cluster.serve("team-a", "chat", MAC, GPU, OTHER, node_speeds={"host0": "30.0", "host1": false, "host2": "40"})
    weights = await read_weights(cluster)
    assert min(weights.values()) > 0
    assert max(weights.values()) / min(weights.values()) < 15


async def test_one_url_at_two_nodes_has_one_weight_in_every_replica(cluster: FedCluster) -> None:
    """Slices may be forged in their namespace; the order in which they come must not matter."""
    speeds = {"a": "30", "b": "120"}
    read = []
    for nodes in ("ab", "ba"):
        cluster.serve("team-a", "chat", node_speeds=speeds)
        for number, node in enumerate(nodes):
            cluster.put_slice("team-a", "chat", f"chat-{number}", MAC, node=node)
        read.append(await read_weights(cluster))
    assert read[0] == read[1]
