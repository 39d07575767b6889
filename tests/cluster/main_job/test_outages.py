"""Outages of the controller, an agent, a host's link and the API server: running services continue to serve."""

import asyncio
import functools

import pytest

from controller.reconcile.conditions import find
from crds.meta import HOSTS_NAMESPACE
from kube.resources import ENDPOINT_SLICES, JOBS, LEASES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, PATHS, Cluster, FixedAddressClient
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.background import running
from tests.support.eventually import LIMIT_SECONDS, eventually
from tests.support.live_processes import is_alive

OUTAGE_SECONDS = 120
EXPIRY_SECONDS = 40
IDLE_SECONDS = 240
"""Limit for the traffic of a minute to be shown as over: hosts and services are written once a minute each."""
ANSWER_SECONDS = 10
"""Upper bound of the average time of a request, also on a busy machine."""
SERVICES = tuple(f"by-{path}" for path in PATHS)


async def apply_both(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))


async def test_nothing_is_written_at_rest_even_by_a_controller_that_starts(
    cluster: Cluster, controller: Process, host: MetalHost
) -> None:
    await apply_both(cluster)
    await cluster.ready(*SERVICES)
    await eventually(lambda: jobs_are_done(cluster))
    await eventually(lambda: is_idle(cluster), IDLE_SECONDS)
    rest = await eventually(lambda: versions_at_rest(cluster, host))
    await renewals(cluster, host, 1)
    assert await cluster.versions() == rest
    await controller.stop()
    controller.start()
    # When the new service has been reconciled, so have all others; its Service object does not affect them.
    await cluster.apply(cluster.service("later", "cpu", modelRef="absent"))
    await cluster.wait_for_phase("later", "Pending", "ModelNotFound")
    await renewals(cluster, host, 1)
    now = await cluster.versions()
    assert {name: version for name, version in now.items() if "later" not in name} == rest


async def is_idle(cluster: Cluster) -> bool:
    """Return whether the minute of the first tokens is over, and statuses show it."""
    services = [await cluster.get(service) for service in SERVICES]
    process = await cluster.process("by-host")
    rates = [process.status.tokens_per_second, *(service.status.tokens_per_second for service in services)]
    return all(rates) and {*map(float, rates)} == {0.0}


async def versions_at_rest(cluster: Cluster, host: MetalHost) -> dict[str, str]:
    """Return the versions once nothing was written for a while: labels, and what others write, follow the status."""
    before = await cluster.versions()
    await renewals(cluster, host, 1)
    assert await cluster.versions() == before
    return before


async def jobs_are_done(cluster: Cluster) -> bool:
    jobs = (await cluster.client.list(JOBS, cluster.namespace)).items
    return len(jobs) == 2 and all(job["status"].get("completionTime") for job in jobs)


async def renewals(cluster: Cluster, host: MetalHost, count: int) -> None:
    """Wait until the host has renewed its Lease `count` times, which it does every ten seconds."""
    seen: set[str] = set()

    async def renewed() -> bool:
        lease = await cluster.client.get(LEASES, host.name, HOSTS_NAMESPACE)
        seen.add(lease["spec"]["renewTime"])
        return len(seen) > count

    await eventually(renewed)


@pytest.mark.long
async def test_host_that_is_cut_off_is_replaced_and_stops_its_engines_on_return(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    # The host with more free memory is picked first.
    lost = await metal_host("studio-1", f"--memory-budget={8 * GIB}")
    await cluster.apply(cluster.model(), cluster.service("moved", "metal"), cluster.service("dropped", "metal"))
    await cluster.ready("moved", "dropped")
    spare = await metal_host("studio-2", f"--memory-budget={4 * GIB}")
    engines = [engine for name in ("moved", "dropped") for engine in await cluster.engines(name)]
    await eventually(lambda: is_ready(cluster, spare))
    await lost.host.cut()
    await eventually(lambda: is_lost(cluster, lost), EXPIRY_SECONDS + LIMIT_SECONDS)
    # No agent can report that a service deleted during the outage has stopped.
    await cluster.kubectl("delete", "isvc", "dropped", "--wait=false")

    async def moved() -> bool:
        urls = await cluster.urls("moved")
        return [url.startswith(f"http://{spare.address}:") for url in urls] == [True]

    await eventually(moved)
    await cluster.ready("moved")
    assert await cluster.answers("moved")
    assert all(engine.is_running() for engine in engines), "nobody can tell it to stop"

    async def let_go() -> bool:
        return {process.spec.host_name for process in await cluster.processes()} == {spare.name}

    await eventually(let_go, EXPIRY_SECONDS + LIMIT_SECONDS)
    await lost.host.restore()

    async def stopped() -> bool:
        return not any(map(is_alive, engines))

    await eventually(stopped)
    await eventually(lambda: is_ready(cluster, lost))
    assert await moved()
    assert len(await cluster.processes()) == 1
    assert await cluster.answers("moved")


async def ready_of(cluster: Cluster, host: MetalHost) -> tuple[str, str]:
    condition = find((await cluster.host(host.name)).status.conditions, "Ready")
    return (condition.status, condition.reason) if condition else ("", "")


async def is_ready(cluster: Cluster, host: MetalHost) -> bool:
    return await ready_of(cluster, host) == ("True", "LeaseRenewed")


async def is_lost(cluster: Cluster, host: MetalHost) -> bool:
    slices = [name for name in await cluster.names(ENDPOINT_SLICES) if name.endswith(f".{host.name}")]
    return await ready_of(cluster, host) == ("False", "LeaseExpired") and not slices


@pytest.mark.long
async def test_api_outage_of_two_minutes_interrupts_and_replaces_nothing(
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
        # Without an API server, a new agent reads its assignments from disk.
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
