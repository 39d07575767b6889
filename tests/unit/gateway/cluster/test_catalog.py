"""The catalog follows a list of many slices at once, and each change of one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.cluster import catalog
from gateway.cluster.cluster_feed import ClusterFeed
from gateway.cluster.limiter import Limiter
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.request_body import BodyBudget
from kube.resources import ObjectKey
from tests.unit.gateway.cluster.running_gateway import FedCluster


async def test_slices_of_one_pass_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    build_backends = catalog.build_backends

    def count(service: str, slices: Sequence[Any], tokens: Any) -> Any:
        reads.append(len(slices))
        return build_backends(service, slices, tokens)

    monkeypatch.setattr(catalog, "build_backends", count)
    async with UpstreamPool() as pool:
        feed = ClusterFeed(Limiter())
        cluster = FedCluster(feed, SharedResources(BodyBudget(), asyncio.Lock(), pool, HealthMonitor(), KeepAlive()))
        cluster.serve("team-a", "chat", *[f"http://10.0.0.{number}:18000" for number in range(1, 51)])
        await asyncio.sleep(0)
        service = feed.catalog.services[ObjectKey("team-a", "chat")]
        assert (reads, len(service.config.backends)) == ([50], 50)

        cluster.put_slice("team-a", "chat", "chat.host7", "http://10.0.0.8:18000", ready=False)
        await asyncio.sleep(0)
        assert (reads, len(service.config.backends)) == ([50, 50], 49)
