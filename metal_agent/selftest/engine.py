"""Asks llama.cpp for its devices, in a process that is started as engines are: what a Mac's GPU is needed for."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Final

from devices import metal
from metal_agent import spawn
from metal_agent.selftest.line import Line, known
from runtimes import llama_server

_MIB: Final = 2**20
_DEVICE: Final = re.compile(r"^\s+(\S+: .+) \(([0-9]+) MiB, [0-9]+ MiB free\)$", re.MULTILINE)


async def lines(folder: Path) -> list[Line]:
    """Start llama-server with --list-devices."""
    command = llama_server.command()
    if command is None:
        return [known("llama.cpp", None, llama_server.RUNTIME.install_hint)]
    log_path = folder / "devices.log"
    environment = llama_server.child_environment(os.environ)
    how = await spawn.spawn([*command, "--list-devices"], environment, log_path, folder).wait()
    said = spawn.last_lines(log_path)
    return [
        known("llama.cpp", " ".join(command), "exit code 0", holds=how.code == 0),
        *([device(said, await asyncio.to_thread(metal.read))] if sys.platform == "darwin" else []),
    ]


def device(said: str, metal_said: metal.Metal) -> Line:
    """Judge the device that llama.cpp sees; without one it would silently serve on the processor."""
    found = _DEVICE.search(said)
    mib = None if metal_said.working_set_bytes is None else metal_said.working_set_bytes // _MIB
    return known(
        "llama.cpp's device",
        found and f"{found[1]}, {found[2]} MiB",
        f"the GPU, with Metal's working set of {mib} MiB",
        holds=found is not None and int(found[2]) == mib,
        needed=True,
    )
