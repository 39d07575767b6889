"""Memory pressure on hosts from the user's side: a service moves without a failed request, or waits and returns."""

import asyncio

from controller.reconcile.conditions import find
from crds.metalprocess import MetalProcess
from kube.client import Client
from kube.resources import EVENTS
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, EndpointObserver, RoutedClient, condition
from tests.controlplane.members import MetalHost
from tests.support.background import running
from tests.support.eventually import eventually


async def wait_for_memory_pressure(cluster: Cluster, host: MetalHost, status: str) -> None:
    """Wait until the host's condition MemoryPressure has this status."""

    async def reached() -> bool:
        condition = find((await cluster.host(host.name)).status.conditions, "MemoryPressure")
        assert condition is not None
        return condition.status == status

    await eventually(reached)


async def wait_for_events(client: Client, namespace: str, *reasons: str, about: str = "") -> None:
    """Wait until the namespace has Events with all these reasons, about the object `about` if it is given."""

    async def all_told() -> bool:
        events = (await client.list(EVENTS, namespace)).items
        return set(reasons) <= {event["reason"] for event in events if about in {"", event["regarding"]["name"]}}

    await eventually(all_told)


async def metrics(host: MetalHost) -> str:
    """Return the metrics of the agent, which serves them on the host's loopback."""
    program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:17999/metrics').read().decode())"
    process = await asyncio.create_subprocess_exec(
        *host.host.exec, "python3", "-c", program, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


async def test_service_moves_from_a_host_short_of_memory_without_a_failed_request(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    first = await metal_host("studio-1", f"--memory-budget={64 * GIB}")
    second = await metal_host("studio-2", f"--memory-budget={32 * GIB}")
    await cluster.wait_for_hosts(first.name, second.name)
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    before = await cluster.process("chat")
    assert before.spec.host_name == first.name, "it has more memory free"
    observer, callers = EndpointObserver(cluster, "chat"), [RoutedClient(cluster, "chat") for _ in range(6)]
    async with running(observer.run(), *(caller.run() for caller in callers)):
        await observer.started.wait()
        await eventually(lambda: all(caller.answers > 0 for caller in callers))
        first.level.write_text("warn")

        async def moved() -> MetalProcess:
            after = await cluster.process("chat")
            assert (after.spec.host_name, after.status.phase) == (second.name, "Ready")
            return after

        after = await eventually(moved)
        answers = sum(caller.answers for caller in callers)
        await eventually(lambda: sum(caller.answers for caller in callers) > answers + 10)
        await cluster.ready("chat")
    assert after.metadata.uid != before.metadata.uid
    assert (observer.gaps, [caller.failures for caller in callers if caller.failures]) == (0, [])
    assert len(await cluster.engines("chat")) == 1
    await wait_for_memory_pressure(cluster, first, "True")
    await wait_for_memory_pressure(cluster, second, "False")
    await wait_for_events(cluster.client, cluster.namespace, "Displacing")
    await wait_for_events(cluster.client, "default", "MemoryPressure", about=first.name)

    await cluster.apply(cluster.service("other", "metal"))
    await cluster.ready("other")
    assert (await cluster.process("other")).spec.host_name == second.name, "nothing new goes where memory is short"
    first.level.write_text("normal")
    await wait_for_memory_pressure(cluster, first, "False")
    await wait_for_events(cluster.client, "default", "MemoryPressureOver", about=first.name)


async def test_evicted_process_waits_and_returns_even_after_an_agents_death(cluster: Cluster, host: MetalHost) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    before = await cluster.process("chat")
    host.level.write_text("critical")
    service = await cluster.wait_for_phase("chat", "WaitingForGPU", "MemoryPressure")
    assert "studio-1 is short of memory" in condition(service).message
    await wait_for_events(cluster.client, cluster.namespace, "Evicted")

    async def evicted() -> bool:
        status = (await at_home(cluster, before)).status
        return (status.phase, status.reason) == ("Pending", "MemoryPressure")

    await eventually(evicted)
    assert await cluster.engines("chat") == []
    expected = {
        'pomona_agent_memory_pressure{pomona_agent_memory_pressure="critical"} 1.0',
        'pomona_agent_pressure_steps_total{step="evict"} 1.0',
        "pomona_agent_under_pressure 1.0",
        "pomona_agent_evicted_processes 1.0",
        'pomona_agent_processes{phase="Pending"} 1.0',
    }

    async def counted() -> bool:
        text = await metrics(host)
        assert expected <= {*text.splitlines()}, text
        return True

    await eventually(counted)

    host.level.write_text("unknown")
    await host.agent.kill()
    host.agent.start()
    await eventually(lambda: "regained" in host.agent.log.read_text().split('"agent_started"')[2])
    # It is "Fetching" until the new agent has looked for its weights.
    await eventually(evicted)
    assert await cluster.engines("chat") == []

    host.level.write_text("normal")
    await cluster.ready("chat")

    async def alone() -> str:
        # The replacement, which waited for a host, is deleted once the first process serves again.
        return (await cluster.process("chat")).metadata.uid

    assert await eventually(alone) == before.metadata.uid, "it kept its place"
    assert await cluster.answers("chat")
    await wait_for_events(cluster.client, cluster.namespace, "Returning")
    await wait_for_memory_pressure(cluster, host, "False")


async def at_home(cluster: Cluster, process: MetalProcess) -> MetalProcess:
    """Return the current state of the process; its replacement, which waits for a host, is another object."""
    (found,) = [
        metal_process
        for metal_process in await cluster.processes()
        if metal_process.metadata.uid == process.metadata.uid
    ]
    return found
