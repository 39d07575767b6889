"""The real engine behind a switch: after SIGUSR1 it answers 500 to each request for tokens, as real ones do.

A llama.cpp that has met a Metal out-of-memory error does so for ever, while its health page answers 200. The engine
listens on a Unix socket of this process; a relay has the port, and passes everything until the switch is thrown.
"""

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Final

import xllamacpp

from runtimes import llama_launcher
from tests.support.sick_engine import FAILING

SWITCH: Final = signal.SIGUSR1
_PIECE_BYTES: Final = 64 << 10
_BODY: Final = json.dumps(FAILING).encode()
_REFUSAL: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Relay:
    """The relay from a port of the loopback to the engine at the Unix socket `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_sick = threading.Event()

    def start(self) -> None:
        """Serve in a thread of its own, and wait for the signal in another."""
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        threading.Thread(target=self._await_switch, daemon=True).start()

    def _await_switch(self) -> None:
        signal.sigwait({SWITCH})
        self._is_sick.set()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        await server.serve_forever()

    async def _relay(self, reader: StreamReader, writer: StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(self._path)
        answers = asyncio.create_task(_copy(engine_reader, writer))
        with contextlib.closing(engine_writer), contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                if self._is_sick.is_set() and piece.startswith(b"POST"):
                    writer.write(_REFUSAL)
                    await writer.drain()
                    break
                engine_writer.write(piece)
                await engine_writer.drain()
        answers.cancel()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


def write_program(folder: Path) -> Path:
    """Write an executable that is this engine, for LLAMA_SERVER_BIN; return its path."""
    path = folder / "llama-server"
    root = Path(__file__).parents[2]
    path.write_text(f"#!/bin/sh\nPYTHONPATH='{root}' exec '{sys.executable}' -m {__spec__.name} \"$@\"\n")
    path.chmod(0o755)
    return path


def main(arguments: list[str]) -> None:
    """Serve until a signal, as the launcher of the real engine does."""
    # Threads of the engine inherit the mask, so that only the thread that waits for the signal gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {SWITCH})
    path = f"{tempfile.mkdtemp(prefix='engine-')}/engine.sock"
    parameters = llama_launcher.parse(arguments)
    parameters.hostnames = [path]
    server = xllamacpp.Server(parameters)
    Relay(path).start()
    # Any other signal ends this process at once.
    signal.pause()
    del server


if __name__ == "__main__":
    main(sys.argv[1:])
