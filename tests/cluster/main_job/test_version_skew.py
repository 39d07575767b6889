"""Controller and agent that are one release apart, on either side: both serve, and an update breaks no stream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, EndlessStream
from tests.cluster.shared_controller import SharedController
from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.previous_version import marked, unpack

pytestmark = pytest.mark.long

PREVIOUS = "previous"
STREAMS = 32
TOKENS = 20000
"""Tokens of one answer: all of them together take minutes, an update takes seconds."""
OPTIONS = ("--memory-budget", str(64 * GIB))


@pytest.fixture
async def controller(
    request: pytest.FixtureRequest,
    plane: ControlPlane,
    shared_controller: SharedController,
    tmp_path: Path,
    watched: list[Process],
) -> AsyncIterator[Process]:
    """The controller of this version, or that of the previous one with the CRDs of that one."""
    if getattr(request, "param", None) != PREVIOUS:
        yield await shared_controller.lend()
        return
    await shared_controller.end()
    previous = unpack()
    await plane.apply(previous.folder / "crds")
    process = previous.controller(await members.controller(plane, tmp_path))
    watched.append(process)
    process.start()
    yield process
    watched.remove(process)
    await process.stop()
    await members.delete_leadership(plane)
    await plane.apply(CHECKOUT / "crds")
    await members.wait_for_kinds(plane)


async def test_previous_agent_serves_for_the_controller(
    cluster: Cluster, idle_host: StartMetalHost, watched: list[Process]
) -> None:
    host = await idle_host("studio-1", *OPTIONS)
    old = unpack().agent(host)
    watched.append(old)
    old.start()
    try:
        await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
        await cluster.ready("chat")
        assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    finally:
        watched.remove(old)
        await old.kill()


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_update_of_controller_agent_and_proxy_breaks_none_of_32_streams(
    plane: ControlPlane,
    cluster: Cluster,
    *,
    idle_host: StartMetalHost,
    shared_controller: SharedController,
    controller: Process,
    watched: list[Process],
) -> None:
    host = await idle_host("studio-1", *OPTIONS)
    previous = unpack()
    old = previous.agent(host)
    watched.append(old)
    old.start()
    slots: dict[str, Any] = {"contextLength": TOKENS + 500, "parallel": STREAMS}
    on_host, in_pod = cluster.service("by-host", "metal", **slots), cluster.service("by-pod", "cpu")
    await cluster.apply(cluster.model(file="loop.gguf"), on_host, in_pod)
    await cluster.ready("by-host", "by-pod")
    (url,) = await cluster.urls("by-host")
    token = await cluster.token("by-host")
    streams = [EndlessStream(url, token, TOKENS) for _ in range(STREAMS)]
    before = marked(host.state_folder)
    (engine,) = await cluster.engines("by-pod")
    async with running(*(stream.run() for stream in streams)):
        await eventually(lambda: all(stream.lines > 0 for stream in streams))
        await plane.apply(CHECKOUT / "crds", CHECKOUT / "deploy" / "install" / "rbac.yaml")
        await controller.stop()
        await shared_controller.lend_new()
        await old.stop()
        watched.remove(old)
        host.agent.start()

        def is_updated() -> bool:
            return any(not previous.runs(process) for process in marked(host.state_folder) - before)

        await eventually(is_updated)
        await asyncio.gather(*(stream.flows() for stream in streams))
        assert [stream.has_ended for stream in streams] == [False] * STREAMS, "the update took longer than the answers"
    # The image of the proxy is another one: the pod is replaced, and the next one is ready before it ends.
    await eventually(lambda: not is_alive(engine))
    await cluster.ready("by-pod")
    assert (await cluster.ask("by-pod")).status == 200
    assert len(before & marked(host.state_folder)) >= 1, "the engine is the same"


@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_agent_serves_for_the_previous_controller_and_its_resources(
    cluster: Cluster, metal_host: StartMetalHost, controller: Process
) -> None:
    await metal_host("studio-1", *OPTIONS)
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    assert controller.running
