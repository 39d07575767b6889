"""Fetch one file as an agent does, and print time and memory: `python -m benchmarks.clients.weights_fetch URL DIR`."""

import asyncio
import contextlib
import re
import sys
import time
from pathlib import Path

import msgspec

from artifacts.fetch import ExpectedFile, fetch
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.background import running
from tests.support.file_server import ALLOWED_NETWORKS

_TICK_SECONDS = 0.005


class FetchCost(msgspec.Struct):
    """Time and memory of one download."""

    seconds: float
    sha256: str
    peak_bytes: int
    """Most resident memory, above that before the download."""
    longest_pause_seconds: float
    """The longest time in which the event loop did nothing else."""


def read_memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


async def measure(url: str, folder: Path) -> FetchCost:
    """Fetch the file to the folder."""
    longest = 0.0

    async def watch_loop() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            longest = max(longest, time.monotonic() - before - _TICK_SECONDS)

    access = SourceAccess(allowed_networks=ALLOWED_NETWORKS)
    idle = read_memory("VmRSS")
    async with running(watch_loop()):
        began = time.monotonic()
        fetched = await fetch(parse(url), folder, access, ExpectedFile(), on_progress=lambda _done, _total: None)
        seconds = time.monotonic() - began
    return FetchCost(seconds, fetched.sha256, read_memory("VmHWM") - idle, longest)


if __name__ == "__main__":
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with contextlib.suppress(KeyboardInterrupt):
        print(msgspec.json.encode(asyncio.run(measure(sys.argv[1], Path(sys.argv[2])))).decode())
