"""An edit of a service in pods, with the real scheduler: one pod more if there is room, else one after the other."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from controller.services.pods.deployment_strategy import SURGE
from crds.meta import LABEL_SERVICE
from kube.client import Obj
from kube.resources import DEPLOYMENTS
from tests.cluster.main_job.cluster import OUTDATED_SECONDS, Cluster, EndpointObserver, condition
from tests.support.background import running
from tests.support.eventually import eventually

ONE_DEVICE = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "devices"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "1"}},
}
pytestmark = pytest.mark.usefixtures("gpu_node")


@asynccontextmanager
async def never_interrupted(cluster: Cluster, service: str) -> AsyncIterator[None]:
    """Ask the service all the time: each of its addresses answers, and there is one in each state."""
    observer = EndpointObserver(cluster, service)

    async def ask() -> None:
        while True:
            read_at = time.monotonic()
            try:
                assert await cluster.answers(service)
            except aiohttp.ClientError:
                if time.monotonic() - read_at <= OUTDATED_SECONDS:
                    raise
            await asyncio.sleep(0.05)

    async with running(observer.run(), ask()):
        await observer.started.wait()
        yield
    assert observer.gaps == 0


async def deployment(cluster: Cluster) -> Obj:
    manifest = await cluster.client.get(DEPLOYMENTS, "chat", cluster.namespace)
    spec: Obj = manifest["spec"]
    return spec


async def has_context(cluster: Cluster, tokens: int) -> bool:
    arguments = (await deployment(cluster))["template"]["spec"]["initContainers"][0]["args"]
    return bool(arguments[arguments.index("-c") + 1] == str(tokens))


@pytest.mark.parametrize("mode", ["Queue", "Native"])
async def test_edit_with_room_for_both_pods_loses_no_request(cluster: Cluster, mode: str) -> None:
    await cluster.apply(cluster.model(), gpu_service(cluster, mode))
    await cluster.ready("chat")
    async with never_interrupted(cluster, "chat"):
        await cluster.edit("chat", contextLength=512)
        await cluster.ready("chat")
    assert await has_context(cluster, 512)
    assert (await deployment(cluster))["strategy"] == SURGE


@pytest.mark.parametrize(("scarce", "mode"), [("devices", "Queue"), ("quota", "Native")])
async def test_edit_without_room_for_both_pods_goes_on(cluster: Cluster, scarce: str, mode: str) -> None:
    count = 2 if scarce == "devices" else 1
    if scarce == "quota":
        await cluster.apply(ONE_DEVICE)
        # A quota that its controller has not seen yet counts nothing.
        await cluster.kubectl("wait", "quota/devices", "--for=jsonpath={.status.used}", "--timeout=60s")
    await cluster.apply(cluster.model(), gpu_service(cluster, mode, hardware=nvidia(count)))
    await cluster.ready("chat")
    await cluster.edit("chat", contextLength=512)
    await cluster.ready("chat")
    assert await has_context(cluster, 512)
    surge = 1 if mode == "Queue" else 0
    assert (await deployment(cluster))["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1}
    assert await cluster.answers("chat")


def gpu_service(cluster: Cluster, mode: str, **spec: Any) -> Obj:
    """Return a service whose pods the queue or the scheduler places, for one request at a time."""
    return cluster.service("chat", "nvidia", scheduling={"mode": mode}, parallel=1, **spec)


def nvidia(count: int) -> Obj:
    return {"accelerator": "nvidia", "count": count}


async def test_replica_that_never_had_room_does_not_hold_an_edit_up(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), gpu_service(cluster, "Queue", replicas=3))

    async def two_serve() -> bool:
        service = await cluster.wait_for_phase("chat", "Degraded", "Serving")
        return service.status.ready_replicas == 2

    await eventually(two_serve)
    await cluster.edit("chat", contextLength=512)
    await eventually(two_serve)
    assert await has_context(cluster, 512)


async def test_edit_that_no_node_can_hold_ends_nothing(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    async with never_interrupted(cluster, "chat"):
        await cluster.edit("chat", resources={"memory": "900Gi"})

        async def is_refused() -> bool:
            refused = condition(await cluster.get("chat"))
            assert (refused.status, refused.reason) == ("True", "Unschedulable")
            assert "Insufficient memory" in refused.message
            return "the earlier pods serve on" in refused.message

        await eventually(is_refused)
        await cluster.edit("chat", resources={"memory": "1Gi"})
        await cluster.ready("chat")


async def test_edit_of_replicas_that_keep_apart_goes_on(cluster: Cluster) -> None:
    own = {"labelSelector": {"matchLabels": {LABEL_SERVICE: "chat"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}}
    weights = cluster.model(cache={"accessMode": "ReadWriteMany"})
    await cluster.apply(weights, cluster.service("chat", "cpu", replicas=2, pod=apart))
    await cluster.ready("chat")
    async with never_interrupted(cluster, "chat"):
        await cluster.edit("chat", contextLength=512, parallel=1)
        await cluster.ready("chat")
    assert await has_context(cluster, 512)
