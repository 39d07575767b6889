"""Taints and labels of hosts, and a request to rebalance: services move first, and no request fails."""

from datetime import UTC, datetime

from crds.meta import REBALANCE_AT
from kube.time import rfc3339
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, EndpointObserver, RoutedClient, condition
from tests.support.background import running
from tests.support.eventually import eventually


async def place(cluster: Cluster, service: str) -> str | None:
    """Return the host of a service; AssertionError if it has not exactly one process, which is Ready."""
    processes = [process for process in await cluster.processes() if process.spec.service_name == service]
    assert [process.status.phase for process in processes] == ["Ready"]
    return processes[0].spec.host_name


async def wait_until_on(cluster: Cluster, service: str, host: str) -> None:
    async def moved() -> bool:
        return await place(cluster, service) == host

    await eventually(moved)


async def test_taints_and_a_request_move_services_without_a_failed_request(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    large = await metal_host("studio-1", f"--memory-budget={16 * GIB}")
    small = await metal_host("studio-2", f"--memory-budget={8 * GIB}")
    await cluster.wait_for_hosts(large.name, small.name)
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    await cluster.apply(
        cluster.model(), cluster.service("moves", "metal"), cluster.service("stays", "metal", tolerations=tolerations)
    )
    await cluster.ready("moves", "stays")
    assert {await place(cluster, name) for name in ("moves", "stays")} == {large.name}
    observer, caller = EndpointObserver(cluster, "moves"), RoutedClient(cluster, "moves")
    async with running(observer.run()), running(caller.run()):
        await observer.started.wait()
        await eventually(lambda: caller.answers > 0)
        taints = '{"spec":{"taints":[{"key":"dedicated","effect":"NoExecute"}]}}'
        await cluster.kubectl("patch", "metalhost", large.name, "--type=merge", "-p", taints)
        await wait_until_on(cluster, "moves", small.name)
        assert await place(cluster, "stays") == large.name

        await cluster.apply(cluster.service("refused", "metal", nodeSelector={"room": "lab"}))
        unlabelled = await cluster.wait_for_phase("refused", "WaitingForGPU", "NoHost")
        assert "kubectl label metalhost" in condition(unlabelled).message
        await cluster.kubectl("label", "metalhost", large.name, "room=lab")
        await cluster.edit("refused", tolerations=tolerations)
        await wait_until_on(cluster, "refused", large.name)

        await cluster.kubectl("patch", "metalhost", large.name, "--type=merge", "-p", '{"spec":{"taints":[]}}')
        now = rfc3339(datetime.now(UTC))
        await cluster.kubectl("annotate", "isvc", "moves", f"{REBALANCE_AT}={now}")
        await wait_until_on(cluster, "moves", large.name)
        answers = caller.answers
        await eventually(lambda: caller.answers > answers + 1)
    assert caller.failures == []
    assert observer.gaps == 0
