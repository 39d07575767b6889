"""The latency that the proxy adds to a token, its memory with many streams, and its restart time.

Latency is measured over a direct call to the engine; its floor is a minimal aiohttp proxy (`servers/pass_through.py`).
The floor of the memory is a proxy without a stream, and that of the restart is the imports of the proxy. Streams run
at the pace of a model on a Mac. Each event carries the time at which the engine sent it, by the one clock of this
machine; the time to the first token includes the request. The three ways take turns, so that other load on the machine
affects all of them.
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

from benchmarks.report import Figure, print_figures
from benchmarks.servers.stream_engine import PAUSE_SECONDS
from devices import limits
from gateway.proxy.config import Backend, ProxyConfig, ProxyState, ServiceListener
from metal_agent.native.process import kill_strays
from metal_agent.traffic.proxy_process import Proxy

STREAMS: Final = 32
TOKENS: Final = 10
ROUNDS: Final = 6
"""Turns of each way; in one of them each stream sends `PER_ROUND` requests."""
PER_ROUND: Final = 4
IDLE_STREAMS: Final = 1000
KILLS: Final = 5
MIB: Final = 2**20
TOKEN: Final = "benchmark"  # noqa: S105 - of a service that lives for a minute


class SupervisedProxy:
    """The proxy as an agent runs it: restarted when it ends, and configured again after each start."""

    def __init__(self, folder: Path) -> None:
        self.proxy = Proxy(folder, self._changed)
        self.config = ProxyConfig()
        self.answers = asyncio.Event()
        self._configuring: set[asyncio.Task[ProxyState]] = set()

    async def configure(self, config: ProxyConfig) -> int:
        """Configure the proxy with `config` and return the first service's port."""
        self.config = config
        return (await self.proxy.client.configure(config)).services[0].port

    @property
    def pid(self) -> int:
        """The proxy's process id."""
        assert self.proxy.process  # noqa: S101 - it answers
        return self.proxy.process.pid

    def _changed(self) -> None:
        if self.proxy.answers:
            self.answers.set()
        if self.proxy.answers and self.config.services:
            task = asyncio.create_task(self.proxy.client.configure(self.config))
            self._configuring.add(task)
            task.add_done_callback(self._configuring.discard)


@asynccontextmanager
async def run_proxy() -> AsyncIterator[SupervisedProxy]:
    """Run the proxy until the context ends."""
    with tempfile.TemporaryDirectory() as name:
        running = SupervisedProxy(Path(name))
        task = asyncio.create_task(running.proxy.run())
        try:
            await running.answers.wait()
            yield running
        finally:
            task.cancel()
            await asyncio.wait([task])
            await kill_strays(Path(name), ())


class Way(NamedTuple):
    """One way to the engine, and its latencies in milliseconds."""

    name: str
    port: int
    first_token_ms: list[float]
    token_ms: list[float]


@contextmanager
def run_server(module: str, *arguments: str) -> Iterator[int]:
    """Run one of `benchmarks.servers` until the context ends; yields its port."""
    command = [sys.executable, "-m", f"benchmarks.servers.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdin  # noqa: S101, PT018 - both are pipes
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def proxy_config(engine: int, concurrency: int) -> ProxyConfig:
    """Return a configuration with one service in front of the engine."""
    backend = Backend("engine", f"http://127.0.0.1:{engine}", concurrency=concurrency)
    return ProxyConfig((ServiceListener("bench/tiny", "127.0.0.1", 0, TOKEN, (backend,)),))


async def request_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, tokens: int, idle: bool = False
) -> AsyncIterator[int]:
    """Request a stream on an open connection; yields the time of sending of each token, in nanoseconds."""
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


async def measure_latency(way: Way) -> None:
    """Send a few requests as one client, and note the latency of each token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
    for _ in range(PER_ROUND):
        await asyncio.sleep(random.random() * TOKENS * PAUSE_SECONDS)  # noqa: S311 - so that the streams are not in step
        requested = time.monotonic_ns()
        first = True
        async for sent in request_stream(reader, writer, tokens=TOKENS):
            now = time.monotonic_ns()
            if first:
                way.first_token_ms.append((now - requested) / 1e6)
            else:
                way.token_ms.append((now - sent) / 1e6)
            first = False
    writer.close()
    await writer.wait_closed()


async def measure_added_latency() -> list[Figure]:
    """Measure 32 streams on each way, in turns."""
    with ExitStack() as stack:
        engine = stack.enter_context(run_server("stream_engine"))
        bare = stack.enter_context(run_server("pass_through", f"http://127.0.0.1:{engine}"))
        async with run_proxy() as running:
            port = await running.configure(proxy_config(engine, STREAMS))
            ways = [Way("direct", engine, [], []), Way("bare", bare, [], []), Way("ours", port, [], [])]
            for _ in range(ROUNDS):
                for way in ways:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(STREAMS):
                            group.create_task(measure_latency(way))
    direct, least, ours = ways
    figures = []
    for name, of in (("to the first token", attrgetter("first_token_ms")), ("each token", attrgetter("token_ms"))):
        base, floor, value = (statistics.median(of(way)) for way in (direct, least, ours))
        figures.append(Figure(f"{name}, p50 over a direct call", value - base, floor - base, 0.5, "ms"))
    return figures


async def measure_memory() -> Figure:
    """Measure the resident memory of the proxy with many open, idle streams."""
    with run_server("stream_engine") as engine:
        async with run_proxy() as running:
            empty = psutil.Process(running.pid).memory_info().rss
            port = await running.configure(proxy_config(engine, IDLE_STREAMS))
            streams = []
            for _ in range(IDLE_STREAMS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                events = request_stream(reader, writer, tokens=1, idle=True)
                await anext(events)
                streams.append((events, writer))
            held = psutil.Process(running.pid).memory_info().rss
            for _, writer in streams:
                writer.close()
    return Figure(f"{IDLE_STREAMS} idle streams, resident (floor: none)", held / MIB, empty / MIB, 100, "MiB")


async def measure_restart() -> Figure:
    """Kill the proxy, and send requests until one is answered."""
    with run_server("stream_engine") as engine, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        async with run_proxy() as running:
            fixed = proxy_config(engine, STREAMS)
            await running.configure(structs.replace(fixed, services=(structs.replace(fixed.services[0], port=port),)))
            seconds = []
            for _ in range(KILLS):
                os.kill(running.pid, signal.SIGKILL)
                began = time.monotonic()
                while not await is_answering(port):  # noqa: ASYNC110 - a client has no event to wait for
                    await asyncio.sleep(0.005)
                seconds.append(time.monotonic() - began)
    start = await asyncio.to_thread(measure_imports)
    return Figure(
        "killed, until it serves again, median (floor: its imports)", statistics.median(seconds), start, 1, "s"
    )


async def is_answering(port: int) -> bool:
    """Decide whether a request for one token is answered."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        tokens = [token async for token in request_stream(reader, writer, tokens=1)]
        writer.close()
        await writer.wait_closed()
    except OSError:
        return False
    return bool(tokens)


def measure_imports() -> float:
    """Return the seconds that Python takes to import the proxy."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import cli.main, gateway.proxy.control"], check=True)
    return time.monotonic() - began


async def main() -> None:
    """Measure and print all figures."""
    print_figures("proxy", [*await measure_added_latency(), await measure_memory(), await measure_restart()])


if __name__ == "__main__":
    limits.raise_descriptor_limit()
    asyncio.run(main())
