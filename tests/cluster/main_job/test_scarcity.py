"""More services than memory: memory of a host is never promised twice, and a waiting service reports the reason."""

import asyncio

from kube.client import Obj
from kube.resources import METAL_PROCESSES, Resource
from kube.store import Store
from kube.watch import Selection, reflect
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, condition
from tests.support.background import running
from tests.support.eventually import eventually

BUDGET_BYTES = 5 * GIB
SERVICES = [f"rival-{number}" for number in range(4)]


class Promises:
    """The largest sum of memory of bound processes that have not stopped, computed at each change."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._store = Store()
        self._store.subscribe(self._changed)
        self.synced = asyncio.Event()

    async def run(self, cluster: Cluster) -> None:
        await reflect(cluster.client, self._store, Selection(METAL_PROCESSES, cluster.namespace), self.synced)

    def _changed(self, _resource: Resource, _old: Obj | None, _new: Obj | None) -> None:
        promised = [
            each["spec"]["memoryBytes"]
            for each in self._store.list(METAL_PROCESSES)
            if "hostName" in each["spec"] and each.get("status", {}).get("phase") != "Stopped"
        ]
        self.most_bytes = max(self.most_bytes, sum(promised))


async def test_services_that_do_not_fit_together_wait_for_released_memory(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    host = await metal_host("studio-1", f"--memory-budget={BUDGET_BYTES}")
    promises = Promises()
    async with running(promises.run(cluster)):
        await promises.synced.wait()
        await cluster.apply(cluster.model(memoryBytes=2 * GIB), *(cluster.service(name, "metal") for name in SERVICES))
        serving = set(await eventually(lambda: two_ready(cluster)))
        waiting = [name for name in SERVICES if name not in serving]
        for name in waiting:
            refused = await cluster.wait_for_phase(name, "WaitingForGPU", "NoHostFits")
            message = condition(refused).message
            assert "needs 2.0 GiB" in message
            assert f"{host.name}, has 5.0 GiB for models, of which too little is free now" in message
            assert await cluster.urls(name) == []
        for name in serving:
            assert await cluster.answers(name)

        first, second = sorted(serving)
        await cluster.kubectl("delete", "isvc", first)
        after = set(await eventually(lambda: two_ready(cluster, second)))
        assert len(after & set(waiting)) == 1, "exactly one moved up"
        (last,) = set(waiting) - after
        await cluster.wait_for_phase(last, "WaitingForGPU", "NoHostFits")
        assert await cluster.answers((after - {second}).pop())
    assert promises.most_bytes == 4 * GIB


async def two_ready(cluster: Cluster, *among: str) -> list[str]:
    """Return the names of the Ready services, once there are two and they include `among`."""
    names = await cluster.services()
    ready = [name for name in names if (await cluster.get(name)).status.phase == "Ready"]
    assert len(ready) == 2, ready
    assert set(among) <= set(ready)
    return ready
