"""Memory pressure on hosts as a user sees it: a service moves without a failed request, or waits and returns."""

import asyncio

import aiohttp

from controller.status import find
from crds.metalprocess import MetalProcess
from kube.client import Client
from kube.resources import EVENTS
from tests.background import running
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, Lookout, ask, condition
from tests.controlplane.members import MetalHost
from tests.eventually import eventually


class Caller:
    """Asks a service as one of the cluster does: each time at an address that is ready, as it was a moment ago."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._cluster = cluster
        self._service = service

    async def run(self) -> None:
        token = await self._cluster.token(self._service)
        while True:
            (url, *_) = await self._cluster.urls(self._service)
            # What a node knows of endpoints is always a little old.
            await asyncio.sleep(0.2)
            try:
                answer = await ask(url, self._service, token)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(f"after {self.answers} answers, from {url}: {error!r}")
            else:
                self.answers += 1
                if answer.status != 200:
                    self.failures.append(f"answer {self.answers}, from {url}: {answer}")


async def pressed(cluster: Cluster, host: MetalHost, status: str) -> None:
    """Wait for the host's condition MemoryPressure."""

    async def reached() -> bool:
        found = find((await cluster.host(host.name)).status.conditions, "MemoryPressure")
        assert found is not None
        return found.status == status

    await eventually(reached)


async def told(client: Client, namespace: str, *reasons: str, about: str = "") -> None:
    """Wait until Events in the namespace, about that object where it is named, have these reasons."""

    async def all_told() -> bool:
        events = (await client.list(EVENTS, namespace)).items
        return set(reasons) <= {event["reason"] for event in events if about in {"", event["regarding"]["name"]}}

    await eventually(all_told)


async def metrics(host: MetalHost) -> str:
    """What the agent tells on the host's own loopback."""
    program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:17999/metrics').read().decode())"
    process = await asyncio.create_subprocess_exec(
        *host.host.exec, "python3", "-c", program, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


async def test_a_service_moves_from_a_host_that_is_short_of_memory_without_a_failed_request(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    first = await metal_host("studio-1", f"--memory-budget={64 * GIB}")
    second = await metal_host("studio-2", f"--memory-budget={32 * GIB}")
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    before = await cluster.process("chat")
    assert before.spec.host_name == first.name, "it has more memory free"
    lookout, callers = Lookout(cluster, "chat"), [Caller(cluster, "chat") for _ in range(6)]
    async with running(lookout.run(), *(caller.run() for caller in callers)):
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
    assert (lookout.gaps, [caller.failures for caller in callers if caller.failures]) == (0, [])
    assert len(await cluster.engines("chat")) == 1
    await pressed(cluster, first, "True")
    await pressed(cluster, second, "False")
    await told(cluster.client, cluster.namespace, "Displacing")
    await told(cluster.client, "default", "MemoryPressure", about=first.name)

    await cluster.apply(cluster.service("other", "metal"))
    await cluster.ready("other")
    assert (await cluster.process("other")).spec.host_name == second.name, "nothing new goes where memory is short"
    first.level.write_text("normal")
    await pressed(cluster, first, "False")
    await told(cluster.client, "default", "MemoryPressureOver", about=first.name)


async def test_what_fits_nowhere_else_is_evicted_waits_through_an_agents_death_and_returns(
    cluster: Cluster, host: MetalHost
) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    before = await cluster.process("chat")
    host.level.write_text("critical")
    found = await cluster.told("chat", "Pending", "MemoryPressure")
    assert "studio-1 is short of memory" in condition(found).message
    await told(cluster.client, cluster.namespace, "Evicted")

    async def evicted() -> bool:
        status = (await at_home(cluster, before)).status
        return (status.phase, status.reason) == ("Pending", "MemoryPressure")

    await eventually(evicted)
    assert await cluster.engines("chat") == []
    text = await metrics(host)
    for line in (
        'pomona_agent_memory_pressure{pomona_agent_memory_pressure="critical"} 1.0',
        'pomona_agent_pressure_steps_total{step="evict"} 1.0',
        "pomona_agent_under_pressure 1.0",
        "pomona_agent_evicted_processes 1.0",
        'pomona_agent_processes{phase="Pending"} 1.0',
    ):
        assert line in text.splitlines(), text

    host.level.write_text("unknown")
    await host.agent.kill()
    host.agent.start()
    await eventually(lambda: "regained" in host.agent.log.read_text().rpartition('"agent starts"')[2])
    assert await cluster.engines("chat") == []
    assert await evicted()

    host.level.write_text("normal")
    await cluster.ready("chat")
    assert (await cluster.process("chat")).metadata.uid == before.metadata.uid, "it kept its place"
    assert await cluster.answers("chat")
    await told(cluster.client, cluster.namespace, "Returning")
    await pressed(cluster, host, "False")


async def at_home(cluster: Cluster, process: MetalProcess) -> MetalProcess:
    """The process as it is now; its successor, which waits for a place, is another one."""
    (found,) = [each for each in await cluster.processes() if each.metadata.uid == process.metadata.uid]
    return found
