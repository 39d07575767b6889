"""Measure the memory that engines and other programs use, and update ledger and peaks.

The system has no event for memory use, so it is measured at intervals and before each admission. An unknown value
changes nothing.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import field

from devices.footprint import Footprint, footprint
from devices.pressure import PressureReading
from metal_agent.memory.ledger import Ledger, excess_bytes
from metal_agent.memory.peaks import Peaks
from metal_agent.periodic import run_periodically
from metal_agent.supervise.runner import Runner
from runtimes.daemon import LoadedModel

MEASURE_SECONDS: Final = 10.0


class MemoryMonitor(msgspec.Struct):
    """Measurements of the memory in use on one host."""

    runners: Mapping[str, Runner]
    """Processes by uid of their MetalProcess."""
    ledger: Ledger
    """Gets the measured use."""
    peaks: Peaks
    """Get the peaks of engines."""
    read: Callable[[], PressureReading]
    """Reads the host's memory; blocks for a moment."""
    changed: Callable[[], None]
    """Called when the available memory has changed."""
    loaded: Callable[[], list[LoadedModel]] = list
    """Lists the models in shared daemons, ours and those of the owner of this host."""
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a measurement: the peaks are written in a thread."""

    async def run(self) -> None:
        """Measure at intervals until cancelled."""
        await run_periodically(self.measure, MEASURE_SECONDS, name="memory measurement")

    async def measure(self) -> None:
        """Measure once; the measurement of an engine that ended meanwhile is dropped."""
        async with self.measuring:
            await self._measure_all()

    async def _measure_all(self) -> None:
        """Measure all engines and the host, and update ledger and peaks; report a change of the available memory.

        The ledger gets the use of each engine of ours, and of other programs beyond the share that the budget leaves
        them. The peaks get the use of each run of an engine with a process of its own, for later admissions.
        """
        available_before = self.ledger.available_bytes
        # Record and pid of each engine: both tell whether another one was started meanwhile.
        engines_before = {uid: (runner.record, runner.state.pid) for uid, runner in self.runners.items()}
        pids = {uid: pid for uid, (_, pid) in engines_before.items() if pid is not None}
        reading, footprints = await asyncio.to_thread(self._read_footprints, pids)

        # Our engines.
        own_bytes = 0
        used_by_run = {}  # by uid and start: a run is one start of an engine
        daemon_models = self.loaded()
        daemon_sizes = {model.name: model.memory_bytes for model in daemon_models if model.memory_bytes is not None}
        for uid, runner in self.runners.items():
            record, footprint = runner.record, footprints.get(uid)
            if not runner.state.exists:
                continue
            # While the thread measured, the engine may have ended and another one started.
            is_same_engine = engines_before.get(uid) == (record, runner.state.pid)
            daemon_bytes = daemon_sizes.get(runner.model or "")
            if footprint is not None and record is not None and is_same_engine:
                own_bytes += footprint.unavailable_bytes
                self.ledger.observe(uid, footprint.bytes)
                used_by_run[f"{uid}/{record.started_at}"] = (record.spec, footprint.bytes)
            elif daemon_bytes is not None:  # a model in a daemon
                own_bytes += daemon_bytes
                self.ledger.observe(uid, daemon_bytes)
            else:  # not measured: it was started meanwhile, or its daemon states no size
                own_bytes += self.ledger.reserved.get(uid, 0)

        # Other programs.
        memory_bytes = self.ledger.memory_bytes
        if memory_bytes is not None and reading.available_bytes is not None:
            excess = excess_bytes(
                memory_bytes=memory_bytes,
                available_bytes=reading.available_bytes,
                own_bytes=own_bytes,
                budget_bytes=self.ledger.budget_bytes,
                loaded_bytes=sum(model.memory_bytes or 0 for model in daemon_models if not model.ours),
            )
            self.ledger.observe_others(excess)

        if self.ledger.available_bytes != available_before:
            self.changed()
        await asyncio.to_thread(self.peaks.observe, used_by_run)

    def _read_footprints(self, pids: Mapping[str, int]) -> tuple[PressureReading, dict[str, Footprint]]:
        """Read the memory of the host, and of each engine by uid. Blocks for a moment."""
        footprints = {uid: footprint(pid) for uid, pid in pids.items()}
        return self.read(), {uid: measured for uid, measured in footprints.items() if measured}
