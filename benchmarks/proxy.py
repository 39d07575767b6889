"""What the proxy costs: beside a call straight to the engine, and beside the least that an aiohttp proxy can do.

Streams run at the pace of a model on a Mac. Each event carries the time at which the engine sent it, on the one clock
of this machine; the time to the first token includes the request and everything between. The ways take turns, so that
whatever else the machine does meets all of them.
"""

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from msgspec import structs

from benchmarks.parts.report import Figure, show
from benchmarks.parts.stream_engine import PAUSE_SECONDS
from devices import limits
from gateway.proxy.config import Backend, ProxyConfig, ProxyState, ServiceListener
from metal_agent import spawn
from metal_agent.proxy import Proxy

STREAMS: Final = 32
TOKENS: Final = 10
ROUNDS: Final = 6
"""Of each way, taking turns; each stream asks `PER_ROUND` times in one."""
PER_ROUND: Final = 4
IDLE_STREAMS: Final = 1000
KILLS: Final = 5
MIB: Final = 2**20
TOKEN: Final = "benchmark"  # noqa: S105 - of a service that lives for a minute


class Running:
    """The proxy as an agent runs it, which tells it its configuration again after each of its lives."""

    def __init__(self, folder: Path) -> None:
        self.proxy = Proxy(folder, self._changed)
        self.config = ProxyConfig()
        self.answers = asyncio.Event()
        self._told: set[asyncio.Task[ProxyState]] = set()

    async def configure(self, config: ProxyConfig) -> int:
        """Make it serve `config`; returns the first service's port."""
        self.config = config
        return (await self.proxy.client.configure(config)).services[0].port

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.proxy.process  # noqa: S101 - it answers
        return self.proxy.process.pid

    def _changed(self) -> None:
        if self.proxy.answers:
            self.answers.set()
        if self.proxy.answers and self.config.services:
            task = asyncio.create_task(self.proxy.client.configure(self.config))
            self._told.add(task)
            task.add_done_callback(self._told.discard)


@asynccontextmanager
async def proxy() -> AsyncIterator[Running]:
    """Run the proxy until the context ends."""
    with tempfile.TemporaryDirectory() as name:
        running = Running(Path(name))
        task = asyncio.create_task(running.proxy.run())
        try:
            await running.answers.wait()
            yield running
        finally:
            task.cancel()
            await asyncio.wait([task])
            await spawn.kill_strays(Path(name), ())


class Way(NamedTuple):
    """One way to the engine, and what was measured on it, in milliseconds."""

    name: str
    port: int
    first_token_ms: list[float]
    token_ms: list[float]


@contextmanager
def helper(module: str, *arguments: str) -> Iterator[int]:
    """Run a program of this package until the context ends; yields the port that it prints."""
    command = [sys.executable, "-m", f"benchmarks.parts.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdin  # noqa: S101, PT018 - both are pipes
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def config(engine: int, concurrency: int) -> ProxyConfig:
    """One service in front of the engine."""
    backend = Backend("engine", f"http://127.0.0.1:{engine}", concurrency=concurrency)
    return ProxyConfig((ServiceListener("bench/tiny", "127.0.0.1", 0, TOKEN, (backend,)),))


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, tokens: int, idle: bool = False
) -> AsyncIterator[int]:
    """Ask for a stream on an open connection; yields for each token the time at which it was sent, in nanoseconds."""
    body = json.dumps({"model": "tiny", "stream": True, "max_tokens": tokens, "idle": idle}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    while True:
        line = await reader.readline()
        if line.startswith(b"data: [DONE]"):
            break
        if b'"content":"' in line:
            yield int(line.partition(b'"content":"')[2].partition(b'"')[0])
        if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(line.decode())
    await reader.readuntil(b"0\r\n\r\n")


async def stream(way: Way) -> None:
    """Have one client ask a few times, and note how long it waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
    for _ in range(PER_ROUND):
        await asyncio.sleep(random.random() * TOKENS * PAUSE_SECONDS)  # noqa: S311 - so that they do not march in step
        asked = time.monotonic_ns()
        first = True
        async for sent in ask(reader, writer, tokens=TOKENS):
            now = time.monotonic_ns()
            if first:
                way.first_token_ms.append((now - asked) / 1e6)
            else:
                way.token_ms.append((now - sent) / 1e6)
            first = False
    writer.close()
    await writer.wait_closed()


async def compare() -> list[Figure]:
    """Have 32 streams on each way, in turns."""
    with ExitStack() as stack:
        engine = stack.enter_context(helper("stream_engine"))
        bare = stack.enter_context(helper("pass_through", f"http://127.0.0.1:{engine}"))
        async with proxy() as running:
            port = await running.configure(config(engine, STREAMS))
            ways = [Way("direct", engine, [], []), Way("bare", bare, [], []), Way("ours", port, [], [])]
            for _ in range(ROUNDS):
                for way in ways:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(STREAMS):
                            group.create_task(stream(way))
    direct, least, ours = ways
    figures = []
    for name, of in (("to the first token", attrgetter("first_token_ms")), ("each token", attrgetter("token_ms"))):
        base, floor, value = (statistics.median(of(way)) for way in (direct, least, ours))
        figures.append(Figure(f"{name}, p50 over a direct call", value - base, floor - base, 0.5, "ms"))
    return figures


async def idle() -> Figure:
    """Hold open streams, after their first token."""
    with helper("stream_engine") as engine:
        async with proxy() as running:
            empty = psutil.Process(running.pid).memory_info().rss
            port = await running.configure(config(engine, IDLE_STREAMS))
            streams = []
            for _ in range(IDLE_STREAMS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                events = ask(reader, writer, tokens=1, idle=True)
                await anext(events)
                streams.append((events, writer))
            held = psutil.Process(running.pid).memory_info().rss
            for _, writer in streams:
                writer.close()
    return Figure(f"{IDLE_STREAMS} idle streams, resident (floor: none)", held / MIB, empty / MIB, 100, "MiB")


async def killed() -> Figure:
    """Kill the proxy, and ask until somebody answers."""
    with helper("stream_engine") as engine, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        async with proxy() as running:
            fixed = config(engine, STREAMS)
            await running.configure(structs.replace(fixed, services=(structs.replace(fixed.services[0], port=port),)))
            seconds = []
            for _ in range(KILLS):
                os.kill(running.pid, signal.SIGKILL)
                began = time.monotonic()
                while not await answers(port):  # noqa: ASYNC110 - a client asks, and hears of nothing
                    await asyncio.sleep(0.005)
                seconds.append(time.monotonic() - began)
    start = await asyncio.to_thread(importing)
    return Figure(
        "killed, until it serves again, median (floor: its imports)", statistics.median(seconds), start, 1, "s"
    )


async def answers(port: int) -> bool:
    """Ask for one token."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        tokens = [token async for token in ask(reader, writer, tokens=1)]
        writer.close()
        await writer.wait_closed()
    except OSError:
        return False
    return bool(tokens)


def importing() -> float:
    """Measure how long Python takes to load what the proxy is made of."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import cli.main, gateway.proxy.control"], check=True)
    return time.monotonic() - began


async def main() -> None:
    """Measure everything."""
    show("proxy", [*await compare(), await idle(), await killed()])


if __name__ == "__main__":
    limits.raise_descriptors()
    asyncio.run(main())
