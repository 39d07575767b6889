"""Parts that are away for a while: the controller, an agent, a host's link, the API server. What serves goes on."""

import asyncio
import functools

import aiohttp
import psutil
import pytest

from controller.reconcile.conditions import find
from crds.meta import HOSTS_NAMESPACE
from kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, JOBS, LEASES, METAL_PROCESSES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, PATHS, Cluster, FixedAddressClient
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.background import running
from tests.support.eventually import LIMIT_SECONDS, eventually

OUTAGE_SECONDS = 120
EXPIRY_SECONDS = 40
ANSWER_SECONDS = 10
"""A question takes less than that, on average, also on a busy machine."""
SERVICES = tuple(f"by-{path}" for path in PATHS)


async def apply_both(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))


@pytest.mark.usefixtures("host")
async def test_a_controller_that_dies_in_the_middle_ends_where_it_would_have(
    cluster: Cluster, controller: Process
) -> None:
    await apply_both(cluster)
    await eventually(lambda: cluster.names(JOBS))
    await controller.kill()
    controller.start()
    await eventually(lambda: cluster.names(METAL_PROCESSES))
    await controller.stop()
    controller.start()
    await cluster.ready(*SERVICES)
    assert await cluster.names(DEPLOYMENTS) == ["by-pod"]
    assert len(await cluster.names(METAL_PROCESSES)) == 1
    assert sorted(name.split("-")[1] for name in await cluster.names(JOBS)) == ["fetch", "inspect"]
    assert [len(await cluster.replicas(service)) for service in SERVICES] == [1, 1]


async def test_at_rest_nothing_is_written_not_even_by_a_controller_that_starts(
    cluster: Cluster, controller: Process, host: MetalHost
) -> None:
    await apply_both(cluster)
    await cluster.ready(*SERVICES)
    await eventually(lambda: jobs_are_done(cluster))
    rest = await cluster.versions()
    await renewals(cluster, host, 1)
    assert await cluster.versions() == rest
    await controller.stop()
    controller.start()
    # Whoever reads a new service has read all others; its own Service object makes no difference to them.
    await cluster.apply(cluster.service("later", "cpu", modelRef="absent"))
    await cluster.wait_for_phase("later", "Pending", "ModelNotFound")
    await renewals(cluster, host, 1)
    now = await cluster.versions()
    assert {name: version for name, version in now.items() if "later" not in name} == rest


async def jobs_are_done(cluster: Cluster) -> bool:
    jobs = (await cluster.client.list(JOBS, cluster.namespace)).items
    return len(jobs) == 2 and all(job["status"].get("completionTime") for job in jobs)


async def renewals(cluster: Cluster, host: MetalHost, count: int) -> None:
    """Wait until the host has renewed its Lease so many times: the clock of a cluster at rest, ten seconds a beat."""
    seen: set[str] = set()

    async def renewed() -> bool:
        lease = await cluster.client.get(LEASES, host.name, HOSTS_NAMESPACE)
        seen.add(lease["spec"]["renewTime"])
        return len(seen) > count

    await eventually(renewed)


async def test_an_agent_killed_in_a_stream_breaks_nothing_and_takes_over_what_runs(
    cluster: Cluster, host: MetalHost
) -> None:
    await cluster.apply(
        cluster.model(file="loop.gguf"), cluster.service("chat", "metal", contextLength=50000, parallel=2)
    )
    await cluster.ready("chat")
    before, url, token = await cluster.process("chat"), (await cluster.urls("chat"))[0], await cluster.token("chat")
    caller, stream = FixedAddressClient(url, "chat", token), Stream(url, token)
    async with running(caller.run(), stream.run()):
        await eventually(lambda: stream.lines > 0)
        await host.agent.kill()
        await eventually(stream.flows)
        host.agent.start()
        # What the new agent writes and starts shows that it has taken over.
        await renewals(cluster, host, 1)
        await cluster.edit("chat", replicas=2)
        await eventually(lambda: two_processes(cluster))
        await eventually(stream.flows)
    assert caller.failures == []
    assert caller.answers > 0
    after = [each for each in await cluster.processes() if each.metadata.uid == before.metadata.uid]
    assert [(each.status.phase, each.status.pid) for each in after] == [("Ready", before.status.pid)]


class Stream:
    """One long answer, read as it comes; that it ends or breaks ends the test."""

    def __init__(self, url: str, token: str) -> None:
        self.lines = 0
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    async def run(self) -> None:
        body = {"stream": True, "max_tokens": 45000, "messages": [{"role": "user", "content": "Hi"}]}
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(f"{self._url}/v1/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                self.lines += line.startswith(b"data: {")

    async def flows(self) -> bool:
        """Whether more of it comes."""
        before = self.lines
        await eventually(lambda: self.lines > before)
        return True


async def two_processes(cluster: Cluster) -> bool:
    return [each.status.phase for each in await cluster.processes()] == ["Ready", "Ready"]


@pytest.mark.timeout(600)
async def test_a_host_that_is_cut_off_is_replaced_and_serves_nothing_twice_when_it_is_back(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    # The roomier one is taken first.
    lost = await metal_host("studio-1", f"--memory-budget={8 * GIB}")
    await cluster.apply(cluster.model(), cluster.service("moved", "metal"), cluster.service("dropped", "metal"))
    await cluster.ready("moved", "dropped")
    spare = await metal_host("studio-2", f"--memory-budget={4 * GIB}")
    engines = [engine for name in ("moved", "dropped") for engine in await cluster.engines(name)]
    await eventually(lambda: is_ready(cluster, spare))
    await lost.host.cut()
    await eventually(lambda: is_lost(cluster, lost), EXPIRY_SECONDS + LIMIT_SECONDS)
    # A service that is deleted meanwhile has nobody who could say that it has stopped.
    await cluster.kubectl("delete", "isvc", "dropped", "--wait=false")

    async def moved() -> bool:
        urls = await cluster.urls("moved")
        return [url.startswith(f"http://{spare.address}:") for url in urls] == [True]

    await eventually(moved)
    await cluster.ready("moved")
    assert await cluster.answers("moved")
    assert all(engine.is_running() for engine in engines), "nobody can tell it to stop"

    async def let_go() -> bool:
        return {each.spec.host_name for each in await cluster.processes()} == {spare.name}

    await eventually(let_go, EXPIRY_SECONDS + LIMIT_SECONDS)
    await lost.host.restore()

    async def stopped() -> bool:
        return not any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in engines)

    await eventually(stopped)
    await eventually(lambda: is_ready(cluster, lost))
    assert await moved()
    assert len(await cluster.processes()) == 1
    assert await cluster.answers("moved")


async def ready_of(cluster: Cluster, host: MetalHost) -> tuple[str, str]:
    found = find((await cluster.host(host.name)).status.conditions, "Ready")
    return (found.status, found.reason) if found else ("", "")


async def is_ready(cluster: Cluster, host: MetalHost) -> bool:
    return await ready_of(cluster, host) == ("True", "LeaseRenewed")


async def is_lost(cluster: Cluster, host: MetalHost) -> bool:
    slices = [name for name in await cluster.names(ENDPOINT_SLICES) if name.endswith(f".{host.name}")]
    return await ready_of(cluster, host) == ("False", "LeaseExpired") and not slices


@pytest.mark.timeout(600)
async def test_two_minutes_without_an_api_server_interrupt_and_replace_nothing(
    plane: ControlPlane, cluster: Cluster, host: MetalHost
) -> None:
    await apply_both(cluster)
    await cluster.ready(*SERVICES)
    await eventually(lambda: jobs_are_done(cluster))
    before = [await cluster.replicas(service) for service in SERVICES]
    engines = [engine.pid for service in SERVICES for engine in await cluster.engines(service)]
    callers = [
        FixedAddressClient((await cluster.urls(service))[0], service, await cluster.token(service), pause_seconds=1)
        for service in SERVICES
    ]
    async with running(*(caller.run() for caller in callers)):
        loop = asyncio.get_running_loop()
        end = loop.time() + OUTAGE_SECONDS
        await plane.stop_apiserver()
        # In the dark, a new agent knows from its disk what it has to serve.
        await host.agent.kill()
        host.agent.start()
        await eventually(lambda: loop.time() > end, OUTAGE_SECONDS + 1)
        await plane.start_apiserver()
        await renewals(cluster, host, 2)
        await eventually(lambda: is_ready(cluster, host))
        for service in SERVICES:
            await eventually(functools.partial(cluster.answers, service))
        await cluster.ready(*SERVICES)
    assert [caller.failures for caller in callers] == [[], []]
    assert all(caller.answers > OUTAGE_SECONDS / ANSWER_SECONDS for caller in callers)
    assert [engine.pid for service in SERVICES for engine in await cluster.engines(service)] == engines
    assert [await cluster.replicas(service) for service in SERVICES] == before
