"""Start the daemons that services need, for `pomona up --start-daemons`, and end them with it.

A daemon is started when a process of its runtime is about to be, and nothing listens at its port: one that its owner
runs is used, and never ended. A daemon that dies is started again by the next try of its processes, whose pauses are
those of engines. It is no process of an engine's: an agent that takes over leaves it running.
"""

import asyncio
import functools
import os
import time
from pathlib import Path
from typing import Final

import structlog

from artifacts import durable
from devices.tools import find_program
from metal_agent.daemons import Daemons, SharedDaemon
from metal_agent.lifecycle import GRACE_SECONDS
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.native.log_files import DAEMON_LOGS
from metal_agent.native.process import NativeProcess, adopt_process, read_last_log_lines, spawn_process
from runtimes.daemon import Daemon
from runtimes.engine_errors import find_cause
from runtimes.environment import select_environment

_SETTINGS: Final = ("OLLAMA_", "OMLX_")
"""Beginnings of the names of the variables by which owners set their daemons."""
_START_SECONDS: Final = 30.0
"""The longest that a daemon may take until it listens."""
_LOOK_SECONDS: Final = 0.05
_HINT: Final = ", or by `pomona up --start-daemons`"

log = structlog.get_logger()


class DaemonStarter:
    """The daemons that were started for the `pomona up` of a state folder; `may_start`: more may be."""

    def __init__(self, folder: Path, daemons: Daemons, *, may_start: bool) -> None:
        """Start nothing, and let the processes of each daemon that is installed start it."""
        self._folder = folder
        self._processes: dict[str, NativeProcess] = {}
        self._lock = asyncio.Lock()
        for runtime in DAEMON_LOGS:
            shared = daemons.get(runtime)
            program = find_program(shared.daemon.serve_command[0]) if shared else None
            if shared and program and may_start:
                shared.start_program = functools.partial(self._start, shared, program)
            elif shared and program:
                shared.start_hint = _HINT

    def adopt(self) -> None:
        """Adopt the daemons that a killed `pomona up` has started. Raises OSError."""
        for runtime in DAEMON_LOGS:
            identity = durable.read(self._record(runtime), ProcessIdentity)
            if identity and (process := adopt_process(identity)):
                log.info("daemon_adopted", daemon=runtime, pid=process.pid)
                self._processes[runtime] = process

    async def end(self) -> None:
        """End all of them."""
        for runtime, process in self._processes.items():
            await process.end(GRACE_SECONDS)
            self._record(runtime).unlink(missing_ok=True)
        self._processes.clear()

    def release(self) -> None:
        """Stop watching those that still run; they go on."""
        for process in self._processes.values():
            process.release()

    async def _start(self, shared: SharedDaemon, program: str) -> None:
        """Start a daemon, and wait until it listens, or has ended; `start_hint` then says why."""
        daemon = shared.daemon
        shared.start_hint = ""
        async with self._lock:
            process = self._processes.get(daemon.runtime)
            if process is None or process.has_ended:
                try:
                    process = self._spawn(daemon, program)
                except OSError as error:
                    log.warning("daemon_not_started", daemon=daemon.runtime, error=str(error))
                    shared.start_hint = f"; it cannot be started here: {error}"
                    return
            latest = time.monotonic() + _START_SECONDS
            while not process.has_ended and time.monotonic() < latest and not await asyncio.to_thread(process.url):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(_LOOK_SECONDS)
            if process.has_ended:
                path = self._find_log(daemon)
                cause = find_cause(read_last_log_lines(path))
                log.warning("daemon_ended", daemon=daemon.runtime, pid=process.pid, cause=cause)
                shared.start_hint = f"; it was started here and has ended: {cause}; its log is {path}"

    def _spawn(self, daemon: Daemon, program: str) -> NativeProcess:
        """Start the program of a daemon, and record its process. Raises OSError."""
        settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
        # Owned by another folder than engines are: an agent that takes over would kill it as one without a record.
        process = spawn_process(
            [program, *daemon.serve_command[1:]],
            select_environment(os.environ) | settings | daemon.serve_address,
            self._find_log(daemon),
            self._folder / "daemons",
        )
        log.info("daemon_started", daemon=daemon.runtime, pid=process.pid)
        self._processes[daemon.runtime] = process
        durable.write(self._record(daemon.runtime), process.identity)
        return process

    def _find_log(self, daemon: Daemon) -> Path:
        """Return the path of the log of a daemon."""
        return self._folder / "logs" / DAEMON_LOGS[daemon.runtime]

    def _record(self, runtime: str) -> Path:
        """Return the path of the record of a daemon's process."""
        return self._folder / "daemons" / f"{runtime}.json"
