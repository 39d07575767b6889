"""One host: the supervisor of its processes, and the memory accounting, daemons and weights that they share.

The agent, `pomona up` and tests all have one. They differ in the exposure of processes, the source of
tokens, and the reaction to changes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from artifacts.foreign_stores import NO_FOREIGN_STORES, ForeignStores
from artifacts.repositories.address_policy import Networks
from devices import pressure
from devices.pressure import PressureReading
from gateway.change_counter import ChangeCounter
from metal_agent import daemons
from metal_agent.benchmarks.host_benchmarks import HostBenchmarks
from metal_agent.benchmarks.measurements import Measurements
from metal_agent.daemons import Daemons
from metal_agent.holds.hold_gate import HoldGate
from metal_agent.holds.owner_policy import NO_POLICY, OwnerPolicy
from metal_agent.holds.pause_watchdog import PauseWatchdog, ReadSample, read_owner_sample
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.peaks import Peaks
from metal_agent.memory.pressure_policy import HoldAction
from metal_agent.memory.pressure_watchdog import PressureWatchdog
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.options import StartError
from metal_agent.supervise.backend_reports import follow_backend_health
from metal_agent.supervise.host_parts import Exposure, RunnerContext
from metal_agent.supervise.keep_awake import KeepAwake
from metal_agent.supervise.memory_monitor import MemoryMonitor
from metal_agent.supervise.records import Records
from metal_agent.supervise.runner import Runner
from metal_agent.supervise.supervisor import Supervisor
from metal_agent.traffic.proxy_process import Proxy
from metal_agent.weights import HostWeights


class HostExposure(Exposure, Protocol):
    """An exposure of the processes of a host that also reports their idle times."""

    async def idle_seconds(self) -> Mapping[str, float | None]:
        """Return, by uid, the seconds that each process has been without a request; None if it never had one."""

    async def wait_request(self, timeout_seconds: float) -> bool:
        """Wait until any process gets a request; return False after the time-out.

        Raises ControlUnreachableError and ControlRefusedError: nobody knows of requests.
        """


class HostCallbacks(msgspec.Struct, frozen=True):
    """Called on changes of a host; each returns at once."""

    process_changed: Callable[[Runner], None]
    """After each change of a process's state or progress."""
    memory_changed: Callable[[], None]
    """After each measurement that changed the memory that can still be reserved."""
    hold_handled: Callable[[HoldAction, str], None]
    """After each step against memory pressure, and of a pause by the owner, with a message for the user."""


class Host:
    """One host: its supervisor, and the memory accounting, daemons and weights that its processes share.

    Args:
        folder: the state folder; the caller owns it.
        ledger: the memory budget and its reservations.
        runners: its processes by uid, empty; the supervisor fills it, and `exposure` reads it.
        exposure: brings requests to the processes.
        callbacks: called on changes.
        session: for requests to engines.
        secret: returns the token in a Secret by namespace and name; None if unknown.
        file_root: the folder below which file:// sources are allowed.
        allowed_networks: private networks that sources may lead to.
        proxy: the proxy of this host; None if nothing is served.
        shared_daemons: the daemons to use; None for those of this machine.
        read_pressure: reads the memory pressure of the host; blocks for a moment.
        owner_policy: the times at which the owner needs the host.
        read_owner: reads the facts that the policy depends on.

    Raises OSError when a file in `folder` cannot be read.
    """

    supervisor: Supervisor
    """Made by `recover`."""

    def __init__(
        self,
        folder: Path,
        *,
        ledger: Ledger,
        runners: dict[str, Runner],
        exposure: HostExposure,
        callbacks: HostCallbacks,
        session: aiohttp.ClientSession,
        secret: Callable[[str, str], str | None],
        file_root: Path | None,
        allowed_networks: Networks = (),
        foreign: ForeignStores = NO_FOREIGN_STORES,
        proxy: Proxy | None = None,
        shared_daemons: Daemons | None = None,
        read_pressure: Callable[[], PressureReading] = pressure.read,
        owner_policy: OwnerPolicy = NO_POLICY,
        read_owner: ReadSample = read_owner_sample,
    ) -> None:
        """Build the parts that all processes of the host share; nothing runs before `recover` and `start_loops`."""
        self._runners, self._proxy = runners, proxy

        # The gate holds engines back; the two watchdogs are its sources: memory pressure, and the owner's policy.
        self.gate = gate = HoldGate(runners)
        handled, idle_seconds = callbacks.hold_handled, exposure.idle_seconds
        self.watchdog = PressureWatchdog(
            folder / "pressure.json", runners, gate, ledger, handled, read=read_pressure, idle_seconds=idle_seconds
        )
        self.pauses = PauseWatchdog(folder / "holds.json", runners, gate, owner_policy, handled, read=read_owner)
        self.benchmarks = benchmarks = HostBenchmarks(
            runners,
            Measurements(folder / "measurements.json"),
            gate,
            read_level=lambda: self.watchdog.level,
            idle_seconds=idle_seconds,
            wait_request=exposure.wait_request,
            changed=callbacks.process_changed,
        )

        self.daemons = shared_daemons or daemons.build_daemons(folder, allowed_networks)  # such as Ollama
        peaks = Peaks(folder / "peaks.json")  # the most memory that earlier runs used
        changed, loaded = callbacks.memory_changed, self.daemons.list_loaded
        self.monitor = MemoryMonitor(runners, ledger, peaks, read=read_pressure, changed=changed, loaded=loaded)
        self.context = RunnerContext(  # for all runners
            folder=folder,
            records=Records(folder / "processes"),
            keys=EngineKeys(folder / "keys"),
            weights=HostWeights(folder / "weights", file_root, allowed_networks, foreign),
            ledger=ledger,
            session=session,
            exposure=exposure,
            secret=secret,
            changed=benchmarks.note_change,
            hold=gate.admit_runner,
            daemons=self.daemons,
            loads=benchmarks.loads,
            peaks=peaks,
            measurements=benchmarks.measurements,
            measure_memory=self.monitor.measure,
        )

    async def recover(self, group: asyncio.TaskGroup) -> None:
        """Adopt the proxy and the engines that an earlier agent left running; processes run in `group`.

        Raises OSError if the running engines cannot be determined: a start without them could run one twice.
        """
        if self._proxy:
            self._proxy.adopt()
        self.supervisor = Supervisor(self.context, self._runners, group)
        await self.supervisor.recover(self._proxy.pids() if self._proxy else [])

    def start_loops(
        self,
        group: asyncio.TaskGroup,
        keep_awake_command: Sequence[str] | None = None,
        *,
        has_benchmarks: bool = False,
    ) -> list[asyncio.Task[None]]:
        """Keep the proxy running and follow its reports, and watch memory and owner, until the tasks are cancelled.

        `keep_awake_command` is the program that keeps the machine awake while it serves; without it, it may sleep. With
        `has_benchmarks` engines are measured while the host is idle.
        """
        keep_awake = KeepAwake(self._runners, keep_awake_command)

        loops = [self._proxy.run(), follow_backend_health(self._proxy.client, self._runners)] if self._proxy else []
        loops += [self.benchmarks.run()] if has_benchmarks else []
        watches = (self.watchdog.run(), self.pauses.run(), keep_awake.run(), self.monitor.run())
        return [group.create_task(coroutine) for coroutine in (*loops, *watches)]

    def retain_holds(self, uids: set[str]) -> None:
        """Forget holds of processes that are not among `uids`, the uids of all processes assigned to this host."""
        self.watchdog.retain(uids)
        self.pauses.retain(uids)

    async def stop_processes(self, changes: ChangeCounter) -> None:
        """Drain and stop every process; return when each has ended, or is known not to end.

        `changes` counts at least the changes of their states, so that they are looked at after each.
        """
        self.supervisor.assign([])  # a process without an assignment is stopped
        seen_changes = changes.count
        while any(runner.state.phase != "Stopped" for runner in self._runners.values()):
            seen_changes = await changes.wait_past(seen_changes)


async def recover_or_refuse(host: Host, group: asyncio.TaskGroup) -> None:
    """Adopt the running engines and the proxy. Raises StartError if it cannot find them: they could run twice."""
    try:
        await host.recover(group)
    except OSError as error:
        raise StartError(
            f"cannot find the engines of an earlier agent, which still run: {error}; fix that and start again; "
            "if it is the record of one process, you may delete it: its model is then loaded again"
        ) from error
