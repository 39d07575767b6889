"""Controller and agent that are one release apart, on either side: both serve, and a host gets only what it knows."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crds.features import AGENT_FEATURES
from kube.client import Client
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.cluster.shared_controller import SharedController
from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.eventually import eventually
from tests.support.previous_version import unpack

PREVIOUS = "previous"
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
    await plane.apply(CHECKOUT / "crds")


async def test_previous_agent_serves_and_is_not_given_what_it_does_not_know(
    cluster: Cluster, client: Client, idle_host: StartMetalHost, watched: list[Process]
) -> None:
    host = await idle_host("studio-1", *OPTIONS)
    old = unpack().agent(host)
    watched.append(old)
    old.start()
    try:
        await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
        await cluster.ready("chat")
        assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
        assert "features" not in (await client.get(METAL_HOSTS, "studio-1"))["status"]

        # What only a later release can need: two processes that differ in nothing else wait for a host.
        spec = (await client.list(METAL_PROCESSES, cluster.namespace)).items[0]["spec"]
        wanted = {name: value for name, value in spec.items() if name != "hostName"}
        for name, features in (("chat-later-0", ["Tomorrow"]), ("chat-now-0", [])):
            metadata = {"name": name, "namespace": cluster.namespace}
            await client.create(METAL_PROCESSES, {"metadata": metadata, "spec": {**wanted, "features": features}})
        await eventually(lambda: host_of(cluster, "chat-now-0"))
        assert await host_of(cluster, "chat-later-0") == ""
        for name in ("chat-later-0", "chat-now-0"):
            await client.delete(METAL_PROCESSES, name, cluster.namespace)
    finally:
        watched.remove(old)
        await old.kill()


async def host_of(cluster: Cluster, process: str) -> str:
    found = await cluster.client.get(METAL_PROCESSES, process, cluster.namespace)
    return str(found["spec"].get("hostName", ""))


@pytest.mark.parametrize("controller", [PREVIOUS], indirect=True)
async def test_agent_serves_for_the_previous_controller_and_its_resources(
    plane: ControlPlane, cluster: Cluster, client: Client, metal_host: StartMetalHost, controller: Process
) -> None:
    host = await metal_host("studio-1", *OPTIONS)
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    assert controller.running
    status = (await client.get(METAL_HOSTS, "studio-1"))["status"]
    # The API server refuses a status with a field that it does not know: the agent leaves it out.
    assert (status["inspects"], "features" in status) == (True, False)
    assert "status_fields_unknown" in host.agent.tail(100)

    await plane.apply(CHECKOUT / "crds")
    await host.agent.stop()
    host.agent.start()

    async def reports_features() -> bool:
        found = (await client.get(METAL_HOSTS, "studio-1"))["status"].get("features")
        return bool(found == list(AGENT_FEATURES))

    await eventually(reports_features)
    assert (await cluster.ask("chat")).status == 200
