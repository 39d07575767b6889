"""One host of a chaos run: what runs on it, and how it is broken."""

import asyncio
import os
import signal
from typing import Final, Literal

import psutil

from tests.chaos.faults import Breakage, Fault, Kind
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ip

Role = Literal["agent", "proxy", "engine", "other"]
_TOKENS: Final[dict[str, Role]] = {"agent": "agent", "proxy": "proxy", "-a": "engine"}


class Machine:
    """A host with its agent; `log` says what happens to it."""

    def __init__(self, host: MetalHost) -> None:
        self.host = host
        self.breakages: list[Breakage] = []
        self._awaited: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.host.name

    async def processes(self) -> dict[Role, list[psutil.Process]]:
        """What runs here now, by what it is, in the order of age."""
        found: dict[Role, list[psutil.Process]] = {"agent": [], "proxy": [], "engine": [], "other": []}
        for pid in sorted(map(int, (await ip(f"netns pids {self.host.host.netns}")).split())):
            try:
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                arguments = process.cmdline()
            except psutil.Error:
                continue
            role: Role = next((_TOKENS[each] for each in arguments if each in _TOKENS), "other")
            found[role].append(process)
        return found

    async def suffer(self, fault: Fault) -> None:
        """Have `fault` happen, and end. One that finds nothing to break does nothing."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        if fault.kind == "agent":
            if not self.host.agent.running:
                return
            await self.host.agent.kill()
            await asyncio.sleep(fault.seconds)
            self._start_agent()
        elif fault.kind == "link":
            await self.host.host.cut()
            await asyncio.sleep(fault.seconds)
            await self.host.host.restore()
        elif fault.kind == "power":
            await self.host.host.kill_all()
            await asyncio.sleep(fault.seconds)
            self._start_agent()
        elif not await self._kill(fault.kind, fault.pick):
            return
        self.breakages.append(Breakage(fault.kind, self.host.address, start, loop.time()))

    async def _kill(self, kind: Kind, pick: int) -> bool:
        assert kind in {"proxy", "engine"}
        there = (await self.processes())["proxy" if kind == "proxy" else "engine"]
        if not there:
            return False
        os.kill(there[pick % len(there)].pid, signal.SIGKILL)
        return True

    def _start_agent(self) -> None:
        if not self.host.agent.running:
            self.host.agent.start()
