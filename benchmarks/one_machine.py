"""Models on demand on one machine: load, swap, bursts over five models, edits of files, and the cost of nothing loaded.

The floor of a load and of a swap is llama.cpp's own server with the same arguments, started and stopped by hand. The
arrivals of the burst follow SEED; the swaps of first-come-first-served are counted over the same arrivals, with the
model that was used longest ago making room.
"""

import asyncio
import functools
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from benchmarks.report import Figure, print_figures
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually
from tests.support.on_demand_up import find_engines, find_proxy, room_for, write_models
from tests.support.up_command import CALL, Up

ROUNDS: Final = 5
SEED: Final = 45
REQUESTS: Final = 500
REQUESTS_PER_SECOND: Final = 20.0
MODELS: Final = ("one", "two", "three", "four", "five")
IDLE_SECONDS: Final = 30.0
LOAD_MILLISECONDS: Final = 100.0
SWAP_MILLISECONDS: Final = 150.0
EDIT_MILLISECONDS: Final = 300.0
WAIT_SECONDS: Final = 30.0
IDLE_MIB: Final = 60.0
IDLE_CORE_PERCENT: Final = 0.3
_SETTLE_SECONDS: Final = 1.5
"""After a request, until its model counts as unused."""
_TOKEN: Final = re.compile(rb'"content": ?"[^"]')
_FLOORS: Final = {"up": "aiohttp, msgspec, uvloop", "proxy": "asyncio, httptools, msgspec, uvloop"}
"""The libraries without which a process of each kind can do nothing: an interpreter with them is the floor."""


class NoAnswerError(Exception):
    """A model has not answered."""


async def first_token(session: aiohttp.ClientSession, url: str, model: str) -> float:
    """Send a streamed chat; return the milliseconds to its first token. Raises NoAnswerError."""
    began = time.perf_counter()
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != HTTPStatus.OK:
            raise NoAnswerError(await response.text())
        async for line in response.content:
            if _TOKEN.search(line):
                taken = 1000 * (time.perf_counter() - began)
                await response.read()
                return taken
    raise NoAnswerError(f"{model} has answered nothing")


class BareServer:
    """llama.cpp's server by hand, with the arguments of a Pomona engine."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Take the command line of an engine; its key stays valid, as the file of the key does."""
        words = list(argv)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words[words.index("--port") + 1] = str(self.port)
        if "--api-key-file" in words:
            at = words.index("--api-key-file")
            del words[at : at + 2]
        self._argv = words

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, session: aiohttp.ClientSession, model: str) -> float:
        """Start it, and ask until it gives a token; return the milliseconds from its start to the token."""
        began = time.perf_counter()
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=CHECKOUT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        while True:
            try:
                await first_token(session, self.url, model)
            except (aiohttp.ClientError, NoAnswerError):
                await asyncio.sleep(0.001)
            else:
                return 1000 * (time.perf_counter() - began)

    async def stop(self) -> float:
        """Stop it; return the milliseconds until it has ended."""
        began = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        return 1000 * (time.perf_counter() - began)


@asynccontextmanager
async def running_up(folder: Path, *names: str, room: int, idle_seconds: int = 300) -> AsyncIterator[tuple[Up, str]]:
    """Run `pomona up` with models on demand; yield it and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = write_models(folder, *names, scaling={"minReplicas": 0, "idleSeconds": idle_seconds})
    up = Up(folder, path, room_for(room), f"--port={port}")
    url = await up.url()
    try:
        yield up, url
    finally:
        await up.process.stop()


async def measure_loads(session: aiohttp.ClientSession, folder: Path) -> list[Figure]:
    """Return the time of a load and of a swap, each beside the bare server."""
    loads, swaps, bare_loads, bare_swaps = list[float](), list[float](), list[float](), list[float]()
    async with running_up(folder, "one", "two", room=1, idle_seconds=1) as (up, url):
        await first_token(session, url, "one")
        argv = next(psutil.Process(pid).cmdline() for pid in find_engines(up.state))
        bare = BareServer(argv)
        for _ in range(ROUNDS):
            await eventually(lambda: not find_engines(up.state))
            loads.append(await first_token(session, url, "one"))
            bare_loads.append(await bare.start(session, "one"))
            await bare.stop()
    (folder / "swap").mkdir()
    async with running_up(folder / "swap", "one", "two", room=1) as (_, url):
        await first_token(session, url, "one")
        for number in range(ROUNDS):
            await bare.start(session, "one")
            bare_swaps.append(await bare.stop() + await bare.start(session, "one"))
            await bare.stop()
            await asyncio.sleep(_SETTLE_SECONDS)
            swaps.append(await first_token(session, url, ("two", "one")[number % 2]))
    load, bare_load = statistics.median(loads), statistics.median(bare_loads)
    swap, bare_swap = statistics.median(swaps), statistics.median(bare_swaps)
    return [
        Figure("unloaded to first token", load, bare_load, bare_load + LOAD_MILLISECONDS, "ms"),
        Figure("swap to first token", swap, bare_swap, bare_swap + SWAP_MILLISECONDS, "ms"),
    ]


def list_arrivals() -> list[tuple[float, str]]:
    """Return the requests of the burst: seconds from its beginning, and the model."""
    chance = random.Random(SEED)  # noqa: S311 - a trace, no secret
    at, arrivals = 0.0, []
    for _ in range(REQUESTS):
        at += chance.expovariate(REQUESTS_PER_SECOND)
        arrivals.append((at, chance.choice(MODELS)))
    return arrivals


def count_swaps_in_order(models: Iterable[str], room: int) -> int:
    """Return how many loads first-come-first-served needs: requests are served in their order, one after the other."""
    loaded, loads = list[str](), 0
    for model in models:
        if model in loaded:
            loaded.remove(model)
        else:
            loads += 1
            del loaded[: max(0, len(loaded) - room + 1)]
        loaded.append(model)
    return loads


async def measure_burst(session: aiohttp.ClientSession, folder: Path) -> list[Figure]:
    """Return the failures, swaps and longest wait of requests to five models with room for two."""
    arrivals, waits, failures = list_arrivals(), list[float](), list[str]()
    async with running_up(folder, *MODELS, room=2) as (up, url):
        began = time.perf_counter()

        async def ask_at(at: float, model: str) -> None:
            """Send one request at its time, and note its wait or its failure."""
            await asyncio.sleep(at - (time.perf_counter() - began))
            asked = time.perf_counter()
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                text = await response.text()
                if response.status != HTTPStatus.OK or f"{model} speaks." not in text:
                    failures.append(f"{model}: {response.status} {text}")
            waits.append(time.perf_counter() - asked)

        await asyncio.gather(*(ask_at(at, model) for at, model in arrivals))
        swaps = (up.state / "up.log").read_text().count("model_loads")
    print(*failures[:3], sep="\n")
    in_order = count_swaps_in_order((model for _, model in arrivals), 2)
    return [
        Figure("burst: requests that fail", len(failures), None, 0, ""),
        Figure("burst: loads (floor: a third of in order)", swaps, in_order / 3, in_order / 3, ""),
        Figure("burst: longest request", max(waits), None, WAIT_SECONDS, "s"),
        Figure("burst: median request", statistics.median(waits), None, None, "s"),
    ]


async def measure_rest(session: aiohttp.ClientSession, folder: Path) -> list[Figure]:
    """Return the time in which an edit takes effect, and what an instance takes that has nothing loaded."""
    edits = []
    async with running_up(folder, "one", room=2) as (up, url):
        for number in range(ROUNDS):
            name = f"edit-{number}"
            began = time.perf_counter()
            write_models(folder, "one", name)
            await eventually(functools.partial(_is_listed, session, url, name))
            edits.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(2)
        processes = [psutil.Process(pid) for pid in (up.process.pid, find_proxy(up.state))]
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        await asyncio.sleep(IDLE_SECONDS)
        core_percent = 100 * (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / IDLE_SECONDS
        own = dict(zip(_FLOORS, (process.memory_info().rss / 2**20 for process in processes), strict=True))
    floors = {name: measure_interpreter(libraries) for name, libraries in _FLOORS.items()}
    return [
        Figure("edited file to effect", statistics.median(edits), None, EDIT_MILLISECONDS, "ms"),
        Figure("nothing loaded: memory", sum(own.values()), sum(floors.values()), IDLE_MIB, "MiB"),
        *(Figure(f"  {name}", own[name], floors[name], None, "MiB") for name in own),
        Figure("nothing loaded: of a core", core_percent, None, IDLE_CORE_PERCENT, "%"),
    ]


async def _is_listed(session: aiohttp.ClientSession, url: str, name: str) -> bool:
    """Return whether a model is in the list of models."""
    async with session.get(f"{url}/v1/models") as response:
        return name in await response.text()


def measure_interpreter(libraries: str) -> float:
    """Return the MiB that an interpreter takes which has imported `libraries` and does nothing."""
    program = f"import {libraries}, psutil; print(psutil.Process().memory_info().rss / 2**20)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)


async def measure() -> list[Figure]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as name:
        async with aiohttp.ClientSession(timeout=CALL, connector=aiohttp.TCPConnector(limit=0)) as session:
            figures = []
            for part in (measure_loads, measure_burst, measure_rest):
                folder = Path(name) / part.__name__
                folder.mkdir()
                figures += await part(session, folder)
            return figures


def main() -> None:
    """Measure, and print the figures."""
    load = os.getloadavg()[0]
    figures = asyncio.run(measure())
    print_figures(f"one machine: medians of {ROUNDS}, seed {SEED}, load {load:.1f} before", figures)


if __name__ == "__main__":
    main()
