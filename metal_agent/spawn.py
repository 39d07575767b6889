"""Starts native processes that outlive the agent, finds them again, hears of their end and ends them.

Each is the leader of its own session, writes to a log file rather than to a pipe that would die with the agent, and
carries a mark in its environment by which an agent that lost its record still knows what it has to clear up.
posix_spawn and not subprocess: with its own session subprocess forks, and a fork of a macOS process with threads
crashes before exec.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import structlog

from devices import processes
from devices.sockets import LOOPBACK, loopback_port
from metal_agent import exits
from metal_agent.handle import Exit, Identity

MARK: Final = "POMONA_AGENT_STATE"
"""Environment variable of every process we start; its value is the state folder of the agent that owns it."""
_LOG_LINES = 40
_LOG_TAIL_BYTES = 8192
_KILL_SECONDS: Final = 10.0
_REAP_SECONDS: Final = 0.005
_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})
"""How kernels say that a pid is no process; the latter two where it has become a thread's id."""

log = structlog.get_logger()


def identify(pid: int) -> Identity | None:
    """Describe the live process `pid`; None when there is none. Raises OSError when that cannot be found out."""
    started = processes.start_time(pid)
    return Identity(pid, started, processes.boot_id()) if started is not None else None


class NativeProcess:
    """One running process of ours, started or adopted: a `Handle`. Needs a running event loop.

    Args:
        pid: the process.
        child: whether it is a child of ours that nobody has waited for, so that it is there even when it has ended.

    Raises OSError, and ProcessLookupError where there is no process `pid`.
    """

    model: None = None
    token: None = None

    def __init__(self, pid: int, *, child: bool = False) -> None:
        self.pid = pid
        self._watch = _watch(pid, child=child)
        try:
            # Now, as the watch holds this very process, even if the pid is reused a moment later.
            self.identity = identify(pid)
        except BaseException:
            if self._watch is not None:
                os.close(self._watch)
            raise
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[Exit] = self._loop.create_future()
        if self._watch is None:
            self._loop.call_soon(self._ended)
        else:
            self._loop.add_reader(self._watch, self._ended)

    def url(self) -> str | None:
        """Ask the kernel where it listens on loopback; None when it does not yet."""
        port = loopback_port(self.pid)
        return f"http://{LOOPBACK}:{port}" if port else None

    async def wait(self) -> Exit:
        """Wait for its end."""
        return await asyncio.shield(self._exit)

    async def end(self, grace_seconds: float) -> None:
        """Ask the group to end, kill what is left after the grace, and wait until the leader is gone."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.wait()
                return
        log.warning("process ignores SIGTERM, killing its group", pid=self.pid, grace_seconds=grace_seconds)
        self._signal(signal.SIGKILL)
        await self.wait()

    def release(self) -> None:
        """Stop watching; the process goes on."""
        if not self._exit.done():
            self._exit.cancel()
            self._close()

    def _signal(self, number: signal.Signals) -> None:
        if not self._exit.done():
            _signal_group(self.pid, number)

    def _ended(self) -> None:
        self._close()
        # Until a child is waited for its pid is not reused: whatever is left of its group is still ours to kill.
        _signal_group(self.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        try:
            waited, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            how = Exit()
        else:
            if waited == 0:
                # macOS tells of an end a moment before it can be waited for.
                self._loop.call_later(_REAP_SECONDS, self._reap)
                return
            how = _exit(status)
        if not self._exit.done():
            self._exit.set_result(how)

    def _close(self) -> None:
        if self._watch is not None:
            self._loop.remove_reader(self._watch)
            os.close(self._watch)
            self._watch = None


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    owner: Path,
    inherited: Sequence[int] = (),
) -> NativeProcess:
    """Start `argv` in a session of its own, output appended to `log_path`, marked as belonging to `owner`.

    The descriptors `inherited` stay open in it: a lock on weights holds as long as somebody has them.

    Raises:
        OSError: the program is missing or cannot run.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"cannot run {argv[0]!r}: no such program")
    # Copies, since ours close on exec; behind all others, so that none is copied over before its turn.
    first_free = max(inherited, default=2) + 1
    pid = os.posix_spawn(
        program,
        list(argv),
        {**environment, MARK: str(owner)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, _writable(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_DUP2, each, first_free + index) for index, each in enumerate(inherited)),
        ],
        setsid=True,
        setsigmask=[],
        # Python ignores these, and what is ignored is inherited.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )
    try:
        return NativeProcess(pid, child=True)
    except BaseException:
        # Nobody would hear of its end, and whoever tries again would start a second one.
        _signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _writable(log_path: Path) -> str:
    """Make sure that the log can be written; on a full disk an engine without a log is better than none."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch(mode=0o600)
    except OSError as error:
        log.warning("cannot write a log: its lines are lost", path=str(log_path), error=str(error))
        return os.devnull
    return str(log_path)


def adopt(identity: Identity) -> NativeProcess | None:
    """Take over the process that `identity` describes; None when it is gone, or its pid is another process now.

    Raises OSError when that cannot be found out.
    """
    if identity.boot_id != processes.boot_id():
        return None
    try:
        process = NativeProcess(identity.pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise
    if process.identity == identity:
        return process
    process.release()
    return None


async def kill_strays(owner: Path, known: Collection[int]) -> list[int]:
    """Kill marked processes of `owner` outside the sessions that `known` pids lead; returns their pids.

    They exist when an agent died between starting a process and writing it down, or when a record was damaged. Nobody
    would ever stop them, and a second engine for the same model would take its memory twice: so they are gone, or have
    had some seconds for it, when this returns.
    """
    strays = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) != str(owner) or os.getsid(process.pid) in known:
                continue
            if process.pid == os.getpid():
                continue
            stray = NativeProcess(process.pid)
        except (psutil.Error, OSError):
            continue
        log.warning("killing a process of ours that has no record", pid=stray.pid)
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


def last_lines(log_path: Path) -> str:
    """The end of a log, for a status: a few lines, at most 4 KiB, whatever bytes the engine wrote."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = "\n".join(text.splitlines()[-_LOG_LINES:])
    return "".join(character for character in lines if character.isprintable() or character == "\n")[-4096:]


def _signal_group(pid: int, number: signal.Signals) -> None:
    # Gone, or a group of zombies, which macOS reports as a lack of permission: there is nothing to signal.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _watch(pid: int, *, child: bool) -> int | None:
    """Watch `pid`; None for a child that has ended, which macOS does not watch any more. Raises OSError."""
    try:
        return exits.watch(pid)
    except ProcessLookupError:
        if child:
            return None
        raise


def _exit(status: int) -> Exit:
    code = os.waitstatus_to_exitcode(status)
    return Exit(code=code) if code >= 0 else Exit(signal=_signal_name(-code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Real-time signals have no name.
        return f"signal {number}"
