"""Checks of what the agent does with processes on this system, by its own code: start, adoption, watch, memory, end."""

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec
import psutil

from artifacts.folder_lock import try_lock
from devices import gpu
from devices.footprint import footprint_bytes
from devices.sockets import loopback_port, unix_listener, unix_peer_uid
from devices.tools import output
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

_MIB: Final = 2**20
_HELD_BYTES: Final = 256 * _MIB
_PATIENCE_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.02
_SOON_SECONDS: Final = 2.0
_SOCKET: Final = "server.sock"
_LOG: Final = "server.log"

_SERVER: Final = """
import os, socket, sys
{prepare}
local = socket.socket(socket.AF_UNIX)
local.bind(sys.argv[1])
local.listen()
listener = socket.create_server(("127.0.0.1", 0))
os.write(1, b"port %d\\n" % listener.getsockname()[1])
connection, _ = listener.accept()
{hold}
connection.sendall(b"held")
connection.recv(1)
"""
"""A server that allocates its memory when a client connects, and confirms that to the client."""
_HOLD: Final = f'held = bytearray({_HELD_BYTES}); held[::4096] = b"x" * len(held[::4096])'
_IN_PYTHON: Final = _SERVER.format(prepare="", hold=_HOLD)
_PREPARE: Final = "from devices.metal import MetalDevice; device = MetalDevice()"
_IN_METAL: Final = _SERVER.format(prepare=_PREPARE, hold=f"device.hold({_HELD_BYTES})")
_PREDECESSOR: Final = """
import asyncio, pathlib, sys
import msgspec
from metal_agent.native.process import spawn_process
async def main():
    folder = pathlib.Path(sys.argv[1])
    process = spawn_process(sys.argv[2:], {}, folder / "server.log", folder)
    print(msgspec.json.encode(process.identity).decode())
asyncio.run(main())
"""
"""An agent that starts an engine and is gone."""
_STUBBORN: Final = ("/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")


async def check_adopted_server(folder: Path) -> list[Finding]:
    """Check that the agent adopts a server that an earlier agent started, and no process that reused its pid.

    A Python process plays the earlier agent: it starts the server, prints the server's identity and ends. The server
    runs behind a shell, as that of Homebrew and others does.
    """
    # 1. Let the earlier agent start the server. _PREDECESSOR is its program; _IN_PYTHON is that of the server, which
    # listens at the unix socket named _SOCKET.
    # `"$@"; :` runs the words after it and does not end by exec, so that the shell stays around the server.
    server = ("/bin/sh", "-c", '"$@"; :', "sh", sys.executable, "-P", "-c", _IN_PYTHON, str(folder / _SOCKET))
    predecessor = (sys.executable, "-P", "-c", _PREDECESSOR, str(folder), *server)
    printed = await asyncio.to_thread(output, *predecessor, timeout_seconds=_PATIENCE_SECONDS)
    identity = msgspec.json.decode(printed, type=ProcessIdentity)

    # 2. Adopt it. A process with the same pid and another start time is not the server.
    adopted_other = adopt_process(msgspec.structs.replace(identity, start_time="another time"))
    process = adopt_process(identity)
    # check_value: the name of the finding, what was seen, what is expected.
    findings = [
        check_value("adoption", process.pid if process else None, f"process {identity.pid}"),
        check_value("adoption of a reused pid", adopted_other or "refused", "refused", holds=adopted_other is None),
    ]

    if process is None:
        return findings

    # 3. Check what the agent can tell of the adopted server.
    async with _ending_on_exit(process):
        return findings + await _check_server(process, folder)


async def _check_server(process: NativeProcess, folder: Path) -> list[Finding]:
    """Check ports, sockets, memory and end of a server that was adopted: `process` is the shell around it.

    The server logs its port. It allocates memory while a client is connected, by which the growth of its footprint is
    checked.
    """
    port = (await _await_line(folder / _LOG, "port")).split()[1]
    # The processes behind the shell: the server is one of them.
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / _SOCKET))
        listener, user = unix_listener(folder / _SOCKET), unix_peer_uid(client)

    findings = [
        check_same("a session of its own", os.getsid(process.pid), process.pid, "spawn"),
        check_same("port of a wrapped server", loopback_port(process.pid), port, "the server"),
        check_value("process behind a unix socket", listener, f"one of {family}", holds=listener in family),
        check_same("user behind a unix socket", user, os.geteuid(), "this process"),
        _check_mark(family, folder),
    ]

    before = footprint_bytes(process.pid)
    async with _allocated(port):
        findings.append(_check_growth("growth of its footprint", before, footprint_bytes(process.pid)))
        began = time.monotonic()
        await process.end(_PATIENCE_SECONDS)
        seconds = time.monotonic() - began

    are_gone = await _wait_until(lambda: not any(identify_process(pid) for pid in family))
    return [
        *findings,
        check_value("its end is seen", f"{seconds:.3f} s", "within 2 s of SIGTERM", holds=seconds < _SOON_SECONDS),
        check_value("its children are gone too", "gone" if are_gone else None, "gone"),
    ]


async def check_metal_memory(folder: Path) -> list[Finding]:
    """Check that GPU memory of a Mac is in the footprint of its process and in the kernel's count for all processes."""
    log_path = folder / "metal.log"
    # _IN_METAL: a server that makes a Metal buffer of _HELD_BYTES while a client is connected.
    argv = (sys.executable, "-P", "-c", _IN_METAL, str(folder / "metal.sock"))
    async with _ending_on_exit(spawn_process(argv, os.environ, log_path, folder)) as process:
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


async def check_killed_child(folder: Path) -> list[Finding]:
    """Check a child that ignores SIGTERM: its exit is reported, and a lock that it inherits is kept until then."""
    path, log_path = folder / "lock", folder / "stubborn.log"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # _STUBBORN: a shell that ignores SIGTERM. It inherits the descriptor, and with it the lock.
        process = spawn_process(_STUBBORN, os.environ, log_path, folder, [descriptor])
    finally:
        os.close(descriptor)  # from here on only the child has the lock

    async with _ending_on_exit(process):
        await _await_line(log_path, "ready")
        is_kept = _is_locked(path)
        await process.end(0.2)  # SIGTERM, and SIGKILL 0.2 s later
        signal = (await process.wait()).signal

    is_free = await _wait_until(lambda: not _is_locked(path))
    kept = f"kept: {is_kept}, given back: {is_free}"
    return [
        check_same("end of one that ignores SIGTERM", signal, "SIGKILL", "the agent"),
        check_value("a lock that was inherited", kept, "both", holds=is_kept and is_free),
    ]


def _is_locked(path: Path) -> bool:
    """Decide whether another process has the lock of a file."""
    with path.open() as file:
        return not try_lock(file.fileno())


def _check_mark(family: list[int], folder: Path) -> Finding:
    """Check the mark by which an agent finds processes that it lost: a variable in the environment of the server.

    `family` are the processes behind the shell around the server; macOS hides the environment of the shell itself.
    """
    marks = set()
    for pid in family:
        with contextlib.suppress(psutil.Error):
            marks.add(psutil.Process(pid).environ().get(OWNER_VARIABLE))
    return check_value("mark in its environment", ", ".join(map(str, marks)), str(folder), holds=str(folder) in marks)


def _check_growth(name: str, before: int | None, after: int | None) -> Finding:
    """Check that a footprint has grown by the memory that was allocated."""
    grown = None if before is None or after is None else after - before
    holds = grown is not None and _HELD_BYTES <= grown < 1.2 * _HELD_BYTES  # what the server allocates
    text = None if grown is None else f"{grown // _MIB} MiB"
    return check_value(name, text, f"{_HELD_BYTES // _MIB} MiB or a little more", holds=holds)


@contextlib.asynccontextmanager
async def _ending_on_exit(process: NativeProcess) -> AsyncIterator[NativeProcess]:
    """End the process at the end of the context, if it has not ended by then."""
    try:
        yield process
    finally:
        await process.end(_SOON_SECONDS)


@contextlib.asynccontextmanager
async def _allocated(port: str) -> AsyncIterator[None]:
    """Make the server at `port` allocate its memory, and keep it while the context lasts.

    It does so when a client connects, and then sends `held`; it ends with the connection. Raises OSError and
    TimeoutError.
    """
    async with asyncio.timeout(_PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        await reader.readexactly(len(b"held"))  # the memory is allocated now
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _await_line(log_path: Path, word: str) -> str:
    """Wait for a line in a log that begins with a word, and return the first one. Raises TimeoutError if none comes."""

    def find_lines() -> list[str]:
        """Return the lines that begin with the word."""
        return [line for line in read_last_log_lines(log_path).splitlines() if line.startswith(word)]

    if not await _wait_until(lambda: bool(find_lines())):
        raise TimeoutError(f"{log_path.name} has no line that begins with {word}")
    return find_lines()[0]


async def _wait_until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, but not longer than the time-out; return whether it holds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (holds := condition()) and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(_POLL_SECONDS)
    return holds
