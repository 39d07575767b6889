"""One queue for hosts and pods: what is critical takes a place of each, and gives it back."""

from kube.client import Client
from kube.resources import METAL_PROCESSES
from tests.cluster.queue.queue_user import GIB, RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent
from tests.support.simulated_nodes import SimulatedNodes


async def wait_until_on_host(user: QueueUser, service: str, host: str) -> None:
    """Wait until the only process of a service is on a host; the empty name is for one that waits."""

    async def reached() -> bool:
        hosts = await user.hosts(service)
        assert hosts == [host], f"{service} is on {hosts}, not on {host or 'none'}"
        return True

    await eventually(reached, RUN_SECONDS)


async def test_critical_services_displace_a_pod_and_a_process_which_come_back(
    simulated: SimulatedNodes, user: QueueUser, client: Client
) -> None:
    await simulated.add("sim-1", devices=1)
    async with FakeMetalAgent(client, "studio-1", 2 * GIB + GIB // 2).running() as host:
        await user.serve("pod", priority="low")
        await user.wait_until_on("pod", "sim-1")
        for name, priority in (("process", "batch"), ("kept", "normal")):
            await user.serve_on_hosts(name, priority)
            await wait_until_on_host(user, name, "studio-1")
        await user.wait_for_a_later_second()
        await user.serve_on_hosts("later", "batch")
        await user.wait_for_status("later", pool="metal", place="1/1", reason="InsufficientMemory")
        await user.wait_until_evictable("pod")
        await user.serve("critical-pod", priority="critical")
        await user.serve_on_hosts("critical-process", "critical")
        await wait_until_on_host(user, "critical-process", "studio-1")
        await user.wait_until_on("critical-pod", "sim-1")
        # Each waits at its old place: on hosts before the one that came later.
        await user.wait_for_status("process", pool="metal", place="1/2")
        await user.wait_for_status("later", pool="metal", place="2/2")
        await user.wait_for_status("pod", pool="nvidia", place="1/1")
        assert await user.hosts("kept") == ["studio-1"]
        await user.kill_controller()
        for name in ("critical-process", "critical-pod"):
            await user.delete(name)
        await wait_until_on_host(user, "process", "studio-1")
        await user.wait_until_on("pod", "sim-1")
        assert await user.hosts("later") == [""]
        assert host.most_reserved_bytes <= host.budget_bytes
        await user.delete_services()
        await eventually(lambda: _has_no_process(user), RUN_SECONDS)


async def _has_no_process(user: QueueUser) -> bool:
    return not (await user.client.list(METAL_PROCESSES, user.namespace)).items
