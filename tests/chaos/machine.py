"""One host of a chaos run: its processes, and the injection of faults."""

import asyncio
import contextlib
import signal
from typing import Final, Literal

import psutil

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.resources import LEASES
from tests.chaos import switched_engine
from tests.chaos.faults import Breakage, Kind, ScheduledFault, extend_absences
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ip
from tests.support.eventually import eventually

Role = Literal["agent", "proxy", "engine", "other"]
LOOK_SECONDS: Final = 0.25
SIGNALS: Final[dict[Kind, signal.Signals]] = {
    "proxy": signal.SIGKILL,
    "engine": signal.SIGKILL,
    "failing": switched_engine.SWITCH,
    "mute": signal.SIGSTOP,
}
SICKNESSES: Final = frozenset[Kind]({"failing", "mute"})
SICK_SECONDS: Final = 180.0
"""Limit for an agent to end a sick engine, on a busy machine."""
SERVICE_OPTION: Final = "-a"
"""The option of an engine that names its service."""
_TOKENS: Final[dict[str, Role]] = {"agent": "agent", "proxy": "proxy", SERVICE_OPTION: "engine"}


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
            with contextlib.suppress(ApiError, Unreachable, TimeoutError):
                lease = await client.get(LEASES, self.name, HOSTS_NAMESPACE)
                if (renewed := lease["spec"].get("renewTime", "")) != last:
                    last = renewed
                    self._renewed_at.append(loop.time())
            await asyncio.sleep(LOOK_SECONDS)

    async def processes(self) -> dict[Role, list[psutil.Process]]:
        """Return the processes that run on this host by their role, oldest first."""
        by_role: dict[Role, list[psutil.Process]] = {"agent": [], "proxy": [], "engine": [], "other": []}
        for pid in sorted(map(int, (await ip(f"netns pids {self.host.host.netns}")).split())):
            try:
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                arguments = process.cmdline()
            except psutil.Error:
                continue
            role: Role = next((_TOKENS[argument] for argument in arguments if argument in _TOKENS), "other")
            by_role[role].append(process)
        return by_role

    async def inject(self, fault: ScheduledFault) -> bool:
        """Inject `fault` and wait until it is over; return whether there was a process to break."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        if fault.kind == "agent":
            if not self.host.agent.running:
                return False
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
        elif fault.kind == "disk":
            await self._fill_disk(fault)
        else:
            return await self._break_process(fault.kind, fault.pick)
        self.note(fault.kind, start)
        return True

    def note(self, kind: Kind, start: float, service: str = "") -> None:
        """Note a fault that has ended now."""
        self._breakages.append(Breakage(kind, self.host.address, start, asyncio.get_running_loop().time(), service))

    async def _break_process(self, kind: Kind, pick: int) -> bool:
        """Kill a process, or make an engine sick until its agent has ended it; return whether there was one."""
        there = (await self.processes())["proxy" if kind == "proxy" else "engine"]
        if not there:
            return False
        process = there[pick % len(there)]
        start = asyncio.get_running_loop().time()
        try:
            service = "" if kind == "proxy" else find_service(process.cmdline())
            process.send_signal(SIGNALS[kind])
        except psutil.NoSuchProcess:
            return False
        if kind in SICKNESSES:
            await eventually(lambda: has_ended(process), SICK_SECONDS)
        self.note(kind, start, service)
        return True

    async def _fill_disk(self, fault: ScheduledFault) -> None:
        """Leave no byte in the file system of the host's state for a while."""
        filler = self.host.state_folder / f"filler-{fault.at}"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        await asyncio.sleep(fault.seconds)
        filler.unlink()

    def _start_agent(self) -> None:
        if not self.host.agent.running:
            self.host.agent.start()


def find_service(arguments: list[str]) -> str:
    """Return the service of an engine with these arguments."""
    return arguments[arguments.index(SERVICE_OPTION) + 1]


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has ended, whether its parent knows it or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
