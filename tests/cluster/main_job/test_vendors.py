"""An accelerator that Pomona does not know: one entry of the administrator's file, and services run on its devices."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kube.resources import DEPLOYMENTS, PODS
from runtimes import llama_server
from tests.cluster.main_job.cluster import READY_SECONDS, Cluster
from tests.cluster.nodes import joined
from tests.cluster.shared_controller import SharedController
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process

VENDORS = f"""\
npu:
  resource: example.com/npu
  tolerations: [{{key: example.com/npu, operator: Exists, effect: NoSchedule}}]
  productLabel: example.com/product
  memoryLabel: example.com/memory
  environment: {{NPU_MODE: serve}}
  images: {{llama.cpp: "{llama_server.IMAGES["cpu"]}"}}
"""
LABELS = {"example.com/product": "NPU-9", "example.com/memory": "8192"}


@pytest_asyncio.fixture
async def controller(tmp_path: Path, shared_controller: SharedController) -> Process:
    """The controller, with a file of vendors."""
    path = tmp_path / "vendors.yaml"
    path.write_text(VENDORS)
    return await shared_controller.lend(f"--vendors={path}")


@pytest_asyncio.fixture
async def npu_node(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[Process]:
    """The node `gpu-4` with two devices that only the file of vendors names."""
    async with joined(plane, "gpu-4", tmp_path, watched, resources={"example.com/npu": "2"}, labels=LABELS) as kubelet:
        yield kubelet


@pytest.mark.usefixtures("npu_node")
async def test_vendor_that_nobody_knows_serves(cluster: Cluster) -> None:
    hardware = {"count": 2, "memory": "8Gi", "products": ["NPU-9"]}
    await cluster.apply(cluster.model(), cluster.service("chat", "npu", hardware={"accelerator": "npu", **hardware}))
    # As a user or a pipeline waits.
    await cluster.kubectl("wait", "--for=condition=Ready", "isvc/chat", f"--timeout={READY_SECONDS:.0f}s")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    pods = await cluster.client.list(PODS, cluster.namespace, label_selector="inference.pomona.dev/service=chat")
    (spec,) = (pod["spec"] for pod in pods.items)
    assert spec["nodeName"] == "gpu-4"
    (container,) = spec["initContainers"]
    assert container["resources"]["limits"] == {"example.com/npu": "2"}
    assert {"name": "NPU_MODE", "value": "serve"} in container["env"]
    service = await cluster.get("chat")
    assert (service.status.accelerator, service.status.runtime, service.status.nodes) == ("npu", "llama.cpp", ["gpu-4"])


async def test_unknown_accelerator_and_engine_are_refused_with_what_exists(cluster: Cluster) -> None:
    await cluster.apply(
        cluster.model(), cluster.service("one", "quantum"), cluster.service("two", "cpu", runtime="quantum")
    )
    one = await cluster.wait_for_phase("one", "Failed", "InvalidSpec")
    two = await cluster.wait_for_phase("two", "Failed", "InvalidSpec")
    messages = [service.status.conditions[0].message for service in (one, two)]
    assert "hardware.accelerator quantum does not exist: use one of amd, cpu, " in messages[0]
    assert "npu" in messages[0]
    assert "runtime quantum does not exist: use one of " in messages[1]
    assert await cluster.names(DEPLOYMENTS) == []
