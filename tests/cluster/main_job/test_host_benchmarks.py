"""The agent of a host measures the model that it serves; the speed is stored, shown and used like that of a Job."""

import asyncio

import msgspec
import pytest
import pytest_asyncio

from controller.services.device_classes import find_host_class
from crds.inferenceservice import InferenceService
from fitness.performance import MeasuredPerformance
from kube.resources import CONFIG_MAPS
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, READY_SECONDS, Cluster
from tests.controlplane.members import MetalHost
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf

CONTROLLER_NAMESPACE = "pomona-system"


@pytest_asyncio.fixture
async def host(metal_host: StartMetalHost) -> MetalHost:
    """The host `studio-1`, which measures what it serves."""
    return await metal_host("studio-1", f"--memory-budget={64 * GIB}", "--benchmarks")


@pytest.mark.long
async def test_speed_and_traffic_of_a_service_on_a_host_are_shown(cluster: Cluster, host: MetalHost) -> None:
    # Of tiny.gguf a busy machine hands over all tokens at once, which is a speed that no host has.
    tiny_gguf.write(cluster.files.root / "slow.gguf", n_embd=256, n_ff=1024, n_layer=8)
    await cluster.apply(cluster.model(file="slow.gguf"), cluster.service("chat", "metal"))
    await cluster.ready("chat")

    async def measured() -> InferenceService:
        found = await cluster.get("chat")
        assert found.status.performance is not None
        assert any(speed.source == "Measured" for speed in found.status.speeds), found.status.speeds
        return found

    service = await eventually(measured, READY_SECONDS)
    shown, device_class = service.status.performance, find_host_class(await cluster.host(host.host.name))
    assert shown is not None
    assert (shown.device_class, shown.source) == (device_class, "host")
    assert [speed.tokens_per_second for speed in service.status.speeds if speed.source == "Measured"] == [
        shown.tokens_per_second
    ]
    stored = await cluster.client.get(CONFIG_MAPS, f"bench-{shown.model_hash}", CONTROLLER_NAMESPACE)
    assert list(stored["data"]) == [f"{device_class}_{cluster.namespace}"]
    (text,) = stored["data"].values()
    record = msgspec.json.decode(text, type=MeasuredPerformance)
    assert (record.node, record.runtime, record.model, record.source) == ("studio-1", "llama.cpp", "tiny", "host")
    reported = (await cluster.process("chat")).status.performance
    assert reported is not None
    assert (reported.tokens_per_second, reported.measured_at) == (shown.tokens_per_second, record.measured_at)

    await _follow_traffic(cluster)
    # An agent that starts again reports what it measured.
    await host.agent.stop()
    host.agent.start()

    async def reports_the_same() -> bool:
        status = (await cluster.process("chat")).status
        return status.phase == "Ready" and status.performance == reported

    await eventually(reports_the_same)
    await cluster.client.delete(CONFIG_MAPS, stored["metadata"]["name"], CONTROLLER_NAMESPACE)


async def _follow_traffic(cluster: Cluster) -> None:
    """Check that a service shows the tokens of its process: none but those of probes, until a client asks."""

    async def shown() -> str:
        return (await cluster.get("chat")).status.tokens_per_second

    async def ask() -> None:
        while True:
            await cluster.ask("chat")
            await asyncio.sleep(0.2)

    assert float(await eventually(shown, READY_SECONDS)) < 1
    async with running(ask()):

        async def follows() -> bool:
            of_process, of_service = (await cluster.process("chat")).status.tokens_per_second, await shown()
            return float(of_process) > 1 and abs(float(of_process) - float(of_service)) <= 0.1 * float(of_process)

        await eventually(follows, READY_SECONDS)
