"""The life of a running service: it crashes, is edited, scaled, suspended and deleted, on both paths."""

import json
from typing import Any

import pytest

from crds.metalhost import MetalHost as MetalHostObject
from kube.client import Obj
from kube.resources import PODS
from tests.cluster.main_job.cluster import OWNED, PATHS, Cluster, EndpointObserver, FixedAddressClient, RoutedClient
from tests.controlplane.members import MetalHost
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive

pytestmark = pytest.mark.usefixtures("host")
both_paths = pytest.mark.parametrize("path", PATHS)


async def serve(cluster: Cluster, name: str, path: str, **spec: Any) -> None:
    await cluster.apply(cluster.model(), cluster.service(name, PATHS[path], **spec))
    await cluster.ready(name)


async def pod(cluster: Cluster) -> Obj:
    """Return the only pod that serves."""
    listed = await cluster.client.list(PODS, cluster.namespace, label_selector="inference.pomona.dev/service")
    assert len(listed.items) == 1
    return listed.items[0]


async def list_warnings(cluster: Cluster) -> list[str]:
    """Return the Warnings of Pomona in the namespace."""
    events = json.loads(await cluster.kubectl("get", "events", "--field-selector=type=Warning", "--output=json"))
    ours = [event for event in events["items"] if event.get("reportingComponent", "").startswith("pomona.dev/")]
    return [f"{event['reason']}: {event['message']}" for event in ours]


@both_paths
async def test_a_crashed_engine_is_withdrawn_restarted_and_counted(cluster: Cluster, path: str) -> None:
    await serve(cluster, "crashing", path)
    replicas = await cluster.replicas("crashing")
    observer = EndpointObserver(cluster, "crashing")

    async def restarts() -> int:
        if path == "host":
            return (await cluster.process("crashing")).status.restarts or 0
        return int((await pod(cluster))["status"]["initContainerStatuses"][0]["restartCount"])

    async with running(observer.run()):
        await observer.started.wait()
        for engine in await cluster.engines("crashing"):
            engine.kill()
        await eventually(lambda: observer.gaps > 0)
    await eventually(lambda: cluster.answers("crashing"))
    await cluster.ready("crashing")

    async def counted() -> bool:
        return await restarts() == 1

    await eventually(counted)
    assert await cluster.replicas("crashing") == replicas, "the same object, another engine"


@both_paths
async def test_an_edit_starts_a_new_replica_before_the_old_one_stops(cluster: Cluster, path: str) -> None:
    await serve(cluster, "edited", path, contextLength=1024, parallel=1)
    before = await cluster.replicas("edited")
    observer = EndpointObserver(cluster, "edited")
    # On a host the address of the service stays the same; a new pod has a new address.
    fixed = FixedAddressClient((await cluster.urls("edited"))[0], "edited", await cluster.token("edited"))
    callers = [fixed] if path == "host" else [RoutedClient(cluster, "edited") for _ in range(4)]
    async with running(observer.run(), *(caller.run() for caller in callers)):
        await observer.started.wait()
        await cluster.edit("edited", contextLength=2048)
        await cluster.ready("edited")

        async def replaced() -> bool:
            after, engines = await cluster.replicas("edited"), await cluster.engines("edited")
            assert (len(after), len(engines)) == (1, 1)
            return after != before and "2048" in engines[0].cmdline()

        await eventually(replaced)
        await eventually(lambda: cluster.answers("edited"))
    assert observer.observations > 0
    assert observer.gaps == 0
    assert [failure for caller in callers for failure in caller.failures] == []


@both_paths
async def test_an_edited_model_replaces_the_old_one(cluster: Cluster, path: str) -> None:
    await serve(cluster, "turned", path)
    before = await cluster.replicas("turned")
    assert "Hello" in (await cluster.ask("turned")).text
    observer = EndpointObserver(cluster, "turned")
    async with running(observer.run()):
        await observer.started.wait()
        await cluster.apply(cluster.model(file="other.gguf"))

        async def turned() -> bool:
            assert not {*before} & {*await cluster.replicas("turned")}
            assert len(await cluster.engines("turned")) == 1 == len(await cluster.urls("turned"))
            return "Another" in (await cluster.ask("turned")).text

        await eventually(turned)
        await cluster.ready("turned")
    assert observer.gaps == 0


@both_paths
async def test_a_scaled_service_has_the_requested_replicas(cluster: Cluster, path: str) -> None:
    await serve(cluster, "scaled", path)
    (first,) = await cluster.replicas("scaled")

    async def scale(replicas: int) -> list[str]:
        await cluster.kubectl("scale", "isvc", "scaled", f"--replicas={replicas}")
        if replicas:
            await cluster.ready("scaled")
        else:
            await cluster.wait_for_phase("scaled", "Suspended", "ScaledToZero")

        async def counted() -> bool:
            status = (await cluster.get("scaled")).status
            assert (status.replicas, status.ready_replicas) == (replicas, replicas)
            assert bool(await cluster.urls("scaled")) == bool(replicas)
            return len(await cluster.engines("scaled")) == replicas == len(await cluster.replicas("scaled"))

        await eventually(counted)
        return await cluster.replicas("scaled")

    assert first in await scale(2)
    assert await cluster.answers("scaled")
    await scale(0)
    await scale(1)
    assert await cluster.answers("scaled")
    assert await list_warnings(cluster) == [], "starts and an end that is wanted are normal"


@both_paths
async def test_nothing_is_left_of_a_deleted_service(cluster: Cluster, host: MetalHost, path: str) -> None:
    owned = await cluster.versions(*OWNED)
    budget = await available(cluster, host)
    await serve(cluster, "deleted", path)
    if path == "host":
        process = await cluster.process("deleted")
        await eventually(lambda: holds(cluster, host, budget - process.spec.memory_bytes))
    await cluster.kubectl("delete", "isvc", "deleted")

    async def gone() -> bool:
        left = (await cluster.versions(*OWNED)).keys() - owned.keys()
        # The Jobs' pods and the volume stay, because the Model owns them.
        return not {name for name in left if "tiny-" not in name} and not await cluster.engines("deleted")

    await eventually(gone)
    await eventually(lambda: holds(cluster, host, budget))


async def available(cluster: Cluster, host: MetalHost) -> int:
    async def reported() -> int:
        return (await cluster.host(host.name)).status.available_bytes or 0

    return await eventually(reported)


async def holds(cluster: Cluster, host: MetalHost, available_bytes: int) -> MetalHostObject | None:
    metal_host = await cluster.host(host.name)
    return metal_host if metal_host.status.available_bytes == available_bytes else None


async def test_service_deleted_during_an_agents_absence_stops_on_its_return(cluster: Cluster, host: MetalHost) -> None:
    await serve(cluster, "orphan", "host")
    (engine,) = await cluster.engines("orphan")
    await host.agent.kill()
    await cluster.kubectl("delete", "isvc", "orphan")

    async def leaving() -> bool:
        return (await cluster.process("orphan")).metadata.deletion_timestamp is not None

    await eventually(leaving)
    assert is_alive(engine)
    assert (await cluster.process("orphan")).metadata.finalizers, "kept while nobody knows that it has stopped"
    host.agent.start()

    async def gone() -> bool:
        return not await cluster.processes() and not is_alive(engine)

    await eventually(gone)
