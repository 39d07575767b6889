"""The cost of supervision: time from MetalProcess to Ready, time to recover from a crash, and CPU and memory at rest.

API server, agent, proxy and llama.cpp's server are the real ones, in a sandbox as in tests. The floor of a start is the
same server, started by hand and polled until it has generated a token.
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

from benchmarks.report import Figure, print_figures
from crds.meta import HOSTS_NAMESPACE
from crds.metalprocess import MetalProcessSpec
from devices.sockets import LOOPBACK, loopback_port
from kube import credentials
from kube.client import Client, Obj, connect
from kube.resources import ENDPOINT_SLICES, METAL_PROCESSES, SECRETS, Resource
from kube.store import Store
from kube.watch import Selection, reflect
from metal_agent.native import engine_command
from tests.cluster.main_job.cluster import FixedAddressClient
from tests.controlplane import members, sandbox
from tests.controlplane.binaries import ensure_binaries
from tests.controlplane.members import MetalHost
from tests.controlplane.network import Network
from tests.controlplane.plane import ControlPlane
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.host_grants import grant_host
from tests.support.tiny_models import tiny_gguf

NAMESPACE: Final = "default"
TOKEN: Final = "benchmark"  # noqa: S105 - of a service that lives for a minute
ROUNDS: Final = 7
AT_REST: Final = 20
REST_SECONDS: Final = 60.0
MIB: Final = 2**20
GIB: Final = 2**30
BODY: Final = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class Bench:
    """One host with its agent, and a store that follows the API."""

    def __init__(self, client: Client, host: MetalHost, model: Path, http: aiohttp.ClientSession) -> None:
        self.client = client
        self.host = host
        self.model = model
        self.http = http
        self.store = Store()
        self._changed = asyncio.Event()
        self.store.subscribe(lambda *_: self._changed.set())

    def spec(self, service: str) -> Obj:
        """Return the spec of each process."""
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
        process = {"metadata": metadata, "spec": self.spec(service)}
        await grant_host(self.client, self.host.name, [self.host.address], [process])
        await self.client.create(METAL_PROCESSES, process)

    async def delete(self, service: str) -> None:
        """Delete the process, and wait until its engine has ended."""
        pid = (self.get_cached(METAL_PROCESSES, service) or {})["status"]["pid"]
        await self.client.delete(METAL_PROCESSES, service, NAMESPACE)
        await eventually(lambda: not psutil.pid_exists(pid))

    def get_cached(self, resource: Resource, name: str) -> Obj | None:
        """Return an object from the store."""
        return self.store.get(resource, name, NAMESPACE)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of the store makes `condition` true."""
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def endpoint_ready(self, service: str) -> bool:
        """Return whether the endpoint of `service` is ready in the store."""
        endpoint_slice = self.get_cached(ENDPOINT_SLICES, f"{service}.{self.host.name}")
        return bool(endpoint_slice and endpoint_slice["endpoints"][0]["conditions"]["ready"])

    def url(self, service: str) -> str:
        """Return the URL of `service`."""
        endpoint_slice: Any = self.get_cached(ENDPOINT_SLICES, f"{service}.{self.host.name}")
        return f"http://{self.host.address}:{endpoint_slice['ports'][0]['port']}"

    def pid(self, service: str) -> int:
        """Return the process id of the engine of `service`."""
        process: Any = self.get_cached(METAL_PROCESSES, service)
        return int(process["status"]["pid"])

    async def is_answering(self, url: str) -> bool:
        """Decide whether a request for one token is answered."""
        try:
            async with self.http.post(f"{url}/v1/chat/completions", json=BODY) as response:
                return response.status == 200  # noqa: PLR2004 - OK
        except aiohttp.ClientError:
            return False


async def start_by_hand(bench: Bench) -> float:
    """Return the seconds from the start of the server to its first token, with nothing but polling between."""
    spec = msgspec.convert(bench.spec("hand"), MetalProcessSpec)
    key_file = bench.model.with_name("key")
    key_file.write_text(TOKEN)
    start = time.monotonic()
    server = await asyncio.create_subprocess_exec(
        *engine_command.build_argv(spec, bench.model, key_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not (port := loopback_port(server.pid)):  # noqa: ASYNC110 - the floor is to poll
            await asyncio.sleep(0.02)
        while not await bench.is_answering(f"http://{LOOPBACK}:{port}"):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        return time.monotonic() - start
    finally:
        server.kill()
        await server.wait()


async def start_supervised(bench: Bench, service: str) -> float:
    """Return the seconds from the creation of a MetalProcess to its phase Ready in the API."""
    start = time.monotonic()
    await bench.create(service)
    await bench.until(lambda: _ready(bench.get_cached(METAL_PROCESSES, service) or {}))
    took = time.monotonic() - start
    await bench.until(lambda: bench.endpoint_ready(service))
    return took


async def kill_engine(bench: Bench, service: str) -> tuple[float, float]:
    """Return the seconds from the engine's death until its endpoint is not ready, and until it serves again."""
    url = bench.url(service)
    os.kill(bench.pid(service), signal.SIGKILL)
    start = time.monotonic()
    await bench.until(lambda: not bench.endpoint_ready(service))
    withdrawn = time.monotonic() - start
    await bench.until(lambda: bench.endpoint_ready(service))
    while not await bench.is_answering(url):  # noqa: ASYNC110 - measured
        await asyncio.sleep(0.005)
    return withdrawn, time.monotonic() - start


async def restart_agent(bench: Bench, service: str) -> tuple[int, int]:
    """Kill and start agents; return the number of failed requests and broken streams, and that of all requests."""
    caller = FixedAddressClient(bench.url(service), service, TOKEN, pause_seconds=0.02)
    long = BODY | {"stream": True, "max_tokens": 29000}
    url = f"{bench.url(service)}/v1/chat/completions"
    async with running(caller.run()), bench.http.post(url, json=long) as stream:
        for _ in range(3):
            await stream.content.readline()
            before = caller.answers
            await bench.host.agent.kill()
            await eventually(lambda before=before: caller.answers > before + 10)  # type: ignore[misc]  # bound now
            bench.host.agent.start()
            await eventually(
                lambda: "contact_regained" in bench.host.agent.log.read_text().rpartition('"agent_started"')[2]
            )
        last = await stream.content.readline()
        broken = not last or b'"error"' in last
    return len(caller.failures) + broken, caller.answers


async def measure_at_rest(bench: Bench) -> tuple[float, float]:
    """Return the share of a core, in percent, of agent and proxy with many processes, and the agent's resident MiB."""
    await asyncio.gather(*(bench.create(f"rest-{number}") for number in range(AT_REST - 1)))
    await bench.until(
        lambda: sum(_ready(process) for process in bench.store.list(METAL_PROCESSES, NAMESPACE)) == AT_REST
    )
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
        process
        for process in psutil.process_iter(["cmdline"])
        if "proxy" in process.info["cmdline"] and any(part.startswith(socket) for part in process.info["cmdline"])
    )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(bench: Bench) -> list[Figure]:
    """Measure all figures."""
    hand, agent = [], []
    for number in range(ROUNDS):
        hand.append(await start_by_hand(bench))
        agent.append(await start_supervised(bench, f"start-{number}"))
        await bench.delete(f"start-{number}")
    load = statistics.median(hand)
    await start_supervised(bench, "chat")
    withdrawn, again = [], []
    for _ in range(3):
        took = await kill_engine(bench, "chat")
        withdrawn.append(took[0])
        again.append(took[1])
    await bench.delete("chat")
    await start_supervised(bench, "chat")
    failed, requests = await restart_agent(bench, "chat")
    percent, resident_mib = await measure_at_rest(bench)
    over = statistics.median(agent) - load
    return [
        Figure("MetalProcess to Ready (median)", 1000 * statistics.median(agent), 1000 * load, 1000 * load + 300, "ms"),
        Figure("of that, over the floor", 1000 * over, None, 300, "ms"),
        Figure("engine killed: endpoint not ready (worst)", 1000 * max(withdrawn), None, 200, "ms"),
        Figure("engine killed once: serving again", again[0], load, load + 2, "s"),
        Figure(f"agent killed 3 times: failed of {requests} requests and a stream", failed, None, 0, ""),
        Figure(f"agent and proxy at rest, {AT_REST} processes", percent, None, 1, "% of a core"),
        Figure(f"agent resident, {AT_REST} processes", resident_mib, None, 64, "MiB"),
    ]


async def run(folder: Path) -> None:
    """Start all parts, measure, and print the figures."""
    network, plane = Network(), ControlPlane(ensure_binaries(), folder / "plane")
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
                *(
                    reflect(client, bench.store, Selection(kind, NAMESPACE))
                    for kind in (METAL_PROCESSES, ENDPOINT_SLICES)
                )
            ):
                print_figures("supervision", await measure(bench))
        await host.host.close()
        await host.agent.kill()
    finally:
        await plane.stop()


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.supervision"]))
    asyncio.run(run(Path(tempfile.mkdtemp(prefix="bench-"))))
