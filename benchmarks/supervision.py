"""What supervision costs: from a MetalProcess to Ready, after a crash, over an agent's death, and at rest.

All of it with the real API server, agent, proxy and llama.cpp's server, in a sandbox as tests have it. The floor of a
start is the same server, started by hand and asked all the time until it has generated a token.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import psutil

from benchmarks.parts.report import Figure, show
from crds.meta import HOSTS_NAMESPACE
from crds.metalprocess import MetalProcessSpec
from devices.sockets import LOOPBACK, loopback_port
from kube import credentials
from kube.client import Client, Obj, connect
from kube.resources import ENDPOINT_SLICES, METAL_PROCESSES, SECRETS, Resource
from kube.store import Store
from kube.watch import reflect
from metal_agent import engine
from tests import tiny_gguf
from tests.background import running
from tests.cluster.main_job.cluster import Customer
from tests.controlplane import members, sandbox
from tests.controlplane.binaries import ensure
from tests.controlplane.members import MetalHost
from tests.controlplane.network import Network
from tests.controlplane.plane import ControlPlane
from tests.eventually import eventually

NAMESPACE: Final = "default"
TOKEN: Final = "benchmark"  # noqa: S105 - of a service that lives for a minute
ROUNDS: Final = 7
AT_REST: Final = 20
REST_SECONDS: Final = 60.0
MIB: Final = 2**20
GIB: Final = 2**30
BODY: Final = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class Bench:
    """One host with its agent, and what the API says, as it says it."""

    def __init__(self, client: Client, host: MetalHost, model: Path, http: aiohttp.ClientSession) -> None:
        self.client = client
        self.host = host
        self.model = model
        self.http = http
        self.store = Store()
        self._changed = asyncio.Event()
        self.store.subscribe(lambda *_: self._changed.set())

    def spec(self, service: str) -> Obj:
        """What each process is."""
        return {
            "hostName": self.host.name,
            "serviceName": service,
            "modelName": "tiny",
            "runtime": "llama.cpp",
            "artifact": {"source": f"file://{self.model}"},
            "memoryBytes": GIB,
            "tokenSecret": "token",
            "contextLength": 30000,
            "parallel": 2,
            "extraArgs": ["-t", "1"],
        }

    async def create(self, service: str) -> None:
        """Bind one more process to the host."""
        metadata = {"namespace": NAMESPACE, "name": service}
        await self.client.create(METAL_PROCESSES, {"metadata": metadata, "spec": self.spec(service)})

    async def delete(self, service: str) -> None:
        """Take it away, and wait until nothing of it is left."""
        pid = (self.seen(METAL_PROCESSES, service) or {})["status"]["pid"]
        await self.client.delete(METAL_PROCESSES, service, NAMESPACE)
        await eventually(lambda: not psutil.pid_exists(pid))

    def seen(self, resource: Resource, name: str) -> Obj | None:
        """What was last heard of an object."""
        return self.store.get(resource, name, NAMESPACE)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what a change of the API brings."""
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def endpoint_ready(self, service: str) -> bool:
        """Whether the endpoint was last said to be ready."""
        found = self.seen(ENDPOINT_SLICES, f"{service}.{self.host.name}")
        return bool(found and found["endpoints"][0]["conditions"]["ready"])

    def url(self, service: str) -> str:
        """Where the service is."""
        found: Any = self.seen(ENDPOINT_SLICES, f"{service}.{self.host.name}")
        return f"http://{self.host.address}:{found['ports'][0]['port']}"

    def pid(self, service: str) -> int:
        """The engine's process."""
        found: Any = self.seen(METAL_PROCESSES, service)
        return int(found["status"]["pid"])

    async def answers(self, url: str) -> bool:
        """Whether a token comes."""
        try:
            async with self.http.post(f"{url}/v1/chat/completions", json=BODY) as response:
                return response.status == 200  # noqa: PLR2004 - OK
        except aiohttp.ClientError:
            return False


async def by_hand(bench: Bench) -> float:
    """Seconds from the start of the server to its first token, for who does nothing but wait for it."""
    spec = msgspec.convert(bench.spec("hand"), MetalProcessSpec)
    start = time.monotonic()
    server = await asyncio.create_subprocess_exec(
        *engine.argv(spec, bench.model), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not (port := loopback_port(server.pid)):  # noqa: ASYNC110 - the floor is who waits actively
            await asyncio.sleep(0.02)
        while not await bench.answers(f"http://{LOOPBACK}:{port}"):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        return time.monotonic() - start
    finally:
        server.kill()
        await server.wait()


async def to_ready(bench: Bench, service: str) -> float:
    """Seconds from the MetalProcess to its phase Ready, both as the API tells."""
    start = time.monotonic()
    await bench.create(service)
    await bench.until(lambda: _ready(bench.seen(METAL_PROCESSES, service) or {}))
    took = time.monotonic() - start
    await bench.until(lambda: bench.endpoint_ready(service))
    return took


async def crash(bench: Bench, service: str) -> tuple[float, float]:
    """Seconds from the engine's death until its endpoint is not ready, and until it serves again."""
    url = bench.url(service)
    os.kill(bench.pid(service), signal.SIGKILL)
    start = time.monotonic()
    await bench.until(lambda: not bench.endpoint_ready(service))
    withdrawn = time.monotonic() - start
    await bench.until(lambda: bench.endpoint_ready(service))
    while not await bench.answers(url):  # noqa: ASYNC110 - measured
        await asyncio.sleep(0.005)
    return withdrawn, time.monotonic() - start


async def over_an_agents_death(bench: Bench, service: str) -> tuple[int, int]:
    """Failed requests and broken streams while agents die and start, and the number of requests."""
    customer = Customer(bench.url(service), service, TOKEN, pause_seconds=0.02)
    long = BODY | {"stream": True, "max_tokens": 29000}
    url = f"{bench.url(service)}/v1/chat/completions"
    async with running(customer.run()), bench.http.post(url, json=long) as stream:
        for _ in range(3):
            await stream.content.readline()
            before = customer.answers
            await bench.host.agent.kill()
            await eventually(lambda before=before: customer.answers > before + 10)  # type: ignore[misc]  # bound now
            bench.host.agent.start()
            await eventually(lambda: '"regained"' in bench.host.agent.log.read_text().rpartition('"agent starts"')[2])
        broken = not await stream.content.readline()
    return len(customer.failures) + broken, customer.answers


async def at_rest(bench: Bench) -> tuple[float, float]:
    """Share of a core, in percent, that agent and proxy use with many processes, and the agent's resident MiB."""
    await asyncio.gather(*(bench.create(f"rest-{number}") for number in range(AT_REST - 1)))
    await bench.until(lambda: sum(_ready(each) for each in bench.store.list(METAL_PROCESSES, NAMESPACE)) == AT_REST)
    ours = [psutil.Process(bench.host.agent.pid), _proxy(bench)]
    start, before = time.monotonic(), sum(map(_cpu_seconds, ours))
    await asyncio.sleep(REST_SECONDS)
    used = sum(map(_cpu_seconds, ours)) - before
    return 100 * used / (time.monotonic() - start), ours[0].memory_info().rss / MIB


def _ready(process: Obj) -> bool:
    return (process.get("status") or {}).get("phase") == "Ready"


def _proxy(bench: Bench) -> psutil.Process:
    socket = str(bench.host.state_folder / "proxy")
    return next(
        each
        for each in psutil.process_iter(["cmdline"])
        if "proxy" in each.info["cmdline"] and any(part.startswith(socket) for part in each.info["cmdline"])
    )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(bench: Bench) -> list[Figure]:
    """Take all figures."""
    hand, agent = [], []
    for number in range(ROUNDS):
        hand.append(await by_hand(bench))
        agent.append(await to_ready(bench, f"start-{number}"))
        await bench.delete(f"start-{number}")
    load = statistics.median(hand)
    await to_ready(bench, "chat")
    withdrawn, again = [], []
    for _ in range(3):
        took = await crash(bench, "chat")
        withdrawn.append(took[0])
        again.append(took[1])
    await bench.delete("chat")
    await to_ready(bench, "chat")
    failed, requests = await over_an_agents_death(bench, "chat")
    percent, resident_mib = await at_rest(bench)
    over = statistics.median(agent) - load
    return [
        Figure("MetalProcess to Ready (median)", 1000 * statistics.median(agent), 1000 * load, 1000 * load + 300, "ms"),
        Figure("of that, over the floor", 1000 * over, None, 300, "ms"),
        Figure("engine killed: endpoint not ready (worst)", 1000 * max(withdrawn), None, 200, "ms"),
        Figure("engine killed once: serving again", again[0], load, load + 2, "s"),
        Figure(f"agent killed 3 times: failed of {requests} requests and a stream", failed, None, 0, ""),
        Figure(f"agent and proxy at rest, {AT_REST} processes", percent, None, 1, "% of a core"),
        Figure(f"agent resident, {AT_REST} processes", resident_mib, None, 80, "MiB"),
    ]


async def run(folder: Path) -> None:
    """Start everything, measure, print."""
    network, plane = Network(), ControlPlane(ensure(), folder / "plane")
    await network.start()
    try:
        await plane.start()
        await members.install(plane)
        host = await members.metal_host(plane, network, "studio-1", folder, f"--memory-budget={64 * GIB}")
        model = host.file_root / "tiny.gguf"
        tiny_gguf.write(model, loop=True, n_ctx=65536)
        host.agent.start()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            connect(credentials.load(plane.kubeconfig())) as client,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            data = {f"{NAMESPACE}_token_token": b64encode(TOKEN.encode()).decode()}
            secret = {"metadata": {"namespace": HOSTS_NAMESPACE, "name": host.name}, "data": data}
            await client.apply(SECRETS, secret, field_manager="pomona-controller")
            bench = Bench(client, host, model, http)
            async with running(
                *(reflect(client, bench.store, kind, NAMESPACE) for kind in (METAL_PROCESSES, ENDPOINT_SLICES))
            ):
                show("supervision", await measure(bench))
        await host.host.close()
        await host.agent.kill()
    finally:
        await plane.stop()


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.supervision"]))
    asyncio.run(run(Path(tempfile.mkdtemp(prefix="bench-"))))
