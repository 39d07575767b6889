"""Looks what memory is really in use, by our engines and by everybody else, and tells the ledger.

The system has no event for it, so it is looked at now and then, and before each admission. What cannot be found out
changes nothing.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from devices.footprint import Footprint, footprint
from devices.pressure import Reading
from metal_agent.ledger import Ledger, excess_bytes
from metal_agent.peaks import Peaks
from metal_agent.upkeep import again_and_again
from runtimes.daemon import LoadedModel

if TYPE_CHECKING:
    from metal_agent.runner import Runner

LOOK_SECONDS: Final = 10.0


class Usage:
    """The memory of one host with these `runners`.

    Args:
        runners: by uid of their MetalProcess.
        ledger: is told.
        peaks: are told too.
        read: looks at the host; blocks for a moment.
        changed: told when more or less is free than at the last look.
        loaded: lists what shared daemons have loaded, for us and for the owner of this host.
    """

    def __init__(
        self,
        runners: Mapping[str, "Runner"],
        ledger: Ledger,
        peaks: Peaks,
        *,
        read: Callable[[], Reading],
        changed: Callable[[], None],
        loaded: Callable[[], list[LoadedModel]] = list,
    ) -> None:
        self._runners = runners
        self._ledger = ledger
        self._peaks = peaks
        self._read = read
        self._changed = changed
        self._loaded = loaded
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        await again_and_again(self.look, LOOK_SECONDS, failed="memory in use not looked at")

    async def look(self) -> None:
        """Look once; what is seen of an engine that ended meanwhile is let go."""
        async with self._looking:  # the peaks are written in a thread
            await self._look()

    async def _look(self) -> None:
        available_bytes = self._ledger.available_bytes
        before = {uid: (runner.record, runner.state.pid) for uid, runner in self._runners.items()}
        pids = {uid: pid for uid, (_, pid) in before.items() if pid is not None}
        reading, seen = await asyncio.to_thread(self._measure, pids)
        ours = 0
        runs = {}
        in_daemons = self._loaded()
        told = {model.name: model.memory_bytes for model in in_daemons if model.memory_bytes is not None}
        for uid, runner in self._runners.items():
            record, found = runner.record, seen.get(uid)
            if not runner.state.exists:
                continue
            if found is None or record is None or before.get(uid) != (record, runner.state.pid):
                # It has no process of its own, or one that is not known yet: it takes what its daemon says, or what
                # was promised.
                if (said := told.get(runner.model or "")) is not None:
                    self._ledger.observe(uid, said)
                ours += self._ledger.reserved.get(uid, 0) if said is None else said
                continue
            ours += found.unavailable_bytes
            self._ledger.observe(uid, found.bytes)
            runs[f"{uid}/{record.started_at}"] = (record.spec, found.bytes)
        memory_bytes = self._ledger.memory_bytes
        if memory_bytes is not None and reading.available_bytes is not None:
            excess = excess_bytes(
                memory_bytes=memory_bytes,
                available_bytes=reading.available_bytes,
                own_bytes=ours,
                budget_bytes=self._ledger.budget_bytes,
                loaded_bytes=sum(model.memory_bytes or 0 for model in in_daemons if not model.ours),
            )
            self._ledger.observe_others(excess)
        if self._ledger.available_bytes != available_bytes:
            self._changed()
        await asyncio.to_thread(self._peaks.observe, runs)

    def _measure(self, pids: Mapping[str, int]) -> tuple[Reading, dict[str, Footprint]]:
        found = {uid: footprint(pid) for uid, pid in pids.items()}
        return self._read(), {uid: measured for uid, measured in found.items() if measured}
