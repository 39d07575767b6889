"""The gateway beside the least that a proxy does, and beside the gateways of others, in one run.

The server under test has the first processor, with all of its threads; the engines and the clients have the second. So
other load on the machine changes what waits, but hardly what a request costs in processor time, of which the figures
are made; servers take turns for the same reason. Each figure is the median of three rounds. All servers check a key,
choose between two engines, and count for metrics; Pomona's also holds limits and writes a log line for each request.

`python -m benchmarks.gateway short conversations` measures only these parts.
"""

import asyncio
import resource
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.clients.agent_requests import list_agent_bodies, list_short_bodies
from benchmarks.clients.http_load import TOKEN, TokenStream, chat_request, open_stream, send_short_requests
from benchmarks.gateway_catalog import measure_catalog
from benchmarks.gateway_conversations import measure_conversations
from benchmarks.gateway_faults import measure_refusal, measure_silence
from benchmarks.proxy import measure_way
from benchmarks.report import Figure, print_figures
from benchmarks.servers.cluster_api import ClusterApi
from benchmarks.servers.gateways import (
    PEERS,
    GatewayMissingError,
    GatewayServer,
    install_peer,
    on_processor,
    run_gateway,
    run_peer,
)
from benchmarks.servers.ways import Way, run_server
from gateway.http.limits import connection_caps
from tests.controlplane import pomona_image, sandbox

CONNECTIONS: Final = 32
SECONDS: Final = 2.0
ROUNDS: Final = 3
ENGINES: Final = 2
STREAMS: Final = 32
OPEN_STREAMS: Final = 10_000
OPENED_AT_ONCE: Final = 100
FLOOR: Final = "raw proxy"
OURS: Final = "Pomona"
MIB: Final = 2**20
_SLACK: Final = 64
"""Connections that are left free, for those that ask whether the gateway is ready."""


@asynccontextmanager
async def run_servers(peers: Sequence[str] = ()) -> AsyncIterator[Mapping[str, GatewayServer]]:
    """Run two engines, the minimal proxy, the gateway and those of others until the context ends; return all by name.

    The engine of the minimal proxy is among them, as `engine`.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with on_processor(1):
            engines = [stack.enter_context(run_server("stream_engine")) for _ in range(ENGINES)]
        with on_processor(0):
            bare = stack.enter_context(run_server("raw_proxy", str(engines[0].port), TOKEN))
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        api = ClusterApi()
        api.serve(*urls)
        api.put_key()
        api.put_shards()
        api_url = await stack.enter_async_context(api.run())
        servers = {"engine": GatewayServer(engines[0].port, engines[0].pid), FLOOR: GatewayServer(bare.port, bare.pid)}
        servers[OURS] = await stack.enter_async_context(run_gateway(folder, api_url))
        for name in peers:
            try:
                servers[name] = await stack.enter_async_context(run_peer(name, folder, urls))
            except GatewayMissingError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        stack.enter_context(on_processor(1))
        yield servers


async def measure_requests(kind: str, bodies: Sequence[bytes], least_part: float) -> list[Figure]:
    """Measure the requests that each server answers in a second of its processor time.

    Args:
        kind: their name.
        bodies: their bodies, which take turns.
        least_part: the goal, as a part of what the minimal proxy does.
    """
    requests = [chat_request(body) for body in bodies]
    async with run_servers(list(PEERS)) as servers:
        tested = {name: server for name, server in servers.items() if name != "engine"}
        speeds: dict[str, list[float]] = {name: [] for name in tested}
        for _ in range(1 + ROUNDS):
            for name, server in tested.items():
                began = server.processor_seconds()
                count = await send_short_requests(server.port, CONNECTIONS, SECONDS, requests)
                speeds[name].append(count / (server.processor_seconds() - began))
    medians = {name: statistics.median(values[1:]) for name, values in speeds.items()}  # the first one warms up
    floor, ours = medians.pop(FLOOR), medians.pop(OURS)
    text = f"{kind} in a second of one core"
    figures = [Figure(f"{text}: {OURS}", ours, floor, least_part * floor, "", at_least=True)]
    for name, speed in medians.items():
        figures.append(Figure(f"{text}: {name}", speed, floor, None, ""))
        goal = PEERS[name].goal
        figures.append(Figure(f"  {OURS} to {name}", ours / speed, None, goal, "x", at_least=True))
    return figures


async def measure_streams() -> list[Figure]:
    """Measure the first tokens of streams over a direct call."""
    async with run_servers() as servers:
        ways = [Way(servers[name].port, servers[name].pid, [], []) for name in ("engine", FLOOR, OURS)]
        for round_ in range(2 * ROUNDS):
            # There and back, so that a drift of the machine's speed adds the same to each way.
            for way in reversed(ways) if round_ % 2 else ways:
                await asyncio.gather(*(measure_way(way) for _ in range(STREAMS)))
    figures = []
    for percentile, factor in ((50, 1.8), (99, None)):
        base, floor, ours = (statistics.quantiles(way.first_token_ms, n=100)[percentile - 1] for way in ways)
        goal = factor and factor * (floor - base)
        name = f"{STREAMS} streams, to the first token, p{percentile} over a direct call"
        figures.append(Figure(name, ours - base, floor - base, goal, "ms"))
    return figures


async def measure_memory() -> list[Figure]:
    """Measure the resident memory with many open streams: as many as the system allows a process to have files."""
    count = min(OPEN_STREAMS, connection_caps(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).total - _SLACK)
    resident: list[float] = []
    async with run_servers() as servers:
        for server in (servers[FLOOR], servers[OURS]):
            empty = server.resident_bytes()
            streams: list[TokenStream] = []
            for begin in range(0, count, OPENED_AT_ONCE):
                numbers = range(begin, min(begin + OPENED_AT_ONCE, count))
                streams += await asyncio.gather(*(open_idle_stream(server.port, number) for number in numbers))
            resident.append((empty + (server.resident_bytes() - empty) * OPEN_STREAMS / count) / MIB)
            for stream in streams:
                stream.transport.close()
    floor, ours = resident
    name = f"{OPEN_STREAMS} open streams, resident (by {count} of them)"
    return [Figure(name, ours, floor, 400, "MiB")]


async def open_idle_stream(port: int, number: int) -> TokenStream:
    """Open a stream that is idle after its first token; clients have several addresses, as one may not have all."""
    stream = await open_stream(port, lambda _sent, _received: None, f"127.0.0.{1 + number % 4}")
    stream.request(1, idle=True)
    await asyncio.wait((stream.started, stream.done), return_when=asyncio.FIRST_COMPLETED)
    return stream


PARTS: Final[Mapping[str, Callable[[], Awaitable[list[Figure]]]]] = {
    "short": lambda: measure_requests("short requests", list_short_bodies(), 0.33),
    "agents": lambda: measure_requests("48 KB requests", list_agent_bodies(), 0.5),
    "streams": measure_streams,
    "memory": measure_memory,
    "catalog": measure_catalog,
    "refusal": measure_refusal,
    "silence": measure_silence,
    "conversations": measure_conversations,
}


async def main(parts: list[str]) -> None:
    """Measure the named parts, or all, and print their figures."""
    print_figures("gateway", [figure for part in parts or PARTS for figure in await PARTS[part]()])


if __name__ == "__main__":
    if not sandbox.inside():  # where nothing can be installed any more
        pomona_image.ensure_root()
        for peer in PEERS:
            try:
                install_peer(peer)
            except GatewayMissingError as error:
                print(error, file=sys.stderr)
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.gateway", *sys.argv[1:]]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(main(sys.argv[1:]))
