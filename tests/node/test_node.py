"""Pomona on real nodes: what the process kubelet only imitates (users, file modes, cgroups, images, eviction)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from kube.client import Obj
from kube.resources import JOBS, PODS
from tests.cluster.main_job.cluster import Cluster, ask
from tests.cluster.main_job.test_pod_proxy import LLAMA
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.node.conftest import SHARED
from tests.node.preparation import POMONA
from tests.node.real_node import RealNode
from tests.support.eventually import eventually

CACHE: dict[str, Any] = {"cache": {"storageClassName": SHARED, "accessMode": "ReadWriteMany"}}
WAIT_SECONDS = 240.0


class Asker:
    """A client that asks a service without pause, at its ready addresses, and records what failed."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._cluster = cluster
        self._service = service

    async def run(self) -> None:
        token = await self._cluster.token(self._service)
        while True:
            urls = await self._cluster.urls(self._service)
            if not urls:
                self.failures.append("no ready address")
            for url in urls:
                try:
                    answer = await ask(url, self._service, token)
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.failures.append(f"{url}: {error!r}")
                    continue
                if answer.status != 200:
                    self.failures.append(f"{url}: {answer}")
                self.answers += 1


@contextlib.asynccontextmanager
async def asked(cluster: Cluster, service: str) -> AsyncIterator[Asker]:
    """Ask a service without pause within the block; it is an error if one request fails, or if none was answered."""
    asker = Asker(cluster, service)
    task = asyncio.create_task(asker.run())
    try:
        await eventually(lambda: asker.answers > 0)
        before = asker.answers
        yield asker
        after = asker.answers
        await eventually(lambda: asker.answers > after > before)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert asker.failures == []


async def pods_of(cluster: Cluster, service: str) -> list[Obj]:
    listed = await cluster.client.list(
        PODS, cluster.namespace, label_selector=f"inference.pomona.dev/service={service}"
    )
    return [pod for pod in listed.items if "deletionTimestamp" not in pod["metadata"]]


async def test_pod_service_answers_from_apply_to_token(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(**CACHE), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    assert await cluster.answers("chat")
    assert (await cluster.ask("chat", token="")).status == 401


async def test_host_service_answers_from_apply_to_token(cluster: Cluster, host: MetalHost) -> None:
    del host
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert await cluster.answers("chat")


async def test_new_image_of_pomona_fails_no_request(
    cluster: Cluster, plane: ControlPlane, nodes: dict[str, RealNode]
) -> None:
    await cluster.apply(cluster.model(**CACHE), cluster.service("chat", "cpu", **LLAMA))
    await cluster.ready("chat")
    newer = POMONA.replace(":1", ":2")
    for node in nodes.values():
        await node.ctr("images", "tag", "--force", POMONA, newer)

    async with asked(cluster, "chat"):
        tag = f"--set-string=image.tag={newer.rpartition(':')[2]}"
        await run_helm("upgrade", "pomona", str(CHART), "--reuse-values", "--wait", tag, plane=plane)

        async def replaced() -> bool:
            images = [
                container["image"] for pod in await pods_of(cluster, "chat") for container in pod["spec"]["containers"]
            ]
            return images == [newer] and len(await cluster.urls("chat")) == 1

        await eventually(replaced, WAIT_SECONDS)


async def test_drained_node_hands_its_service_over(
    cluster: Cluster, plane: ControlPlane, nodes: dict[str, RealNode]
) -> None:
    await cluster.apply(cluster.model(**CACHE), cluster.service("chat", "cpu", replicas=2))
    await cluster.ready("chat")
    await eventually(lambda: has_urls(cluster, "chat", 2))
    (pod, *_) = await pods_of(cluster, "chat")
    drained = pod["spec"]["nodeName"]
    try:
        async with asked(cluster, "chat"):
            await plane.kubectl(
                *("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
            )

            async def moved() -> bool:
                names = {pod["spec"].get("nodeName") for pod in await pods_of(cluster, "chat")}
                return names == nodes.keys() - {drained} and await has_urls(cluster, "chat", 2)

            await eventually(moved, WAIT_SECONDS)
        assert await cluster.answers("chat")
    finally:
        await plane.kubectl("uncordon", drained)


async def has_urls(cluster: Cluster, service: str, count: int) -> bool:
    return len(await cluster.urls(service)) == count


async def test_volume_that_root_owns_is_named_with_its_class_and_the_way_out(cluster: Cluster) -> None:
    """The provisioner of host paths ignores fsGroup, as NFS does, and a kubelet changes no owner there."""
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))

    async def is_named() -> bool:
        model = await cluster.kubectl("get", "model", "tiny", "--output=json")
        jobs = await cluster.client.list(JOBS, cluster.namespace)
        assert len(jobs.items) >= 1
        return "use a StorageClass that honours fsGroup" in model and "of StorageClass standard" in model

    await eventually(is_named, WAIT_SECONDS)
