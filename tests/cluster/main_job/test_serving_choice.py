"""Serving options that a service leaves out: chosen once, shown in its status, and given to its replicas."""

import contextlib
import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest

from crds.inferenceservice import InferenceService
from crds.serving import ServingChoice
from crds.size import MIB
from kube.resources import INFERENCE_SERVICES, NODES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, PATHS, Cluster
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.watched_states import watch_states

SMALL_BYTES = 40 * MIB
"""Holds the tiny model with one context, and no more."""


async def read_choice(cluster: Cluster, name: str) -> ServingChoice:
    choice = (await cluster.get(name)).status.serving
    assert choice is not None, "nothing is chosen yet"
    return choice


async def read_arguments(cluster: Cluster, name: str) -> dict[str, str]:
    """Return the value of each option of the only engine of a service."""
    engines = await cluster.engines(name)
    assert len(engines) == 1, engines
    words = engines[0].cmdline()
    return dict(itertools.pairwise(words))


@contextlib.asynccontextmanager
async def never_changed(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """Check that a service shows the same choice in each of its states, and keeps its replicas."""
    choice, replicas, seen = (
        await read_choice(cluster, name),
        await cluster.replicas(name),
        list[ServingChoice | None](),
    )

    async def watch() -> None:
        async for services in watch_states(cluster.client, INFERENCE_SERVICES, cluster.namespace):
            seen.extend(
                msgspec.convert(service, InferenceService).status.serving
                for service in services
                if service["metadata"]["name"] == name
            )

    async with running(watch()):
        await eventually(lambda: bool(seen))
        yield
    assert {*seen} == {choice}
    assert await cluster.replicas(name) == replicas


@contextlib.asynccontextmanager
async def closed_node(cluster: Cluster, memory: str, **labels: str) -> AsyncIterator[None]:
    """Add a node, with a GPU if its labels tell what it is, that takes no pod."""
    # It is whole from its first event on, as that of a kubelet.
    amounts = {"cpu": "1", "memory": memory, "pods": "0", "nvidia.com/gpu": "1" if labels else "0"}
    status = {"allocatable": amounts, "capacity": amounts}
    await cluster.client.create(NODES, {"metadata": {"name": "closed", "labels": labels}, "status": status})
    try:
        yield
    finally:
        await cluster.client.delete(NODES, "closed")


async def add_small_machine_for_a_while(cluster: Cluster, path: str, metal_host: StartMetalHost) -> None:
    """Add a small machine, wait for the choice of another service, and remove the machine."""
    later = cluster.service("later", PATHS[path])
    if path == "pod":
        async with closed_node(cluster, "1Gi"):
            await cluster.apply(later)
            await cluster.ready("later")
        return
    await metal_host("studio-2", f"--memory-budget={SMALL_BYTES}")
    await cluster.wait_for_hosts("studio-2")
    await cluster.kubectl("label", "mh", "studio-2", "size=small")
    later["spec"]["nodeSelector"] = {"size": "small"}
    await cluster.apply(later)
    await cluster.ready("later")
    assert (await read_choice(cluster, "later")).parallel == 1
    await cluster.kubectl("delete", "isvc/later", "mh/studio-2", "--wait=false")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("host")
async def test_choice_reaches_replicas_and_outlives_machines_that_come_and_go(
    cluster: Cluster, path: str, metal_host: StartMetalHost
) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", PATHS[path]))
    await cluster.ready("chat")
    choice = await read_choice(cluster, "chat")
    assert (choice.context_length, choice.parallel) == (4096, 4)
    assert choice.message == "contextLength 4096: that of the model; parallel 4: so many whole contexts fit"
    assert choice.prompt_cache.endswith("Mi")
    arguments = await read_arguments(cluster, "chat")
    assert (arguments["-c"], arguments["-np"]) == (f"{4 * 4096}", "4")
    assert f"{arguments['--cache-ram']}Mi" == choice.prompt_cache
    if path == "host":
        spec = (await cluster.process("chat")).spec
        assert (spec.context_length, spec.parallel, spec.prompt_cache) == (4096, 4, choice.prompt_cache)

    async with never_changed(cluster, "chat"):
        await add_small_machine_for_a_while(cluster, path, metal_host)
        await cluster.apply(cluster.service("last", PATHS[path]))
        await cluster.ready("last")

    before = await cluster.replicas("chat")
    await cluster.edit("chat", contextLength=2048)
    await cluster.ready("chat")

    async def is_replaced() -> bool:
        assert (await read_choice(cluster, "chat")).context_length == 2048
        assert (await read_arguments(cluster, "chat"))["-c"] == f"{4 * 2048}"
        return not {*before} & {*await cluster.replicas("chat")}

    await eventually(is_replaced)


async def test_first_host_that_holds_the_model_decides(cluster: Cluster, metal_host: StartMetalHost) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))

    async def is_provisional() -> bool:
        choice = await read_choice(cluster, "chat")
        return choice.context_length == 4096 and not choice.inputs

    await eventually(is_provisional)
    await metal_host("studio-1", f"--memory-budget={SMALL_BYTES}")
    await cluster.ready("chat")
    choice = await read_choice(cluster, "chat")
    assert (choice.parallel, choice.prompt_cache) == (1, "")
    assert "parallel 1: there is no memory for more" in choice.message
    assert (await read_arguments(cluster, "chat"))["-np"] == "1"
    async with never_changed(cluster, "chat"):
        await metal_host("studio-2", f"--memory-budget={GIB}")
        await cluster.wait_for_hosts("studio-2")
        await cluster.apply(cluster.service("later", "metal"))
        await cluster.ready("later")


@pytest.mark.usefixtures("gpu_node")
async def test_node_whose_devices_are_known_replaces_none_on_devices_of_unknown_size(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "nvidia"))
    await cluster.ready("chat")
    product = {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.memory": "46068"}
    async with never_changed(cluster, "chat"), closed_node(cluster, "64Gi", **product):
        await cluster.apply(cluster.service("later", "nvidia"))
        await cluster.ready("later")
        assert (await read_choice(cluster, "later")).parallel == 4
