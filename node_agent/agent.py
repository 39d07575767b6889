"""The loop of the node agent: probe the hardware, keep the labels of the Node, and report the NodeFitness.

A probe runs in a thread, so a tool or a driver that hangs stops neither the metrics nor the heartbeat of the process;
the facts grow old and the condition says so. Each step follows the probe, so that an agent never writes more often.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Final

import structlog
from msgspec.structs import replace

from crds.nodefitness import NodeFitnessStatus
from devices.node_hardware import HardwareReading
from kube.client import Client, Obj
from kube.resources import NODES
from kube.store import Store
from kube.time import rfc3339
from kube.watch import Selection, reflect
from node_agent.fitness_writer import FitnessWriter, LabelWriter
from node_agent.last_devices import ReportedHardware, keep_last_devices
from node_agent.metrics import NodeMetrics
from node_agent.node_fitness import ReportProblems, build_condition
from node_agent.node_labels import LabelConflict, build_labels, plan_labels, read_node_metadata
from node_agent.options import NodeAgentOptions

PROBE_SECONDS: Final = 20.0
"""Longest wait for a probe: the tools that it starts have limits of their own, so only a driver takes longer."""
NODE_SECONDS: Final = 10.0
"""Longest wait for the first sight of the Node: its labels may state the devices."""

Probe = Callable[[Mapping[str, str]], Awaitable[HardwareReading]]
"""Reads the hardware, with the labels of the Node."""
_VERSION: Final = metadata.version("pomona")

log = structlog.get_logger()


class NodeAgent:
    """The agent of one node.

    Args:
        client: the API server.
        options: the options.
        probe: reads the hardware.
        memory_bandwidth: that of the processor, in bytes a second; None: unknown.
        metrics: receives what is read.
        wall_clock: returns the time that is written.
    """

    def __init__(
        self,
        client: Client,
        options: NodeAgentOptions,
        probe: Probe,
        memory_bandwidth: int | None,
        metrics: NodeMetrics,
        *,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Build the agent of `options.node_name`. Needs a running event loop, whose time measures intervals."""
        self._client = client
        self._options = options
        self._probe = probe
        self._bandwidth = memory_bandwidth
        self._metrics = metrics
        self._wall_clock = wall_clock

        self._store = Store()
        """Has the Node of this agent and nothing else."""
        self._clock = clock = asyncio.get_running_loop().time
        self._labels = LabelWriter(client, clock)
        self._fitness = FitnessWriter(client, clock, options.interval_seconds)

        # The last probe, and what came of it.
        self._running_probe: asyncio.Future[HardwareReading] | None = None
        """The probe that has not ended yet, which may be one of an earlier step."""
        self._probe_started_at = wall_clock()
        self._last_logged: object = None
        """The facts in the last log line, which are logged again only if one has changed."""
        self._reported: ReportedHardware | None = None  # the last hardware, as it is written; None: not read yet

    @property
    def hardware(self) -> NodeFitnessStatus | None:
        """The hardware as it was read last; None: not yet."""
        return self._reported.hardware if self._reported else None

    @property
    def _node(self) -> Obj | None:
        """The Node of this agent; None while it does not exist, or was not listed yet."""
        return self._store.get(NODES, self._options.node_name)

    async def run(self) -> None:
        """Watch the Node of this agent and probe its hardware, until cancelled."""
        synced = asyncio.Event()
        watch = reflect(
            self._client,
            self._store,
            Selection(NODES, field_selector=f"metadata.name={self._options.node_name}", read=read_node_metadata),
            synced,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watch)
            group.create_task(self._probe_at_intervals(synced))

    async def _probe_at_intervals(self, synced: asyncio.Event) -> None:
        """Probe at intervals until cancelled; `synced` is set once the Node was read.

        The first probe waits for the Node for a limited time, since its labels may state the devices.
        """
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
            # After a step that took longer than the interval, the next one follows at once.
            next_at = max(next_at + self._options.interval_seconds, self._clock())

    async def step(self) -> None:
        """Probe, and write what is due; a defect is logged and ends nothing."""
        try:
            # failure: why nothing was read, "" if it was; conflicts: labels that another labeller owns with other
            # values
            failure = await self._read_hardware()
            conflicts = await self._write_labels()
            await self._report(ReportProblems(conflicts, self._labels.refused.message, probe_failed=failure))
        except Exception:  # one defect must not end the labels and the heartbeat of the node
            log.exception("step_failed", node=self._options.node_name)

    async def _read_hardware(self) -> str:
        """Probe the hardware and keep what was read; return "", or a sentence why nothing was read.

        1. Start a probe, unless one of an earlier call still runs: a driver that hangs must not collect threads.
        2. Wait for it, for a limited time. Probes that hang or fail are counted, and the facts before them stay.
        3. Keep what it read, with the devices of the last probe where a failing tool has missed them.
        """
        started = self._clock()
        # 1. _running_probe is the probe that has not ended yet, and _probe_started_at the time when it began.
        if self._running_probe is None:
            self._probe_started_at = self._wall_clock()
            labels = self._node["metadata"].get("labels", {}) if self._node else {}
            self._running_probe = asyncio.ensure_future(self._probe(labels))

        # 2. It may hang, or fail.
        done, _ = await asyncio.wait({self._running_probe}, timeout=PROBE_SECONDS)
        if not done:
            self._metrics.count_probe(self._clock() - started, failed=True)
            return (
                f"the probe of {rfc3339(self._probe_started_at)} has not ended, so these facts grow old: look at the "
                "driver of the devices, or restart the node"
            )
        probe, self._running_probe = self._running_probe, None
        if error := probe.exception():
            log.error("probe_failed", error=repr(error), exc_info=error)
            self._metrics.count_probe(self._clock() - started, failed=True)
            return f"the probe failed with {type(error).__name__}, so these facts grow old: see the log of the agent"

        # `problems` are those of single tools: the rest of the reading is good.
        reading = probe.result()
        self._metrics.count_probe(self._clock() - started, failed=bool(reading.problems))

        # 3. _bandwidth was measured once, when the agent started.
        hardware = replace(
            reading.hardware,
            observed_at=rfc3339(self._wall_clock()),
            memory_bandwidth_bytes_per_second=self._bandwidth,
            agent_version=_VERSION,
        )
        self._report_hardware(keep_last_devices(self._reported, reading._replace(hardware=hardware), self._clock()))
        return ""

    def _report_hardware(self, reported: ReportedHardware) -> None:
        """Keep the hardware for labels and the REST API, show it in the metrics, and log it if it has changed."""
        hardware, state, problems = reported.hardware, reported.devices_state, reported.problems
        logged = state, hardware.vendor, [device.id for device in hardware.devices], problems
        # _last_logged: the facts in the last log line
        if logged != self._last_logged:
            log.info(
                "hardware_read",
                vendor=hardware.vendor,
                source=hardware.source,
                devices=len(hardware.devices),
                devices_state=state,
                problems=problems,
            )
            self._last_logged = logged

        self._reported = reported
        self._metrics.show_devices(hardware.devices)

    async def _write_labels(self) -> tuple[LabelConflict, ...]:
        """Write the labels if they are due; return the conflicts with other labellers, which the metrics show, too.

        Nothing is done, and no conflict returned, before the Node and the hardware are known.
        """
        node, hardware = self._node, self.hardware
        if node is None or hardware is None:
            return ()
        plan = plan_labels(build_labels(hardware, self._options.label_prefix), node)
        self._metrics.note_conflicts(plan.conflicts)
        # `write` returns the Node as the API server has it then; None if nothing was due, or the write failed.
        if written := await self._labels.write(node, plan):
            # The watch brings this Node later: until then the store has it from the answer.
            self._store.put(NODES, written)
        return plan.conflicts

    async def _report(self, problems: ReportProblems) -> None:
        """Write the NodeFitness if it is due."""
        node = self._node
        if node is None:
            log.warning("node_unknown", node=self._options.node_name, remedy="--node-name is the name of a Node")
            return
        await self._fitness.write(node, self.hardware, build_condition(self._reported, problems), self._wall_clock())
