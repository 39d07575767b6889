"""Native processes that outlive the agent: started, adopted, watched to their end and stopped.

Each leads a session of its own, writes to a log file rather than to a pipe that would break when the agent ends, and
has the agent's state folder in its environment, so that an agent that lost its record still finds and kills it. It is
started by posix_spawn and not by subprocess, which forks for a new session: a fork of a macOS process with threads
crashes before exec.
"""

import asyncio
import contextlib
import errno
import os
import select
import shutil
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import structlog

from devices import processes
from devices.sockets import LOOPBACK, loopback_port
from metal_agent.native.engine_handle import EngineExit, EngineHandle, ProcessIdentity

OWNER_VARIABLE: Final = "POMONA_AGENT_STATE"
"""Environment variable of every process that the agent starts; its value is the agent's state folder."""
_LOG_LINES = 40
_LOG_TAIL_BYTES = 8192
_KILL_SECONDS: Final = 10.0
_REAP_SECONDS: Final = 0.005
_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})
"""Errors for a pid that is no process; the latter two if it is the id of a thread now."""

log = structlog.get_logger()


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of the live process `pid`, or None if there is none. Raises OSError if that is unknown."""
    started = processes.start_time(pid)
    return ProcessIdentity(pid, started, processes.boot_id()) if started is not None else None


def is_running(identity: ProcessIdentity) -> bool:
    """Return whether the process of `identity` runs, and not another one with its pid. Raises OSError if unknown."""
    return identity.boot_id == processes.boot_id() and processes.start_time(identity.pid) == identity.start_time


class NativeProcess(EngineHandle):
    """A running process of this agent, started or adopted. Needs a running event loop.

    Args:
        pid: the process id.
        child: True for a child that was not waited for: its pid is valid even after it has ended.

    Raises OSError, and ProcessLookupError if there is no process `pid`.
    """

    pid: int

    def __init__(self, pid: int, *, child: bool = False) -> None:
        """Watch the process from now on, and find out its identity; its end is reported once, by the event loop."""
        super().__init__()
        self.pid = pid
        self._exit_descriptor = _open_watch(pid, child=child)  # None if it had ended already, or once it is closed
        try:
            # Read while the watch is open: the watch is of this very process, even if the pid is reused a moment later.
            self.identity = identify_process(pid)
        except BaseException:
            if self._exit_descriptor is not None:
                os.close(self._exit_descriptor)
            raise
        if self._exit_descriptor is None:  # a child that has ended already
            self._loop.call_soon(self._on_end)
        else:
            self._loop.add_reader(self._exit_descriptor, self._on_end)

    def url(self) -> str | None:
        """Return the URL at which it listens on loopback, as the kernel reports it; None if it does not listen."""
        port = loopback_port(self.pid)
        return f"http://{LOOPBACK}:{port}" if port else None

    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:  # noqa: ARG002 - never shared
        """Send SIGTERM to the group, then SIGKILL if the process still runs after the grace; return when it is gone."""
        if not self._exit.done():
            _signal_group(self.pid, signal.SIGTERM)  # the engine and its children
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.wait()
                return  # it has ended in time
        log.warning("process_ignores_sigterm", pid=self.pid, grace_seconds=grace_seconds)
        if not self._exit.done():
            _signal_group(self.pid, signal.SIGKILL)
        await self.wait()

    def release(self) -> None:
        """Stop watching it; the process goes on."""
        if not self._exit.done():
            self._exit.cancel()
            self._close_watch()

    def _on_end(self) -> None:
        """Called when the process has ended: kill the rest of its group, and report its exit."""
        self._close_watch()
        # The pid of a child is not reused before it is waited for, so the rest of its group can still be killed.
        _signal_group(self.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        """Collect the exit status of a process that has ended, and report it as the exit of the engine."""
        try:
            waited, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            engine_exit = EngineExit()  # it is no child, so the system reports no exit status
        else:
            if waited == 0:
                # macOS reports an end a moment before the process can be waited for.
                self._loop.call_later(_REAP_SECONDS, self._reap)
                return
            engine_exit = _read_exit(status)
        if not self._exit.done():  # _exit: what `wait` returns
            self._exit.set_result(engine_exit)

    def _close_watch(self) -> None:
        """Close the descriptor that watches the process."""
        if self._exit_descriptor is not None:
            self._loop.remove_reader(self._exit_descriptor)
            os.close(self._exit_descriptor)
            self._exit_descriptor = None


def spawn_process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    owner: Path,
    inherited: Sequence[int] = (),
) -> NativeProcess:
    """Start `argv` in a session of its own, output appended to `log_path`, owned by the agent of folder `owner`.

    The descriptors `inherited` stay open in it: a lock on weights lasts as long as a process has them open.

    Raises:
        OSError: the program is missing or cannot run.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"cannot run {argv[0]!r}: no such program on PATH")

    # Copies, since ours close on exec; numbered after all others, so that none is overwritten before it is copied.
    first_free = max(inherited, default=2) + 1
    pid = os.posix_spawn(
        program,
        list(argv),
        {**environment, OWNER_VARIABLE: str(owner)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),  # standard input: none
            (os.POSIX_SPAWN_OPEN, 1, _prepare_log(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),  # standard error goes to the same log
            *((os.POSIX_SPAWN_DUP2, descriptor, first_free + index) for index, descriptor in enumerate(inherited)),
        ],
        setsid=True,
        setsigmask=[],
        # Python ignores these signals, and a child would inherit that.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )

    try:
        return NativeProcess(pid, child=True)
    except BaseException:
        # The process could not be watched, and a retry would start a second one.
        _signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _prepare_log(log_path: Path) -> str:
    """Create the log if it is missing; return its path, or /dev/null if that fails, as on a full disk."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch(mode=0o600)
    except OSError as error:
        log.warning("log_not_writable", path=str(log_path), error=str(error))
        return os.devnull
    return str(log_path)


def adopt_process(identity: ProcessIdentity) -> NativeProcess | None:
    """Adopt the process of `identity`; None if it is gone, or its pid belongs to another process now.

    Raises OSError if that cannot be found out.
    """
    if identity.boot_id != processes.boot_id():  # the machine has been restarted since
        return None
    try:
        process = NativeProcess(identity.pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:  # the pid is that of no process
            return None
        raise

    is_same = False
    try:
        # Asked while the watch is open: it is of this very process.
        is_same = is_running(identity)
    finally:
        if not is_same:
            process.release()
    return process if is_same else None


def _is_marked(process: psutil.Process, owner: Path) -> bool:
    """Return whether the environment of a process names `owner`, however its path was given. Raises psutil.Error."""
    marker = process.environ().get(OWNER_VARIABLE)
    return marker is not None and (marker == str(owner) or os.path.realpath(marker) == os.path.realpath(owner))


async def kill_strays(owner: Path, leaders: Collection[int]) -> list[int]:
    """Kill processes of `owner` outside the sessions that the pids `leaders` lead; returns their pids.

    Such processes remain if an agent died between the start of a process and its record, or if a record was damaged.
    Nothing else would stop them, and a second engine for the same model would take its memory twice; so this returns
    when they are gone, or after some seconds.
    """
    strays = []
    for process in psutil.process_iter():
        try:
            # Marked: its environment names this folder as its owner. A session has the pid of its leader as its id.
            if not _is_marked(process, owner) or os.getsid(process.pid) in leaders or process.pid == os.getpid():
                continue
            stray = NativeProcess(process.pid)
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
        log.warning("unrecorded_process_killed", pid=stray.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stray.pid, signal.SIGKILL)
        strays.append(stray)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_SECONDS):
            for stray in strays:
                await stray.wait()
    for stray in strays:
        stray.release()
    return [stray.pid for stray in strays]


def read_last_log_lines(log_path: Path) -> str:
    """Return the end of a log for a status: printable text, a few lines, at most 4 KiB."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = "\n".join(text.splitlines()[-_LOG_LINES:])
    return "".join(character for character in lines if character.isprintable() or character == "\n")[-4096:]


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group that `pid` leads, if it exists."""
    # No such group, or one of zombies, which macOS reports as a lack of permission: there is nothing to signal.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _open_watch(pid: int, *, child: bool) -> int | None:
    """Return a descriptor that becomes readable when `pid` has ended; see `watch_exit`. Raises OSError.

    None for a child that has ended already, which macOS does not watch.
    """
    try:
        return watch_exit(pid)
    except ProcessLookupError:
        if child:
            return None
        raise


def _read_exit(status: int) -> EngineExit:
    """Return exit code or signal from the wait status of a child."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return EngineExit(code=code)
    # Most real-time signals have no name.
    return EngineExit(signal=next((number.name for number in signal.Signals if number == -code), f"signal {-code}"))


def watch_exit(pid: int) -> int:
    """Return a descriptor that becomes readable when `pid` has ended, for the caller to close.

    Nothing is polled: the descriptor is a pidfd on Linux, a kqueue on macOS. Both work for processes that are no
    children of ours, so an engine that an earlier agent started is watched too.

    Raises:
        OSError: it cannot be watched; ProcessLookupError if there is no such process.
    """
    if sys.platform == "darwin":
        queue = select.kqueue()
        end = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT)
        try:
            queue.control([end], 0)
        except OSError:
            queue.close()
            raise
        # The object would close the queue when it is collected: the caller owns the duplicate.
        descriptor = os.dup(queue.fileno())
        queue.close()
        return descriptor
    return os.pidfd_open(pid)
