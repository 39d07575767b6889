"""The cost of the proxy: short requests, added latency, memory, restart, idle connections, large bodies.

The proxy runs as a process and is configured over its control socket, as the agent does it. The floor of speed and
latency is a minimal proxy (`servers/raw_proxy.py`) in the same run; the ways to the engine take turns, so that other
load on the machine affects all of them. The system schedules all processes, as on a host; what a request costs is
counted in seconds of the proxy's processor time, which other load changes little. Only for the gaps that a large body
makes has the proxy a processor of its own.
`python -m benchmarks.proxy short streams` measures only these.
"""

import asyncio
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from random import random
from typing import Final

import psutil
import uvloop

from benchmarks.clients.http_load import (
    UnexpectedResponseError,
    open_idle_connections,
    open_stream,
    send_body,
    send_short_requests,
)
from benchmarks.report import Figure, print_figures
from benchmarks.servers.stream_engine import PAUSE_SECONDS
from benchmarks.servers.ways import (
    Server,
    SupervisedProxy,
    Way,
    apart,
    open_ways,
    proxy_config,
    run_proxy,
    run_server,
)
from gateway.http.control_client import ControlUnreachableError
from tests.support.large_bodies import KINDS

CONNECTIONS: Final = 32
SHORT_SECONDS: Final = 2.0
STREAMS: Final = 32
TOKENS: Final = 10
ROUNDS: Final = 6
"""Turns of each way; in one of them each stream sends `PER_ROUND` requests."""
PER_ROUND: Final = 4
IDLE_STREAMS: Final = 1000
KILLS: Final = 5
FEW_IDLE_CONNECTIONS: Final = 256
MANY_IDLE_CONNECTIONS: Final = 10_000
DESCRIPTORS: Final = 10_240
WATCHED_STREAMS: Final = 16
WATCHED_TOKENS: Final = 60
BODY_BYTES: Final = (64 << 20) - 4096
MIB: Final = 2**20


async def measure_short_requests() -> list[Figure]:
    """Measure how many short requests the proxy answers in a second of its processor time."""
    answered, seconds, began = [0, 0], [0.0, 0.0], [0.0, 0.0]
    async with open_ways(CONNECTIONS) as ways:
        for round_ in range(ROUNDS):
            for number, way in enumerate((ways.bare, ways.ours)):
                began[number] = _processor_seconds(way.pid)
                count = await send_short_requests(way.port, CONNECTIONS, SHORT_SECONDS)
                if round_:  # the first one warms up
                    answered[number] += count
                    seconds[number] += _processor_seconds(way.pid) - began[number]
    floor, value = (count / spent for count, spent in zip(answered, seconds, strict=True))
    least, wall = (count / SHORT_SECONDS / (ROUNDS - 1) for count in answered)
    return [
        Figure("short requests in a second of one core", value, floor, 12_000, "", at_least=True),
        Figure("processor time of a short request", 1e6 / value, 1e6 / floor, None, "us"),
        Figure("short requests in a second on this machine now", wall, least, None, ""),
    ]


def _processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure_way(way: Way) -> None:
    """Send a few requests for streams as one client, and note the latency of each token."""
    requested = 0

    def note(sent: int, received: int) -> None:
        nonlocal requested
        if requested:
            way.first_token_ms.append((received - requested) / 1e6)
            requested = 0
        else:
            way.token_ms.append((received - sent) / 1e6)

    stream = await open_stream(way.port, note)
    for _ in range(PER_ROUND):
        await asyncio.sleep(random() * TOKENS * PAUSE_SECONDS)  # noqa: S311 - so that the streams are not in step
        requested = time.monotonic_ns()
        stream.request(TOKENS)
        await stream.done
    stream.transport.close()


async def measure_added_latency() -> list[Figure]:
    """Measure 32 streams on each way, in turns."""
    async with open_ways(STREAMS) as ways:
        for round_ in range(ROUNDS):
            # There and back, so that a drift of the machine's speed adds the same to each way.
            for way in ways[:3] if round_ % 2 else ways[2::-1]:
                await asyncio.gather(*(measure_way(way) for _ in range(STREAMS)))
    figures = []
    for name, of, goal in (
        ("to the first token", attrgetter("first_token_ms"), 0.3),
        ("each token", attrgetter("token_ms"), 0.1),
    ):
        for percentile, limit in ((50, goal), (99, None)):
            base, floor, value = (statistics.quantiles(of(way), n=100)[percentile - 1] for way in ways[:3])
            text = f"{STREAMS} streams, {name}, p{percentile} over a direct call"
            figures.append(Figure(text, value - base, floor - base, limit, "ms"))
    return figures


async def measure_memory() -> list[Figure]:
    """Measure the resident memory of the proxies with many open, idle streams."""
    held = []
    async with open_ways(IDLE_STREAMS) as ways:
        for way in (ways.bare, ways.ours):
            streams = [await open_stream(way.port, lambda _sent, _received: None) for _ in range(IDLE_STREAMS)]
            for stream in streams:
                stream.request(1, idle=True)
                await asyncio.wait((stream.started, stream.done), return_when=asyncio.FIRST_COMPLETED)
            held.append(psutil.Process(way.pid).memory_info().rss / MIB)
            for stream in streams:
                stream.transport.close()
    floor, value = held
    return [Figure(f"{IDLE_STREAMS} idle streams, resident", value, floor, 60, "MiB")]


async def measure_restart() -> list[Figure]:
    """Kill a proxy, and send requests until one is answered; some times, each under a new agent, which backs off."""
    seconds = []
    with run_server("stream_engine") as engine:
        for _ in range(KILLS):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            async with run_proxy() as running:
                await running.configure(proxy_config(engine.port, STREAMS, port))
                os.kill(running.pid, signal.SIGKILL)
                began = time.monotonic()
                while not await is_answering(port):  # noqa: ASYNC110 - a client has no event to wait for
                    await asyncio.sleep(0.005)
                seconds.append(time.monotonic() - began)
    floor = await asyncio.to_thread(measure_imports)
    name = "killed, until it serves again, median (floor: its imports)"
    return [Figure(name, statistics.median(seconds), floor, 0.6, "s")]


async def is_answering(port: int) -> bool:
    """Decide whether a request for one token is answered."""
    try:
        stream = await open_stream(port, lambda _sent, _received: None)
        stream.request(1)
        await stream.done
        stream.transport.close()
    except (OSError, UnexpectedResponseError):
        return False
    return True


def measure_imports() -> float:
    """Return the seconds that Python takes to import the proxy."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import cli.main, cli.proxy"], check=True)
    return time.monotonic() - began


async def measure_idle_connections(count: int) -> list[Figure]:
    """Open idle connections while streams run; count streams that end, and time the control socket."""
    async with open_ways(WATCHED_STREAMS) as ways:
        streams = [await open_stream(ways.ours.port, lambda _sent, _received: None) for _ in range(WATCHED_STREAMS)]
        for stream in streams:
            stream.request(WATCHED_TOKENS)
        streaming = asyncio.gather(*(stream.done for stream in streams), return_exceptions=True)
        before = [await measure_control_delay(ways.proxy) for _ in range(20)]
        # In a thread: ten thousand connections in this loop would delay it, and not the proxy.
        opening = asyncio.create_task(asyncio.to_thread(open_idle_connections, ways.ours.port, count))
        during = []
        while not streaming.done():
            during.append(await measure_control_delay(ways.proxy))
        ended = sum(isinstance(result, BaseException) for result in await streaming)
        for connection in await opening:
            connection.close()
    name = f"{count} idle connections: longest delay of the control socket (floor: without)"
    return [
        Figure(f"{count} idle connections: streams that end, of {WATCHED_STREAMS}", ended, None, 0, ""),
        Figure(name, max(during), max(before), 100, "ms"),
    ]


async def measure_control_delay(proxy: SupervisedProxy) -> float:
    """Ask the proxy for its state, and return the milliseconds until it answers."""
    await asyncio.sleep(0.01)
    began = time.monotonic()
    with suppress(ControlUnreachableError):
        await proxy.proxy.client.state()
    return 1000 * (time.monotonic() - began)


async def measure_bodies() -> list[Figure]:
    """Send one large body of each kind; measure the longest gap of the proxy's event loop, and its memory."""
    gaps: dict[str, tuple[float, float]] = {}
    resident: list[float] = []
    with ExitStack() as stack:
        engine = stack.enter_context(run_server("stream_engine"))
        proxy = stack.enter_context(run_server("timed_proxy", str(engine.port), str(STREAMS)))
        stack.enter_context(apart(proxy, engine))
        empty = psutil.Process(proxy.pid).memory_info().rss / MIB
        await asyncio.sleep(0.5)
        still = read_gaps(proxy)
        for kind, make in KINDS.items():
            body = make(BODY_BYTES)
            sending = asyncio.create_task(asyncio.to_thread(send_body, proxy.port, body))
            resident.append(await measure_memory_of(proxy.pid, sending))
            gaps[kind] = read_gaps(proxy)
            clock, processor = gaps[kind]
            print(
                f"{kind}: status {sending.result()}, gap {processor:.1f} ms of work, {clock:.1f} ms by the clock,"
                f" {resident[-1]:.0f} MiB"
            )
    size = f"{BODY_BYTES / MIB:.0f} MiB body"
    by_clock, by_work = (max(gaps, key=lambda kind: gaps[kind][measure]) for measure in (0, 1))
    return [
        Figure(
            f"{size}: longest gap of the loop, work ({by_work}; floor: none sent)", gaps[by_work][1], still[1], 20, "ms"
        ),
        Figure(f"{size}: longest gap of the loop, clock ({by_clock})", gaps[by_clock][0], still[0], 20, "ms"),
        Figure(
            f"{size}: memory at most, over none", max(resident) - empty, BODY_BYTES / MIB, 3 * BODY_BYTES / MIB, "MiB"
        ),
    ]


def read_gaps(proxy: Server) -> tuple[float, float]:
    """Return the longest gap of the loop since the last call, in ms: by the clock, and in processor time."""
    clock, processor = map(float, proxy.ask().split())
    return clock, processor


async def measure_memory_of(pid: int, until: asyncio.Task[object]) -> float:
    """Return the most resident memory of a process, in MiB, until the task has ended."""
    process = psutil.Process(pid)
    most = 0.0
    while not until.done():
        most = max(most, process.memory_info().rss / MIB)
        await asyncio.sleep(0.001)
    return most


PARTS: Final[Mapping[str, Callable[[], Awaitable[list[Figure]]]]] = {
    "short": measure_short_requests,
    "streams": measure_added_latency,
    "memory": measure_memory,
    "restart": measure_restart,
    "idle": partial(measure_idle_connections, FEW_IDLE_CONNECTIONS),
    "many": partial(measure_idle_connections, MANY_IDLE_CONNECTIONS),
    "bodies": measure_bodies,
}


async def main(parts: list[str]) -> None:
    """Measure the named parts, or all, and print their figures."""
    print_figures("proxy", [figure for part in parts or PARTS for figure in await PARTS[part]()])


if __name__ == "__main__":
    # As on a Mac: the proxy that this process starts may not have more either.
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    uvloop.run(main(sys.argv[1:]))
