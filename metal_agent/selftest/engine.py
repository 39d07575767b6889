"""Check that llama.cpp finds the GPU of a Mac, in a process that is started as engines are."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Final

from devices import metal
from metal_agent.native.process import read_last_log_lines, spawn_process
from metal_agent.selftest.line import Line, check_known
from runtimes import llama_server

_MIB: Final = 2**20
_DEVICE: Final = re.compile(r"^\s+(\S+: .+) \(([0-9]+) MiB, [0-9]+ MiB free\)$", re.MULTILINE)


async def check_engine(folder: Path) -> list[Line]:
    """Start llama-server with --list-devices and check its output."""
    command = llama_server.find_command()
    if command is None:
        return [check_known("llama.cpp", None, llama_server.RUNTIME.install_hint)]
    log_path = folder / "devices.log"
    environment = llama_server.build_environment(os.environ)
    ended = await spawn_process([*command, "--list-devices"], environment, log_path, folder).wait()
    text = read_last_log_lines(log_path)
    return [
        check_known("llama.cpp", " ".join(command), "exit code 0", holds=ended.code == 0),
        *([check_device(text, await asyncio.to_thread(metal.read))] if sys.platform == "darwin" else []),
    ]


def check_device(text: str, metal_facts: metal.Metal) -> Line:
    """Check the device that llama.cpp sees; without one it would silently serve on the processor."""
    found = _DEVICE.search(text)
    mib = None if metal_facts.working_set_bytes is None else metal_facts.working_set_bytes // _MIB
    return check_known(
        "llama.cpp's device",
        found and f"{found[1]}, {found[2]} MiB",
        f"the GPU, with Metal's working set of {mib} MiB",
        holds=found is not None and int(found[2]) == mib,
        needed=True,
    )
