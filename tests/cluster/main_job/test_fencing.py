"""A host that returns after its process was released: the stale engine neither serves nor shares its memory."""

from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.cluster.main_job.test_outages import EXPIRY_SECONDS, is_lost
from tests.support.eventually import LIMIT_SECONDS, eventually
from tests.support.live_processes import is_alive

BUDGET_BYTES = 4 * GIB
REPLICA_BYTES = 3 * GIB


async def forget_reports(cluster: Cluster, host: str) -> None:
    """Make the MetalHost as it was before its agent reported the process, as if the link had been cut by then."""
    status = f'{{"status":{{"availableBytes":{BUDGET_BYTES},"processes":[]}}}}'
    await cluster.kubectl("patch", "metalhost", host, "--subresource=status", "--type=merge", "-p", status)


async def test_process_that_is_bound_to_a_returning_host_starts_after_the_stale_engine_has_stopped(
    cluster: Cluster, metal_host: StartMetalHost
) -> None:
    host = await metal_host("studio-1", f"--memory-budget={BUDGET_BYTES}")
    await cluster.apply(cluster.model(memoryBytes=REPLICA_BYTES), cluster.service("stale", "metal"))
    await cluster.ready("stale")
    stale = await cluster.engines("stale")
    assert stale
    await host.host.cut()
    await eventually(lambda: is_lost(cluster, host), EXPIRY_SECONDS + LIMIT_SECONDS)
    await cluster.kubectl("delete", "isvc", "stale", "--wait=false")
    # It has other arguments, so that no engine could be taken over.
    await cluster.apply(cluster.service("next", "metal", contextLength=256))

    async def released() -> bool:
        return [each.spec.service_name for each in await cluster.processes()] == ["next"]

    await eventually(released, EXPIRY_SECONDS + LIMIT_SECONDS)
    assert all(map(is_alive, stale)), "nobody can tell it to stop"
    await forget_reports(cluster, host.name)
    await host.host.restore()

    async def next_serves() -> bool:
        engines = await cluster.engines("next")
        assert not (any(map(is_alive, engines)) and any(map(is_alive, stale))), "both take the same memory"
        assert await cluster.urls("stale") == []
        return await cluster.urls("next") != []

    await eventually(next_serves)
    assert not any(map(is_alive, stale))
    await cluster.ready("next")
    assert await cluster.answers("next")
