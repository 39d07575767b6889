"""The gateway in a large cluster: when it is ready, its memory, and the time until one change has its effect.

`benchmarks.gateway` runs this with the others.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.clients.agent_requests import list_short_bodies
from benchmarks.clients.http_load import TOKEN
from benchmarks.report import Figure
from benchmarks.servers.cluster_api import ClusterApi
from benchmarks.servers.gateways import GatewayServer, on_processor, run_gateway
from benchmarks.servers.ways import run_server

SERVICES: Final = 2000
ENDPOINTS: Final = 10_000
LARGEST: Final = 500
"""Endpoints of one of the services; the others have four or five."""
KEYS: Final = 1000
NAMESPACES: Final = 100
ROUNDS: Final = 3
CHANGES: Final = 10
MIB: Final = 2**20


def fill_cluster(api: ClusterApi) -> None:
    """Put the services, each endpoint on a host of its own, and the keys."""
    left = ENDPOINTS
    for number in range(SERVICES):
        count = LARGEST if number == 0 else left // (SERVICES - number)
        left -= count
        urls = [
            f"http://10.{number >> 8}.{number & 255}.{1 + host % 250}:{18000 + host // 250}" for host in range(count)
        ]
        api.serve(*urls, namespace=_name_namespace(number), name=f"service-{number:04}")
    for number in range(KEYS):
        api.put_key(f"secret-{number}", namespace=_name_namespace(number), name=f"key-{number}")


async def measure_catalog() -> list[Figure]:
    """Start the gateway in a small and in a large cluster, and change one endpoint there again and again."""
    ready: list[float] = []
    resident: list[float] = []
    with on_processor(1), tempfile.TemporaryDirectory() as name, run_server("stream_engine") as engine:
        url = f"http://127.0.0.1:{engine.port}"
        small, large = ClusterApi(), ClusterApi()
        fill_cluster(large)
        for api in (small, large):
            api.serve(url)
            api.put_key()
            api.put_shards()
        async with small.run() as api_url:
            began = time.monotonic()
            async with run_gateway(Path(name), api_url) as gateway:
                least_seconds, least_mib = time.monotonic() - began, gateway.resident_bytes() / MIB
        async with large.run() as api_url:
            for _ in range(ROUNDS):
                began = time.monotonic()
                async with run_gateway(Path(name), api_url) as gateway:
                    ready.append(time.monotonic() - began)
                    effects = await measure_changes(large, gateway, url)
                    resident.append(gateway.resident_bytes() / MIB)
    size = f"{SERVICES} services, {ENDPOINTS} endpoints, {KEYS} keys"
    return [
        Figure(f"{size}: ready (floor: one service)", statistics.median(ready), least_seconds, 5, "s"),
        Figure(f"{size}: resident (floor: one service)", statistics.median(resident), least_mib, 300, "MiB"),
        Figure("of these, change of an endpoint until it counts, median", statistics.median(effects), None, 100, "ms"),
        Figure("of these, change of an endpoint until it counts, longest", max(effects), None, 100, "ms"),
    ]


async def measure_changes(api: ClusterApi, gateway: GatewayServer, url: str) -> list[float]:
    """Withdraw the endpoint of a service, and put it again; return the milliseconds until each shows in answers."""
    effects = []
    body, headers = list_short_bodies()[0], {"Authorization": f"Bearer {TOKEN}"}
    chat = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask() -> int:
            async with session.post(chat, data=body) as response:
                await response.read()
                return response.status

        await asyncio.sleep(0.5)  # until its watches are open
        for number in range(2 * CHANGES):
            is_ready = bool(number % 2)
            began = time.monotonic()
            api.put_endpoint(url, "studio-0", ready=is_ready)
            while (await ask() == 200) != is_ready:  # noqa: PLR2004, ASYNC110 - OK; a client has no event to wait for
                await asyncio.sleep(0.001)
            effects.append(1000 * (time.monotonic() - began))
    return effects


def _name_namespace(number: int) -> str:
    return f"team-{number % NAMESPACES:02}"
