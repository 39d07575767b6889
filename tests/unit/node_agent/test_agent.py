"""The agent reports once a minute, at once when a device changes, and neither hangs nor floods the API server."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from crds.nodefitness import STALE_SECONDS, NodeDevice, NodeFitnessStatus
from devices.node_hardware import HardwareReading
from node_agent.agent import NodeAgent
from node_agent.fitness_writer import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS
from node_agent.metrics import NodeMetrics
from node_agent.options import NodeAgentOptions
from tests.support import virtual_time
from tests.support.node_api import NAME, NodeApi

GIB = 2**30
PREFIX = "inference.pomona.dev"
HOUR = 3600
DEVICE = NodeDevice(
    id="GPU-1", product="NVIDIA L4", architecture="sm_89", memory_bytes=24 * GIB, temperature_celsius=50
)
HARDWARE = NodeFitnessStatus(
    vendor="nvidia",
    source="nvidia-smi",
    device_class="nvidia-l4x1",
    driver="580",
    devices=[DEVICE],
    int4=True,
    cpu_features=["avx2"],
    available_bytes=9 * GIB,
)
CPU = NodeFitnessStatus(vendor="cpu", source="proc", device_class="cpu-x4")
EPOCH = datetime(2026, 11, 26, 22, 0, tzinfo=UTC)


class Node:
    """A node with an agent: a probe reads `hardware` and `problems`, or hangs by `hang`; `seen` are its labels."""

    def __init__(self) -> None:
        self.api = NodeApi()
        self.hardware = HARDWARE
        self.problems: tuple[str, ...] = ()
        self.error: Exception | None = None
        self.hang: asyncio.Event | None = None
        self.probes = 0
        self.seen: Mapping[str, str] = {}
        self.metrics = NodeMetrics(NAME, "pomona")
        self.agent = NodeAgent(
            self.api.client,
            NodeAgentOptions(NAME),
            self._probe,
            20 * 10**9,
            self.metrics,
            wall_clock=lambda: EPOCH + timedelta(seconds=asyncio.get_running_loop().time()),
        )

    async def _probe(self, labels: Mapping[str, str]) -> HardwareReading:
        self.probes += 1
        self.seen = dict(labels)
        if self.hang:
            await self.hang.wait()
        if self.error:
            raise self.error
        return HardwareReading(self.hardware, self.problems)

    def sample(self, name: str) -> float:
        lines = [line for line in self.metrics.render().decode().splitlines() if line.startswith(name)]
        (line,) = lines
        return float(line.rsplit(" ", 1)[1])


def simulate(scenario: Callable[[Node], Awaitable[None]]) -> Node:
    """Run an agent beside `scenario`, in virtual time."""

    async def main() -> Node:
        node = Node()
        work = asyncio.ensure_future(node.agent.run())
        await asyncio.sleep(1)
        await scenario(node)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return node

    return virtual_time.run(main())


def test_first_report_has_the_facts_and_the_labels_at_once() -> None:
    async def scenario(node: Node) -> None:
        assert node.api.status["vendor"] == "nvidia"
        assert node.api.status["memoryBandwidthBytesPerSecond"] == 20 * 10**9
        assert node.api.condition["reason"] == "HardwareRead"
        assert node.api.labels[f"{PREFIX}/gpu.vram"] == "24Gi"
        assert (node.api.count("nodes"), node.api.count("nodefitnesses")) == (1, 2)

    simulate(scenario)


def test_hour_without_a_change_costs_a_write_a_minute() -> None:
    async def scenario(node: Node) -> None:
        before = len(node.api.writes)
        for step in range(HOUR // 30):
            device = replace(DEVICE, temperature_celsius=50 + step % 40, free_bytes=step * GIB // 8)
            node.hardware = replace(HARDWARE, devices=[device], available_bytes=(9 + step) * GIB)
            await asyncio.sleep(30)
        assert 59 <= len(node.api.writes) - before <= 61
        times = [at for kind, at in node.api.writes if kind == "nodefitnesses"][1:]
        assert max(b - a for a, b in itertools.pairwise(times)) <= 90 < STALE_SECONDS

    simulate(scenario)


def test_vanished_device_and_its_labels_are_gone_with_the_next_probe() -> None:
    async def scenario(node: Node) -> None:
        node.hardware = replace(CPU, cpu_features=["avx2"])
        await asyncio.sleep(31)
        assert "devices" not in node.api.status
        assert node.api.labels == {f"{PREFIX}/cpu.avx512": "false"}
        node.hardware = HARDWARE
        await asyncio.sleep(31)
        assert [device["id"] for device in node.api.status["devices"]] == ["GPU-1"]
        assert f"{PREFIX}/gpu.vendor" in node.api.labels

    simulate(scenario)


def test_tool_that_fails_takes_neither_device_nor_label_and_is_named() -> None:
    async def scenario(node: Node) -> None:
        node.hardware, node.problems = CPU, ("nvidia-smi hung for 5 s: restart the node",)
        await asyncio.sleep(91)
        assert [device["id"] for device in node.api.status["devices"]] == ["GPU-1"]
        assert node.api.labels[f"{PREFIX}/gpu.count"] == "1"
        assert node.api.condition["reason"] == "ToolFailed"
        assert "nvidia-smi hung for 5 s" in node.api.condition["message"]
        await asyncio.sleep(700)
        assert "devices" not in node.api.status
        assert f"{PREFIX}/gpu.count" not in node.api.labels
        assert "devices are unknown" in node.api.condition["message"]

    simulate(scenario)


def test_label_of_somebody_else_stays_and_is_named_while_others_are_written() -> None:
    async def scenario(node: Node) -> None:
        node.api.set_label(f"{PREFIX}/gpu.vendor", "NVIDIA-H100", "gpu-labeller")
        await asyncio.sleep(91)
        assert node.api.labels[f"{PREFIX}/gpu.vendor"] == "NVIDIA-H100"
        assert node.api.condition["reason"] == "LabelConflict"
        assert "by gpu-labeller" in node.api.condition["message"]
        assert node.sample("pomona_node_agent_label_conflicts") == 1
        node.hardware = replace(HARDWARE, devices=[DEVICE, replace(DEVICE, id="GPU-2")])
        await asyncio.sleep(31)
        assert node.api.labels[f"{PREFIX}/gpu.count"] == "2"
        node.api.set_label(f"{PREFIX}/gpu.vendor", None)
        await asyncio.sleep(91)
        assert node.api.labels[f"{PREFIX}/gpu.vendor"] == "NVIDIA"
        assert node.api.condition["status"] == "True"

    simulate(scenario)


def test_label_that_somebody_takes_again_and_again_is_fought_over_at_most_once_a_probe() -> None:
    async def scenario(node: Node) -> None:
        before = node.api.count("nodes")
        for number in range(600):
            node.api.set_label(f"{PREFIX}/gpu.vendor", None if number % 2 else "X")
            await asyncio.sleep(1)
        assert node.api.count("nodes") - before <= 21

    simulate(scenario)


def test_labels_of_other_labellers_reach_the_probe() -> None:
    async def scenario(node: Node) -> None:
        node.api.set_label("nvidia.com/gpu.product", "NVIDIA-L4", "gfd")
        await asyncio.sleep(31)
        assert node.seen["nvidia.com/gpu.product"] == "NVIDIA-L4"

    simulate(scenario)


def test_probe_that_hangs_is_not_started_twice_and_lets_the_facts_grow_old() -> None:
    async def scenario(node: Node) -> None:
        node.hang = asyncio.Event()
        probes, observed = node.probes, node.api.status["observedAt"]
        await asyncio.sleep(31)
        observed = node.api.status["observedAt"]
        await asyncio.sleep(300)
        assert node.probes == probes + 1
        assert node.api.status["observedAt"] == observed
        assert node.api.condition["reason"] == "ProbeFailed"
        assert "has not ended" in node.api.condition["message"]
        assert node.sample("pomona_node_agent_probe_failures_total") > 5
        node.hang.set()
        node.hang = None
        await asyncio.sleep(120)
        assert node.api.status["observedAt"] > observed
        assert node.api.condition["status"] == "True"

    simulate(scenario)


def test_probe_with_a_defect_ends_nothing() -> None:
    async def scenario(node: Node) -> None:
        node.error = IndexError("defect")
        await asyncio.sleep(100)
        assert node.api.condition["reason"] == "ProbeFailed"
        assert "IndexError" in node.api.condition["message"]
        assert node.api.status["vendor"] == "nvidia"
        node.error = None
        await asyncio.sleep(100)
        assert node.api.condition["status"] == "True"

    simulate(scenario)


def test_deleted_nodefitness_is_made_again() -> None:
    async def scenario(node: Node) -> None:
        node.api.fitness = None
        await asyncio.sleep(121)
        assert node.api.status["vendor"] == "nvidia"

    simulate(scenario)


@pytest.mark.parametrize("kind", ["nodes", "nodefitnesses"])
def test_refused_writes_are_sent_again_after_growing_pauses(kind: str) -> None:
    async def scenario(node: Node) -> None:
        node.api.refusals = {kind: 403}
        node.hardware = replace(HARDWARE, driver="581", int4=False)
        before = node.api.count(kind)
        await asyncio.sleep(HOUR)
        assert 1 < node.api.count(kind) - before < 20
        if kind == "nodes":
            assert node.api.condition["reason"] == "LabelsRefused"
        node.api.refusals = {}
        await asyncio.sleep(1.2 * LAST_PAUSE_SECONDS + FIRST_PAUSE_SECONDS + 60)
        assert node.api.labels[f"{PREFIX}/gpu.int4"] == "false"
        assert node.api.condition["reason"] == "HardwareRead"

    simulate(scenario)


def test_outage_of_the_api_is_survived_and_reported_after() -> None:
    async def scenario(node: Node) -> None:
        node.api.is_cut = True
        node.hardware = CPU
        await asyncio.sleep(300)
        assert node.api.status["vendor"] == "nvidia"
        node.api.is_cut = False
        await asyncio.sleep(60)
        assert node.api.status["vendor"] == "cpu"

    simulate(scenario)


def test_agents_that_start_together_do_not_report_together_for_ever() -> None:
    """Nor do those that one outage has kept waiting."""

    async def main() -> None:
        nodes = [Node() for _ in range(60)]
        works = [asyncio.ensure_future(node.agent.run()) for node in nodes]
        await asyncio.sleep(HOUR)
        assert_spread(nodes)
        for node in nodes:
            node.api.is_cut = True
        await asyncio.sleep(600)
        for node in nodes:
            node.api.is_cut = False
        await asyncio.sleep(HOUR)
        assert_spread(nodes)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    virtual_time.run(main())


def assert_spread(nodes: list[Node]) -> None:
    phases = [node.api.writes[-1][1] % 60 for node in nodes]
    assert all(sum(start <= phase < start + 15 for phase in phases) in range(3, 31) for start in (0, 15, 30, 45))
