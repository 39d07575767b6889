"""Starts, watches, adopts and ends real processes with the agent's own code, and measures one that takes memory."""

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil

from devices import gpu
from devices.footprint import footprint_bytes
from devices.sockets import loopback_port, unix_listener
from devices.tools import output
from metal_agent import spawn, start
from metal_agent.handle import Identity
from metal_agent.ownership import own
from metal_agent.selftest.line import Line, known, same
from metal_agent.spawn import NativeProcess

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
"""Takes its memory when it is asked to, and tells when it has."""
_IN_PYTHON: Final = _SERVER.format(
    prepare="", hold=f'held = bytearray({_HELD_BYTES}); held[::4096] = b"x" * len(held[::4096])'
)
_IN_METAL: Final = _SERVER.format(
    prepare="from devices.metal import Device; device = Device()", hold=f"device.hold({_HELD_BYTES})"
)
_WRAPPED: Final = ("/bin/sh", "-c", '"$0" -c "$1"; :', sys.executable, _IN_PYTHON)
"""The server as the child of a shell, as Homebrew and others wrap theirs."""
_LISTENER: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    listener.accept()
"""
_PREDECESSOR: Final = """
import asyncio, pathlib, sys
import msgspec
from metal_agent import spawn
async def main():
    folder = pathlib.Path(sys.argv[1])
    process = spawn.spawn(["/bin/sleep", "600"], {}, folder / "adopted.log", folder)
    print(msgspec.json.encode(process.identity).decode())
asyncio.run(main())
"""
"""An agent that starts an engine and is gone."""


async def server(folder: Path) -> list[Line]:
    """A server behind a wrapper: session, log, port, memory, mark and end."""
    log_path = folder / "server.log"
    async with _started(_WRAPPED, log_path, folder) as process:
        said = await _until(lambda: _last(log_path, "port"))
        port = said.split()[1] if said else None
        lines = [
            same("a session of its own", os.getsid(process.pid), process.pid, "spawn", needed=True),
            known("output in its log", said, "a line that begins with port", needed=True),
            known("its standard input", said and said.split()[3], "0 bytes", holds=bool(said and said.endswith(" 0"))),
            same("port of a wrapped server", loopback_port(process.pid), port, "the server", needed=True),
            _mark(process.pid, folder),
        ]
        before = footprint_bytes(process.pid)
        async with _allocated(port):
            lines.append(_growth("growth of its footprint", before, footprint_bytes(process.pid)))
            family = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
            began = time.monotonic()
            await process.end(_PATIENCE_SECONDS)
            seconds = time.monotonic() - began
    left = await _until(lambda: not any(spawn.identify(pid) for pid in family) or None)
    return [
        *lines,
        known("its end is seen", f"{seconds:.3f} s", "within 2 s of SIGTERM", holds=seconds < _SOON_SECONDS),
        known("its children are gone too", left and "gone", "gone", needed=True),
    ]


async def metal(folder: Path) -> list[Line]:
    """Memory that is the GPU's, on a Mac: in a process's footprint, and in what the kernel counts of all."""
    log_path = folder / "metal.log"
    async with _started((sys.executable, "-P", "-c", _IN_METAL), log_path, folder) as process:
        said = await _until(lambda: _last(log_path, "port"))
        before, all_before = footprint_bytes(process.pid), await asyncio.to_thread(gpu.read)
        async with _allocated(said.split()[1] if said else None):
            after, all_after = footprint_bytes(process.pid), await asyncio.to_thread(gpu.read)
        return [
            _growth("growth by a buffer of Metal", before, after),
            known(
                "growth of the GPU's memory",
                f"{((all_after.used_bytes or 0) - (all_before.used_bytes or 0)) / _MIB:.0f} MiB",
                f"{_HELD_BYTES // _MIB} MiB, if nothing else uses the GPU and a buffer counts before its first use",
            ),
        ]


async def ends(folder: Path) -> list[Line]:
    """How a process ended: its exit code, and by SIGKILL where it ignores SIGTERM."""
    async with _started(("/bin/sh", "-c", "exit 7"), folder / "code.log", folder) as process:
        code = (await process.wait()).code
    log_path = folder / "stubborn.log"
    stubborn = ("/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")
    async with _started(stubborn, log_path, folder) as process:
        await _until(lambda: _last(log_path, "ready"))
        await process.end(0.2)
        signal = (await process.wait()).signal
    return [
        same("exit code", code, 7, "the process", needed=True),
        same("end of one that ignores SIGTERM", signal, "SIGKILL", "the agent", needed=True),
    ]


async def adoption(folder: Path) -> list[Line]:
    """A process of an agent that is gone is taken over, and another one of the same pid is not."""
    said = await asyncio.to_thread(output, sys.executable, "-P", "-c", _PREDECESSOR, str(folder))
    identity = msgspec.json.decode(said, type=Identity)
    other = spawn.adopt(msgspec.structs.replace(identity, start_time="another time"))
    process = spawn.adopt(identity)
    lines = [
        known("adoption", process and process.pid, f"process {identity.pid}", needed=True),
        known("adoption of a reused pid", other or "refused", "refused", holds=other is None),
    ]
    if process is None:
        return lines
    began = time.monotonic()
    await process.end(_PATIENCE_SECONDS)
    seconds = time.monotonic() - began
    return [
        *lines,
        known("end of an adopted process", f"{seconds:.3f} s", "within 2 s", holds=seconds < _SOON_SECONDS),
    ]


async def ownership(folder: Path) -> list[Line]:
    """Who listens on a unix socket, that a state folder has one owner, and that a lock is inherited."""
    path, log_path = folder / "peer.sock", folder / "peer.log"
    async with _started((sys.executable, "-c", _LISTENER, str(path)), log_path, folder) as process:
        await _until(lambda: _last(log_path, "ready"))
        found = unix_listener(path)
    owned = folder / "owned"
    with own(owned):
        try:
            with own(owned):
                refused = None
        except start.StartError:
            refused = "refused"
    return [
        same("process behind a unix socket", found, process.pid, "spawn", needed=True),
        known("a second agent", refused, "refused", needed=True),
        await _inherited_lock(folder),
    ]


async def _inherited_lock(folder: Path) -> Line:
    """Look whether a process keeps a lock that its starter has closed: so weights are pinned while they are served."""
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        process = spawn.spawn(("/bin/sleep", "600"), os.environ, folder / "lock.log", folder, [descriptor])
    finally:
        os.close(descriptor)
    kept = _locked(path)
    await process.end(_PATIENCE_SECONDS)
    free = await _until(lambda: not _locked(path) or None)
    return known(
        "a lock that was inherited",
        f"kept {kept}, given back {bool(free)}",
        "kept while the process runs, and then given back",
        holds=kept and bool(free),
    )


def _locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.asynccontextmanager
async def _started(argv: tuple[str, ...], log_path: Path, folder: Path) -> AsyncIterator[NativeProcess]:
    process = spawn.spawn(argv, os.environ, log_path, folder)
    try:
        yield process
    finally:
        await process.end(_SOON_SECONDS)


def _mark(pid: int, folder: Path) -> Line:
    """Look for the mark in the environment of the wrapped server; of the shell macOS hides it."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found = child.environ().get(spawn.MARK)
            return same("mark in its environment", found, folder, "spawn", needed=True)
    return known("mark in its environment", None, str(folder), needed=True)


@contextlib.asynccontextmanager
async def _allocated(port: str | None) -> AsyncIterator[None]:
    """Have the server take its memory, if it can be reached, and keep it while the context lasts."""
    writer = None
    with contextlib.suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port or 0))
            await reader.readexactly(len(b"held"))
    try:
        yield
    finally:
        if writer:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _growth(name: str, before: int | None, after: int | None) -> Line:
    grown = None if before is None or after is None else after - before
    return known(
        name,
        None if grown is None else f"{grown / _MIB:.0f} MiB",
        f"{_HELD_BYTES // _MIB} MiB or a little more",
        holds=grown is not None and _HELD_BYTES <= grown < 1.2 * _HELD_BYTES,
        needed=True,
    )


async def _until(look: Callable[[], _T | None]) -> _T | None:
    """Look until there is something; None when there is nothing for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                if (found := look()) is not None:
                    return found
                await asyncio.sleep(_POLL_SECONDS)
    return None


def _last(log_path: Path, word: str) -> str | None:
    return next((line for line in spawn.last_lines(log_path).splitlines() if line.startswith(word)), None)
