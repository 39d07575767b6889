"""A real node agent reports this machine, and keeps to its own labels."""

import re
from pathlib import Path

import aiohttp
import psutil

from crds.meta import GROUP
from kube.errors import NotFound
from kube.resources import NODE_FITNESSES, NODES
from tests.cluster.node_agent.conftest import METRICS_PORT, NAME, REST_PORT, AgentNode
from tests.support.eventually import eventually

CPUINFO = Path("/proc/cpuinfo").read_text()
GFD = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "23034"}
"""Labels of NVIDIA's labeller on a node with two L4."""


async def test_agent_reports_this_machine_and_its_facts_stay_when_it_is_killed(agent_node: AgentNode) -> None:
    agent = agent_node.start()

    async def reported() -> bool:
        reason: str = (await agent_node.condition())["reason"]
        return reason == "HardwareRead"

    await eventually(reported)
    status = await agent_node.status()
    assert (status["vendor"], status["source"]) == ("cpu", "proc")
    assert status["memoryBytes"] == psutil.virtual_memory().total
    model = re.search(r"^model name\s*:\s*(.*)$", CPUINFO, re.MULTILINE)
    assert model is None or status["processor"] == model[1].strip()
    (owner,) = (await agent_node.client.get(NODE_FITNESSES, NAME))["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", NAME)
    assert (await agent_node.labels())[f"{GROUP}/cpu.avx512"] == str("avx512f" in CPUINFO).lower()
    await agent.kill()
    assert (await agent_node.status())["observedAt"]
    assert f"{GROUP}/cpu.avx512" in await agent_node.labels()
    await agent_node.client.delete(NODE_FITNESSES, NAME)
    agent_node.start()
    await eventually(reported)
    await agent_node.client.delete(NODES, NAME)

    async def is_collected() -> bool:
        try:
            await agent_node.client.get(NODE_FITNESSES, NAME)
        except NotFound:
            return True
        return False

    await eventually(is_collected)


async def test_labels_of_others_are_read_left_and_named_and_own_ones_go_with_their_fact(
    agent_node: AgentNode, tmp_path: Path
) -> None:
    await agent_node.set_labels({f"{GROUP}/gpu.count": "8"}, "kubectl-label")
    await agent_node.set_labels({**GFD})
    key = tmp_path / "key"
    key.write_text("s3cret")
    agent_node.start(f"--api-key-file={key}", "--metric-prefix=flexinfer")

    async def is_named() -> bool:
        message = str((await agent_node.condition()).get("message"))
        return f"label {GROUP}/gpu.count is '8' by kubectl-label, not '2'" in message

    await eventually(is_named)
    labels = await agent_node.labels()
    assert labels[f"{GROUP}/gpu.count"] == "8"
    assert labels[f"{GROUP}/gpu.vendor"] == "NVIDIA"
    assert labels[f"{GROUP}/gpu.vram"] == "22Gi"
    assert GFD.items() <= labels.items()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{METRICS_PORT}/metrics") as answer:
            text = await answer.text()
        assert f'flexinfer_node_agent_label_conflicts{{node="{NAME}"}} 1.0' in text
        assert "flexinfer_gpu_memory_bytes{" in text
        url = f"http://127.0.0.1:{REST_PORT}/api/v1/system"
        async with session.get(url) as answer:
            assert answer.status == 401
        async with session.get(url, headers={"Authorization": "Bearer s3cret"}) as answer:
            assert (await answer.json())["system"]["gpu_count"] == 2
    await agent_node.set_labels(dict.fromkeys(GFD))

    async def is_withdrawn() -> bool:
        return f"{GROUP}/gpu.vendor" not in await agent_node.labels()

    await eventually(is_withdrawn)
    assert (await agent_node.labels())[f"{GROUP}/gpu.count"] == "8"
    status = await agent_node.status()
    assert (status["vendor"], "devices" in status) == ("cpu", False)
