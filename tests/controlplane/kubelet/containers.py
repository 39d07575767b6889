"""One container as a process tree: started in new namespaces, awaited, signalled, entered for exec probes.

The root of the tree is `unshare`, whose death ends all processes of the container's PID namespace. The command is the
first process of that namespace: as in any container, SIGTERM has an effect only if the command handles it. The process
is no asyncio subprocess, because those are killed with the event loop, and containers outlive a kubelet that stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.controlplane.kubelet import rootfs
from tests.controlplane.kubelet.rootfs import STARTED

START_TIMEOUT_SECONDS = 30.0


class StartError(Exception):
    """The container's command could not be started; the message has the reason."""


@dataclass(frozen=True)
class Mount:
    """A host file or folder, shown at an absolute path of the container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Launch:
    """The parameters for the start of a container: command, environment, network namespace, files, user.

    Without `image_root` the host's own folders are the image.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    working_dir: str
    hostname: str
    netns: str | None
    mounts: Sequence[Mount]
    visible: Sequence[Path]
    image_root: Path | None
    user: int
    read_only_root: bool
    folder: Path
    log: Path


class Container:
    """A started container. `init_pid` is its first process, seen from the kubelet's PID namespace."""

    def __init__(self, process: subprocess.Popen[bytes], init_pid: int) -> None:
        self._process = process
        self.init_pid = init_pid
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        """The root of the process tree."""
        return self._process.pid

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        if not self._exit.done():
            self._exit.set_result(code if code >= 0 else 128 - code)

    async def wait(self) -> int:
        """Return the exit code; 128 plus the signal's number when a signal ended it."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process, which ends only if it handles the signal."""
        _signal(self.init_pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the container (SIGKILL)."""
        _signal(self.pid, signal.SIGKILL)

    async def stop(self, grace_seconds: float) -> None:
        """Terminate the container, kill it after the grace period, and return when it is dead."""
        self.terminate()
        await asyncio.wait([self._exit], timeout=grace_seconds)
        self.kill()
        await self.wait()

    async def execute(self, argv: Sequence[str], timeout_seconds: float) -> int:
        """Run a command inside the container and return its exit code; raises TimeoutError after killing it."""
        inside = [_tool("nsenter"), "--target", str(self.init_pid), "--mount", "--net", "--uts", "--ipc", "--pid"]
        process = await asyncio.create_subprocess_exec(
            *inside,
            "--root",
            "--wd",
            "--",
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return await asyncio.wait_for(process.wait(), timeout_seconds)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def start(launch: Launch) -> Container:
    """Start a container and return once its command runs; raises StartError when it cannot."""
    root = launch.folder / "root"
    root.mkdir(parents=True, exist_ok=True)
    spec = launch.folder / "spec.json"
    spec.write_text(
        json.dumps(
            {
                "argv": list(launch.argv),
                "hostname": launch.hostname,
                "mounts": [asdict(mount) for mount in launch.mounts],
                "image_root": str(launch.image_root or ""),
                "user": launch.user,
                "read_only_root": launch.read_only_root,
                "root": str(root),
                "variables": list(launch.environment),
                "visible": [str(path) for path in launch.visible],
                "working_dir": launch.working_dir,
            },
            default=str,
        )
    )
    network = [_tool("nsenter"), f"--net=/run/netns/{launch.netns}"] if launch.netns else []
    isolate = [_tool("unshare"), "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
    read_end, write_end = os.pipe()
    try:
        with launch.log.open("ab") as log, os.fdopen(write_end, "wb"):
            process = subprocess.Popen(  # noqa: ASYNC220 - returns after fork and exec; see the module's paragraph
                [*network, *isolate, sys.executable, "-I", "-S", rootfs.__file__, str(spec), str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(launch.environment),
                pass_fds=[write_end],
                start_new_session=True,
            )
        (launch.folder / "pid").write_text(f"{process.pid} {_start_time(process.pid)}")
        return await _started(process, read_end)
    finally:
        os.close(read_end)


async def _started(process: subprocess.Popen[bytes], report_fd: int) -> Container:
    """Wait for the report of rootfs.py: started, or an error; an empty report means that it was killed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(report_fd, readable.set)
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            await readable.wait()
        report = os.read(report_fd, 4096)
    except TimeoutError:
        report = f"not started after {START_TIMEOUT_SECONDS:.0f} s".encode()
    finally:
        loop.remove_reader(report_fd)
    if not report.startswith(STARTED):
        process.kill()
        process.wait()
        raise StartError(report.decode(errors="replace") or "its first process died while its root folder was built")
    return Container(process, _first_child(process.pid))


def _first_child(pid: int) -> int:
    """Return the container's first process, or the root of the tree if the first process has already ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    pids = children.read_text().split() if children.exists() else []
    return int(pids[0]) if pids else pid


def kill_leftover(folder: Path) -> bool:
    """Kill the container that an earlier kubelet started in `folder`; return whether it was still running."""
    try:
        pid, start_time = (folder / "pid").read_text().split()
        if _start_time(int(pid)) != start_time:
            return False
        os.kill(int(pid), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return True


def _start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks, which with the PID identifies the process for ever."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process may have ended in the meantime
        os.kill(pid, number)


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise StartError(f"{name} is not on PATH; install util-linux")
    return path
