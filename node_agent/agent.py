"""The loop of the node agent: probe the hardware, keep the labels of the Node, and report the NodeFitness.

A probe runs in a thread, so a tool or a driver that hangs stops neither the metrics nor the heartbeat of the process;
the facts grow old and the condition says so. Each step follows the probe, so that an agent never writes more often.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import structlog

from devices.node_hardware import NodeHardware
from kube.client import Client
from kube.resources import NODES
from kube.time import rfc3339
from kube.watch import Selection, reflect
from node_agent.fitness_writer import FitnessWriter, LabelWriter
from node_agent.last_devices import KnownHardware, keep_last_devices
from node_agent.metrics import NodeMetrics
from node_agent.node_fitness import ReportProblems, build_condition, build_status
from node_agent.node_labels import LabelConflict, build_labels, plan_labels
from node_agent.options import NodeAgentOptions
from node_agent.own_node import OwnNode, read_node_metadata

PROBE_SECONDS: Final = 20.0
"""Longest wait for a probe: the tools that it starts have limits of their own, so only a driver takes longer."""
NODE_SECONDS: Final = 10.0
"""Longest wait for the first sight of the Node: its labels may state the devices."""

Probe = Callable[[Mapping[str, str]], Awaitable[NodeHardware]]
"""Reads the hardware, with the labels of the Node."""

log = structlog.get_logger()


def read_wall_clock() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


class NodeAgent:
    """The agent of one node.

    Args:
        client: the API server.
        options: the options.
        probe: reads the hardware.
        memory_bandwidth: that of the processor, in bytes a second; None: unknown.
        metrics: receives what is read.
        wall_clock: the time that is written.
    """

    def __init__(
        self,
        client: Client,
        options: NodeAgentOptions,
        probe: Probe,
        memory_bandwidth: int | None,
        metrics: NodeMetrics,
        *,
        wall_clock: Callable[[], datetime] = read_wall_clock,
    ) -> None:
        self._client = client
        self._options = options
        self._probe = probe
        self._bandwidth = memory_bandwidth
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._own = OwnNode()
        self._clock = clock = asyncio.get_running_loop().time
        self._labels = LabelWriter(client, clock)
        self._fitness = FitnessWriter(client, clock, options.interval_seconds)
        self._running: asyncio.Task[NodeHardware] | None = None
        self._started_at = wall_clock()
        self._observed_at = wall_clock()
        self._logged: object = None
        self._known: KnownHardware | None = None

    @property
    def hardware(self) -> NodeHardware | None:
        """The hardware as it was read last; None: not yet."""
        return self._known.hardware if self._known else None

    async def run(self) -> None:
        """Run until cancelled."""
        synced = asyncio.Event()
        watch = reflect(
            self._client,
            self._own,
            Selection(NODES, field_selector=f"metadata.name={self._options.node_name}", read=read_node_metadata),
            synced,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watch)
            group.create_task(self._work(synced))

    async def _work(self, synced: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(synced.wait(), NODE_SECONDS)
        except TimeoutError:
            log.warning("node_not_read", node=self._options.node_name, remedy="is the API server reachable?")
        await self.step()
        # Agents that start together do not probe together for ever.
        next_at = self._clock() + random.uniform(0, self._options.interval_seconds)  # noqa: S311 - spreads load
        while True:
            await asyncio.sleep(next_at - self._clock())
            await self.step()
            next_at = max(next_at + self._options.interval_seconds, self._clock())

    async def step(self) -> None:
        """Probe, and write what is due; a defect is logged and ends nothing."""
        try:
            failure = await self._read_hardware()
            conflicts = await self._write_labels()
            await self._report(ReportProblems(conflicts, self._labels.refused.message, failure))
        except Exception:  # one defect must not end the labels and the heartbeat of the node
            log.exception("step_failed", node=self._options.node_name)

    async def _read_hardware(self) -> str:
        """Probe the hardware; return a sentence if nothing was read."""
        started = self._clock()
        if self._running is None:
            self._started_at = self._wall_clock()
            self._running = asyncio.ensure_future(self._run_probe())
        done, _ = await asyncio.wait({self._running}, timeout=PROBE_SECONDS)
        if not done:
            self._metrics.count_probe(self._clock() - started, failed=True)
            return (
                f"the probe of {rfc3339(self._started_at)} has not ended, so these facts grow old: look at the driver "
                "of the devices, or restart the node"
            )
        probe, self._running = self._running, None
        if error := probe.exception():
            log.error("probe_failed", error=repr(error), exc_info=error)
            self._metrics.count_probe(self._clock() - started, failed=True)
            return f"the probe failed with {type(error).__name__}, so these facts grow old: see the log of the agent"
        hardware = probe.result()
        self._metrics.count_probe(self._clock() - started, failed=bool(hardware.problems))
        self._observed_at = self._wall_clock()
        self._take(keep_last_devices(self._known, hardware, self._observed_at, self._clock()))
        return ""

    async def _run_probe(self) -> NodeHardware:
        return await self._probe(self._own.labels)

    def _take(self, known_hardware: KnownHardware) -> None:
        hardware = known_hardware.hardware
        seen = known_hardware.standing, hardware.vendor, [device.id for device in hardware.devices], hardware.problems
        if seen != self._logged:
            log.info(
                "hardware_read",
                vendor=hardware.vendor,
                source=hardware.source,
                devices=len(hardware.devices),
                standing=known_hardware.standing,
                problems=hardware.problems,
            )
            self._logged = seen
        self._known = known_hardware
        self._metrics.take(hardware)

    async def _write_labels(self) -> tuple[LabelConflict, ...]:
        node = self._own.node
        if node is None or self._known is None:
            return ()
        plan = plan_labels(build_labels(self._known.hardware, self._options.label_prefix), node)
        self._metrics.note_conflicts(plan.conflicts)
        if written := await self._labels.write(node, plan):
            self._own.put(NODES, written)
        return plan.conflicts

    async def _report(self, problems: ReportProblems) -> None:
        node = self._own.node
        if node is None:
            log.warning("node_unknown", node=self._options.node_name, remedy="--node-name is the name of a Node")
            return
        status = build_status(self._known, self._observed_at, self._bandwidth) if self._known else None
        await self._fitness.write(node, status, build_condition(self._known, problems), self._wall_clock())
