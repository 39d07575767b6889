"""The time that the gateway takes to find another endpoint for a request whose own one is gone.

An endpoint whose process has ended refuses connections; one whose machine has lost its network answers nothing, and its
packets are lost. `benchmarks.gateway` runs this with the others, in a sandbox with namespaces of its own for networks.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.clients.agent_requests import list_short_bodies
from benchmarks.clients.http_load import TOKEN
from benchmarks.report import Figure
from benchmarks.servers.cluster_api import ClusterApi
from benchmarks.servers.gateways import on_processor, run_gateway
from benchmarks.servers.ways import Server, run_server
from tests.controlplane.network import Host, Network

ROUNDS: Final = 3
AT_ONCE: Final = 64
"""Half of these are at the endpoint that falls silent."""
_SECONDS: Final = 60


class FaultClient:
    """A client that sends a short request of each conversation, so that each endpoint gets some."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def ask_in_turn(self) -> float:
        """Send one request after the other, and return the milliseconds of the slowest. Raises unless all succeed."""
        return max([await self._ask(body) for body in list_short_bodies()])

    async def ask_at_once(self) -> float:
        """Send some requests at once, and return the milliseconds of the slowest. Raises unless all succeed."""
        return max(await asyncio.gather(*(self._ask(body) for body in list_short_bodies()[:AT_ONCE])))

    async def _ask(self, body: bytes) -> float:
        began = time.monotonic()
        async with self._session.post(self._url, data=body) as response:
            text = await response.read()
            if response.status != 200:  # noqa: PLR2004 - OK
                raise RuntimeError(f"the gateway answered {response.status}: {text.decode()}")
        return 1000 * (time.monotonic() - began)


@asynccontextmanager
async def run_faulty_cluster(urls: Sequence[str]) -> AsyncIterator[FaultClient]:
    """Run a gateway in front of a service with these endpoints until the context ends."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = ClusterApi()
        api.serve(*urls)
        api.put_key()
        api.put_shards()
        api_url = await stack.enter_async_context(api.run())
        gateway = await stack.enter_async_context(run_gateway(folder, api_url))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
        yield FaultClient(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", session)


async def measure_refusal() -> list[Figure]:
    """End the process of one of two endpoints, and measure the requests that follow."""
    before, after = [], []
    for _ in range(ROUNDS):
        with on_processor(1), run_server("stream_engine") as stays, run_server("stream_engine") as ends:
            urls = [f"http://127.0.0.1:{engine.port}" for engine in (stays, ends)]
            async with run_faulty_cluster(urls) as client:
                await client.ask_in_turn()
                before.append(await client.ask_in_turn())
                ends.process.kill()
                ends.process.wait()
                after.append(await client.ask_in_turn())
    name = "an endpoint refuses: slowest of 64 requests in turn (floor: both work)"
    return [Figure(name, statistics.median(after), statistics.median(before), 50, "ms")]


async def measure_silence() -> list[Figure]:
    """Cut the network of one of two endpoints, and measure the requests that follow, in two rounds."""
    network = Network()
    await network.start()
    hosts = [await network.add_host(f"studio-{number}") for number in range(2)]
    before, after, later = [], [], []
    try:
        with on_processor(1), _run_on(hosts[0]) as stays, _run_on(hosts[1]) as silent:
            urls = [f"http://{host.address}:{engine.port}" for host, engine in zip(hosts, (stays, silent), strict=True)]
            for _ in range(ROUNDS):
                async with run_faulty_cluster(urls) as client:
                    await client.ask_at_once()
                    before.append(await client.ask_at_once())
                    await hosts[1].cut()
                    after.append(await client.ask_at_once() / 1000)
                    later.append(await client.ask_at_once())
                await hosts[1].restore()
    finally:
        for host in hosts:
            await host.close()
    return [
        Figure(
            f"an endpoint falls silent: slowest of {AT_ONCE} requests at once", statistics.median(after), None, 2, "s"
        ),
        Figure(
            f"an endpoint is silent: slowest of the next {AT_ONCE} at once (floor: both work)",
            statistics.median(later),
            statistics.median(before),
            50 + statistics.median(before),
            "ms",
        ),
    ]


def _run_on(host: Host) -> AbstractContextManager[Server]:
    return run_server("stream_engine", host.address, prefix=host.exec)
