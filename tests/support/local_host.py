"""A host without a cluster: all dependencies of a runner, with llama.cpp's real server as the engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import psutil
import pytest

from crds.metalprocess import Artifact, MetalProcessSpec
from devices.pressure import PressureLevel, PressureReading
from metal_agent.assignments import Assignment
from metal_agent.daemons import Daemons
from metal_agent.holds.owner_policy import OwnerPolicy, OwnerSample
from metal_agent.host import Host, HostCallbacks
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.pressure_policy import HoldAction
from metal_agent.native.process import identify_process, kill_strays
from metal_agent.supervise.runner import Runner
from runtimes.daemon import Daemon
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.live_processes import find_processes
from tests.support.tiny_models import tiny_gguf

MakeAssignment = Callable[..., Assignment]


class RecordingExposure:
    """A stand-in for proxy and slices; records each call, and whether the engine was still running."""

    def __init__(self, runners: dict[str, Runner], idle: Callable[[], dict[str, float | None]]) -> None:
        self._idle = idle
        self.calls: list[tuple[str, bool]] = []
        self.drain_seconds: list[float] = []
        """The time that each drain had for the answers."""
        self.in_flight: dict[str, int] = {}
        self.asked = asyncio.Event()
        """Set while a client asks a process."""
        self._runners = runners

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        assert timeout_seconds > 0
        self._note("withdraw", assignment.uid)

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        assert timeout_seconds > 0
        self.drain_seconds.append(timeout_seconds)
        self._note("drain", uid)

    async def clear_suspicion(self, uid: str) -> None:
        self._note("clear", uid)

    def requests(self, uid: str) -> int | None:
        return self.in_flight.get(uid)

    async def wait_request(self, timeout_seconds: float) -> bool:
        assert timeout_seconds > 0
        return await self.asked.wait()

    async def idle_seconds(self) -> dict[str, float | None]:
        return self._idle()

    def _note(self, call: str, uid: str) -> None:
        pid = self._runners[uid].state.pid
        self.calls.append((call, pid is not None and identify_process(pid) is not None))


class Machine:
    """The processes of one host; `restart` simulates the death of the agent and the start of a new one."""

    def __init__(self, folder: Path, file_root: Path, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.file_root = file_root
        self.ledger = Ledger(100 * GIB)
        self.daemons: Callable[[], list[Daemon]] = list
        """Function that creates the shared daemons of this host, called at each start of an agent."""
        self.secrets: dict[tuple[str, str], str] = {}
        self.level: PressureLevel | None = "normal"
        """Level of memory pressure on this host."""
        self.idle: dict[str, float | None] = {}
        self.policy = OwnerPolicy()
        self.sample = OwnerSample(datetime.now(UTC))
        """Facts by which the sources of the owner's policy decide."""
        self.on_change: Callable[[Runner], None] = lambda _runner: None
        """Called at each change of a process, for tests of states that do not last."""
        self._session = session
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.runners: dict[str, Runner] = {}
        self.changes: list[tuple[str, str]] = []
        self.steps: list[HoldAction] = []

        self.exposure = RecordingExposure(self.runners, lambda: self.idle)
        self.ledger.reserved.clear()
        started = asyncio.Event()
        self._task = asyncio.create_task(self._run(started))
        await started.wait()

    async def stop(self) -> None:
        """End the agent, but not its engines."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _note_change(self, runner: Runner) -> None:
        self.changes.append((runner.assignment.uid, runner.state.phase))
        self.on_change(runner)

    async def _run(self, started: asyncio.Event) -> None:
        self.known = Daemons(self.folder, self.daemons())
        host = Host(
            self.folder,
            ledger=self.ledger,
            runners=self.runners,
            exposure=self.exposure,
            callbacks=HostCallbacks(
                self._note_change,
                lambda: None,
                lambda step, _note: self.steps.append(step),
            ),
            session=self._session,
            secret=lambda namespace, name: self.secrets.get((namespace, name)),
            file_root=self.file_root,
            allowed_networks=ALLOWED_NETWORKS,
            shared_daemons=self.known,
            read_pressure=lambda: PressureReading(self.level, None, None),
            owner_policy=self.policy,
            read_owner=lambda _sources: self.sample,
        )
        self.host, self.watchdog, self.usage = host.context, host.watchdog, host.monitor
        self.benchmarks = host.benchmarks
        self.gate, self.pauses = host.gate, host.pauses
        async with asyncio.TaskGroup() as group:
            await host.recover(group)
            self.supervisor = host.supervisor
            group.create_task(self.watchdog.run())
            group.create_task(self.pauses.run())
            started.set()
            await asyncio.Event().wait()


async def ready(machine: Machine, uid: str = "u1") -> int:
    """Wait until the process is Ready, and return its pid."""
    runner = machine.runners[uid]
    await eventually(lambda: runner.state.phase == "Ready")
    assert runner.state.pid
    return runner.state.pid


async def phase(machine: Machine, expected: str, reason: str = "", uid: str = "u1") -> str:
    """Wait for a phase with this reason, and return its message."""
    runner = machine.runners[uid]
    await eventually(lambda: (runner.state.phase, runner.state.reason) == (expected, reason))
    return runner.state.message


def engines(machine: Machine) -> list[psutil.Process]:
    """Return every live engine of this machine."""
    return find_processes(str(machine.file_root / "tiny.gguf"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model below the folder that is allowed for file:// sources."""
    path = tmp_path / "files" / "tiny.gguf"
    path.parent.mkdir()
    tiny_gguf.write(path)
    return path


@pytest.fixture
async def machine(tmp_path: Path, model: Path) -> AsyncIterator[Machine]:
    folder = tmp_path / "state"
    async with aiohttp.ClientSession() as session:
        machine = Machine(folder, model.parent, session)
        await machine.start()
        yield machine
        await machine.stop()
    await kill_strays(folder, ())


@pytest.fixture
def assignment(model: Path) -> MakeAssignment:
    """A function that makes an Assignment of the tiny model; keyword arguments change its spec."""

    def make(uid: str = "u1", **changes: object) -> Assignment:
        wanted = {
            "service_name": "chat",
            "model_name": "tiny",
            "runtime": "llama.cpp",
            "artifact": Artifact(source=f"file://{model}"),
            "memory_bytes": GIB // 2,
            "token_secret": "chat-token",
            "context_length": 512,
            "extra_args": ["-t", "1"],
        }
        spec = MetalProcessSpec(**(wanted | changes))  # type: ignore[arg-type]  # a table of fields
        return Assignment(uid, "team-a", f"chat-{uid}", spec)

    return make
