"""Check start, watch, adoption and end of real processes with the agent's own code, and the memory of a process."""

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil

from devices import gpu
from devices.footprint import footprint_bytes
from devices.sockets import loopback_port, unix_listener, unix_peer_uid
from devices.tools import output
from metal_agent import options
from metal_agent.doctor.finding import Finding, check_same, check_value
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.native.process import (
    OWNER_VARIABLE,
    NativeProcess,
    adopt_process,
    identify_process,
    read_last_log_lines,
    spawn_process,
)
from metal_agent.state_folder import own_folder

_T = TypeVar("_T")
_MIB: Final = 2**20
_HELD_BYTES: Final = 256 * _MIB
_PATIENCE_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.02
_SOON_SECONDS: Final = 2.0

_SERVER: Final = """
import os, socket, sys
{prepare}
listener = socket.create_server(("127.0.0.1", 0))
os.write(1, b"port %d stdin %d\\n" % (listener.getsockname()[1], len(sys.stdin.read())))
connection, _ = listener.accept()
{hold}
connection.sendall(b"held")
connection.recv(1)
"""
"""A server that allocates its memory when a client connects, and confirms that to the client."""
_IN_PYTHON: Final = _SERVER.format(
    prepare="", hold=f'held = bytearray({_HELD_BYTES}); held[::4096] = b"x" * len(held[::4096])'
)
_IN_METAL: Final = _SERVER.format(
    prepare="from devices.metal import MetalDevice; device = MetalDevice()", hold=f"device.hold({_HELD_BYTES})"
)
_WRAPPED: Final = ("/bin/sh", "-c", '"$@"; :', "sh", sys.executable, "-P", "-c", _IN_PYTHON)
"""The server as the child of a shell, as Homebrew and others wrap theirs."""
_LISTENER: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    while True:
        listener.accept()
"""
_PREDECESSOR: Final = """
import asyncio, pathlib, sys
import msgspec
from metal_agent.native.process import spawn_process
async def main():
    folder = pathlib.Path(sys.argv[1])
    process = spawn_process(["/bin/sleep", "600"], {}, folder / "adopted.log", folder)
    print(msgspec.json.encode(process.identity).decode())
asyncio.run(main())
"""
"""An agent that starts an engine and is gone."""


async def check_server(folder: Path) -> list[Finding]:
    """Check a server behind a wrapper: session, log, port, memory, mark and end."""
    log_path = folder / "server.log"
    async with _started(_WRAPPED, log_path, folder) as process:
        words = (await _await_line(log_path, "port")).split()
        port = words[1]
        findings = [
            check_same("a session of its own", os.getsid(process.pid), process.pid, "spawn"),
            check_same("bytes of its standard input", words[3], 0, "the null device"),
            check_same("port of a wrapped server", loopback_port(process.pid), port, "the server"),
            _check_mark(process.pid, folder),
        ]
        before = footprint_bytes(process.pid)
        async with _allocated(port):
            findings.append(_check_growth("growth of its footprint", before, footprint_bytes(process.pid)))
            family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            findings.append(await _check_end("its end is seen", process))
    left = await _poll(lambda: not any(identify_process(pid) for pid in family) or None)
    return [*findings, check_value("its children are gone too", left and "gone", "gone")]


async def check_metal_memory(folder: Path) -> list[Finding]:
    """Check that GPU memory of a Mac is in the footprint of its process and in the kernel's count for all processes."""
    log_path = folder / "metal.log"
    async with _started((sys.executable, "-P", "-c", _IN_METAL), log_path, folder) as process:
        port = (await _await_line(log_path, "port")).split()[1]
        before, all_before = footprint_bytes(process.pid), await asyncio.to_thread(gpu.read)
        async with _allocated(port):
            after, all_after = footprint_bytes(process.pid), await asyncio.to_thread(gpu.read)
    grown = (all_after.used_bytes or 0) - (all_before.used_bytes or 0)
    return [
        _check_growth("growth by a buffer of Metal", before, after),
        # Whatever else uses the GPU counts, too.
        Finding("growth of the GPU's memory", "ok", f"{grown // _MIB} MiB by a buffer of {_HELD_BYTES // _MIB} MiB"),
    ]


async def check_exits(folder: Path) -> list[Finding]:
    """Check how the exit of a process is reported: its exit code, and SIGKILL if it ignores SIGTERM."""
    async with _started(("/bin/sh", "-c", "exit 7"), folder / "code.log", folder) as process:
        code = (await process.wait()).code
    log_path = folder / "stubborn.log"
    stubborn = ("/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")
    async with _started(stubborn, log_path, folder) as process:
        await _await_line(log_path, "ready")
        await process.end(0.2)
        signal = (await process.wait()).signal
    return [
        check_same("exit code", code, 7, "the process"),
        check_same("end of one that ignores SIGTERM", signal, "SIGKILL", "the agent"),
    ]


async def check_adoption(folder: Path) -> list[Finding]:
    """Check that a process of an agent that is gone is adopted, and another one of the same pid is not."""
    argv = (sys.executable, "-P", "-c", _PREDECESSOR, str(folder))
    printed = await asyncio.to_thread(output, *argv, timeout_seconds=_PATIENCE_SECONDS)
    identity = msgspec.json.decode(printed, type=ProcessIdentity)
    other = adopt_process(msgspec.structs.replace(identity, start_time="another time"))
    process = adopt_process(identity)
    findings = [
        check_value("adoption", process and process.pid, f"process {identity.pid}"),
        check_value("adoption of a reused pid", other or "refused", "refused", holds=other is None),
    ]
    return [*findings, await _check_end("end of an adopted process", process)] if process else findings


async def check_ownership(folder: Path) -> list[Finding]:
    """Check that the listener of a unix socket is named, a state folder has one owner, and a lock is inherited."""
    path, log_path = folder / "peer.sock", folder / "peer.log"
    async with _started((sys.executable, "-P", "-c", _LISTENER, str(path)), log_path, folder) as process:
        await _await_line(log_path, "ready")
        listener = unix_listener(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            user = unix_peer_uid(client)
    owned, refused = folder / "owned", None
    with own_folder(owned):
        try:
            with own_folder(owned):
                pass
        except options.StartError:
            refused = "refused"
    return [
        check_same("process behind a unix socket", listener, process.pid, "spawn"),
        check_same("user behind a unix socket", user, os.geteuid(), "this process"),
        check_value("a second agent", refused, "refused"),
        await _check_inherited_lock(folder),
    ]


async def _check_inherited_lock(folder: Path) -> Finding:
    """Check that a process keeps a lock that its parent has closed: this keeps weights on disk in use."""
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        process = spawn_process(("/bin/sleep", "600"), os.environ, folder / "lock.log", folder, [descriptor])
    finally:
        os.close(descriptor)
    is_kept = _is_locked(path)
    await process.end(_PATIENCE_SECONDS)
    is_free = bool(await _poll(lambda: not _is_locked(path) or None))
    outcome = f"kept: {is_kept}, given back: {is_free}"
    return check_value("a lock that was inherited", outcome, "both", holds=is_kept and is_free)


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.asynccontextmanager
async def _started(argv: tuple[str, ...], log_path: Path, folder: Path) -> AsyncIterator[NativeProcess]:
    process = spawn_process(argv, os.environ, log_path, folder)
    try:
        yield process
    finally:
        await process.end(_SOON_SECONDS)


async def _check_end(name: str, process: NativeProcess) -> Finding:
    began = time.monotonic()
    await process.end(_PATIENCE_SECONDS)
    seconds = time.monotonic() - began
    return check_value(name, f"{seconds:.3f} s", "within 2 s of SIGTERM", holds=seconds < _SOON_SECONDS)


def _check_mark(pid: int, folder: Path) -> Finding:
    """Check the mark in the environment of the wrapped server; macOS hides the environment of the shell."""
    mark = None
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            mark = child.environ().get(OWNER_VARIABLE)
    return check_same("mark in its environment", mark, folder, "spawn")


@contextlib.asynccontextmanager
async def _allocated(port: str) -> AsyncIterator[None]:
    """Make the server allocate its memory, and keep it while the context lasts. Raises OSError and TimeoutError."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        await reader.readexactly(len(b"held"))
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _check_growth(name: str, before: int | None, after: int | None) -> Finding:
    grown = None if before is None or after is None else after - before
    return check_value(
        name,
        None if grown is None else f"{grown // _MIB} MiB",
        f"{_HELD_BYTES // _MIB} MiB or a little more",
        holds=grown is not None and _HELD_BYTES <= grown < 1.2 * _HELD_BYTES,
    )


async def _await_line(log_path: Path, word: str) -> str:
    """Return the first line in a log that begins with a word. Raises TimeoutError: there is none."""

    def find_line() -> str | None:
        lines = read_last_log_lines(log_path).splitlines()
        return next((line for line in lines if line.startswith(word)), None)

    line = await _poll(find_line)
    if line is None:
        raise TimeoutError(f"{log_path.name} has no line that begins with {word}")
    return line


async def _poll(look: Callable[[], _T | None]) -> _T | None:
    """Call `look` until it returns a value; None after the time-out."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (value := look()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(_POLL_SECONDS)
    return value
