"""A host that is drained, or paused by its owner: services move first, and what fits nowhere else serves on."""

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from controller.reconcile.conditions import find
from crds.meta import Condition
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, EndpointObserver, RoutedClient, condition
from tests.controlplane.members import MetalHost
from tests.controlplane.process import CHECKOUT
from tests.support.agent_process import OwnerFacts, owner_path
from tests.support.background import running
from tests.support.documents import list_blocks
from tests.support.eventually import eventually

SERVICES = ("chat-1", "chat-2", "chat-3", "chat-4", "chat-5")
_SECTION = (
    (CHECKOUT / "docs" / "owner-policies.md").read_text().partition("## Cordon and drain")[2].partition("\n## ")[0]
)
DRAIN, WAIT, UNCORDON = (
    line for block in list_blocks(_SECTION) for line in block.splitlines() if line.startswith("kubectl ")
)
MOVED_SECONDS = 120.0
"""Limit for five engines that load one after the other, on a busy machine. No claim about speed."""


def set_owner(host: MetalHost, facts: OwnerFacts) -> None:
    """Simulate what the owner of the host does."""
    path = owner_path(host.level)
    written = Path(f"{path}.new")
    written.write_bytes(msgspec.json.encode(facts))
    written.replace(path)


async def type_documented(cluster: Cluster, command: str) -> None:
    """Type one of the documented commands, word for word; they are about host studio-1."""
    await cluster.kubectl(*shlex.split(command)[1:])


async def wait_for_condition(cluster: Cluster, host: MetalHost, kind: str, reason: str) -> Condition:
    async def reached() -> Condition:
        condition = find((await cluster.host(host.name)).status.conditions, kind)
        assert condition is not None
        assert condition.reason == reason, condition
        return condition

    return await eventually(reached, MOVED_SECONDS)


async def places(cluster: Cluster) -> Mapping[str, str | None]:
    """Return the host of each service; AssertionError if one has not exactly one process, which is Ready."""
    processes = await cluster.processes()
    assert sorted(process.spec.service_name for process in processes) == list(SERVICES)
    assert {process.status.phase for process in processes} == {"Ready"}
    return {process.spec.service_name: process.spec.host_name for process in processes}


async def wait_until_all_are_on(cluster: Cluster, host: MetalHost) -> None:
    async def moved() -> bool:
        return await places(cluster) == dict.fromkeys(SERVICES, host.name)

    await eventually(moved, MOVED_SECONDS)


async def test_five_services_leave_a_drained_and_a_paused_host_without_a_failed_request(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    first = await metal_host("studio-1", f"--memory-budget={64 * GIB}")
    second = await metal_host("studio-2", f"--memory-budget={32 * GIB}", "--pause-when-active=1")
    await cluster.wait_for_hosts(first.name, second.name)
    await cluster.apply(cluster.model(), *(cluster.service(name, "metal") for name in SERVICES))
    await cluster.ready(*SERVICES)
    assert set((await places(cluster)).values()) == {first.name}, "it has more memory free"
    observers = [EndpointObserver(cluster, name) for name in SERVICES]
    callers = [RoutedClient(cluster, name) for name in SERVICES]

    async def all_answered() -> None:
        """Wait until each caller has been answered by the host on which its service is now."""
        before = [caller.answers for caller in callers]
        await eventually(lambda: all(c.answers > n + 1 for c, n in zip(callers, before, strict=True)), MOVED_SECONDS)

    async with running(
        *(endpoint_observer.run() for endpoint_observer in observers), *(client.run() for client in callers)
    ):
        await asyncio.gather(*(observer.started.wait() for observer in observers))
        await all_answered()
        await type_documented(cluster, DRAIN)
        await type_documented(cluster, WAIT)
        await wait_until_all_are_on(cluster, second)
        await all_answered()

        await type_documented(cluster, UNCORDON)
        set_owner(second, OwnerFacts(idle_seconds=0.0))
        await wait_for_condition(cluster, second, "Paused", "OwnerActive")
        # The next agent knows nothing of the owner: what the last one has begun goes on.
        set_owner(second, OwnerFacts())
        await second.agent.kill()
        second.agent.start()
        await wait_until_all_are_on(cluster, first)
        await all_answered()
    assert [caller.failures for caller in callers if caller.failures] == []
    assert [observer.gaps for observer in observers] == [0] * len(SERVICES)
    table = await cluster.kubectl("get", "mh", "-o", "wide")
    assert "OwnerActive" in table
    assert "PAUSED" in table

    set_owner(second, OwnerFacts(idle_seconds=3600.0))
    await wait_for_condition(cluster, second, "Paused", "NotPaused")
    assert find((await cluster.host(first.name)).status.conditions, "Drained") is None


async def test_drain_without_room_elsewhere_is_blocked_and_the_service_serves_on(
    cluster: Cluster, host: MetalHost
) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    before = await cluster.process("chat")
    await type_documented(cluster, DRAIN)
    blocked = await wait_for_condition(cluster, host, "Drained", "DrainBlocked")
    assert f"{cluster.namespace}/chat (" in blocked.message
    assert await cluster.answers("chat")
    assert condition(await cluster.get("chat")).status == "True"

    await cluster.apply(cluster.service("other", "metal"))
    waits = await cluster.wait_for_phase("other", "WaitingForGPU", "NoHostFits")
    assert "host studio-1 is cordoned" in condition(waits).message

    await type_documented(cluster, UNCORDON)
    await cluster.ready("other", "chat")
    kept = await cluster.process("chat")
    assert (kept.metadata.uid, kept.status.pid) == (before.metadata.uid, before.status.pid)
    assert await cluster.answers("chat")
