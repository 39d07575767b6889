"""One host of a chaos run: its processes, and the injection of faults."""

import asyncio
import contextlib
import os
import signal
from typing import Final, Literal

import psutil

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.resources import LEASES
from tests.chaos.faults import Breakage, Kind, ScheduledFault, extend_absences
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ip

Role = Literal["agent", "proxy", "engine", "other"]
LOOK_SECONDS: Final = 0.25
_TOKENS: Final[dict[str, Role]] = {"agent": "agent", "proxy": "proxy", "-a": "engine"}


class ChaosHost:
    """A host with its agent, and the faults that were injected on it."""

    def __init__(self, host: MetalHost) -> None:
        self.host = host
        self._breakages: list[Breakage] = []
        self._renewed_at: list[float] = []

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def breakages(self) -> list[Breakage]:
        """The faults so far; each absence lasts until the next renewal of the Lease."""
        return extend_absences(self._breakages, self._renewed_at)

    async def observe_renewals(self, client: Client) -> None:
        """Note when the host renews its Lease, until cancelled."""
        loop, last = asyncio.get_running_loop(), ""
        while True:
            with contextlib.suppress(ApiError, Unreachable):
                lease = await client.get(LEASES, self.name, HOSTS_NAMESPACE)
                if (renewed := lease["spec"].get("renewTime", "")) != last:
                    last = renewed
                    self._renewed_at.append(loop.time())
            await asyncio.sleep(LOOK_SECONDS)

    async def processes(self) -> dict[Role, list[psutil.Process]]:
        """Return the processes that run on this host by their role, oldest first."""
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

    async def inject(self, fault: ScheduledFault) -> None:
        """Inject `fault` and end it after its duration. Do nothing if there is no process to kill."""
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
        self._breakages.append(Breakage(fault.kind, self.host.address, start, loop.time()))

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
