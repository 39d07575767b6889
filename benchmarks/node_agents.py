"""Memory and processor time of one node agent, and the writes of a thousand on their API server.

One real `pomona node-agent` runs for SECONDS beside an API server that is an HTTP server in this process; what lacks is
TLS, which takes 2 MiB. It sees 16 processors, so that it measures their bandwidth with all its buffers. A thousand
agents run for an hour of virtual time, each with a transport of its own, from the moment when all start together. The
floor of the memory is Python with the libraries of the agent.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import psutil
import structlog
from aiohttp import web

from benchmarks.report import Figure, print_figures
from benchmarks.servers.cluster_api import write_kubeconfig
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from devices.node_hardware import HardwareReading
from kube.transport import Request
from node_agent.agent import NodeAgent
from node_agent.metrics import NodeMetrics
from node_agent.options import NodeAgentOptions
from tests.support import virtual_time
from tests.support.eventually import eventually
from tests.support.node_api import NAME, NodeApi

SECONDS: Final = float(os.environ.get("SECONDS_OF_AGENT", "120"))
AGENTS: Final = int(os.environ.get("AGENTS", "1000"))
HOUR_SECONDS: Final = 3600.0
MOST_MIB: Final = 58.0
"""The limit of the chart is 80 MiB."""
MOST_PERCENT: Final = 0.5
MOST_WRITES: Final = 20.0
MIB: Final = 2**20
GIB: Final = 2**30
LIBRARIES: Final = "aiohttp, click, httptools, msgspec, prometheus_client, psutil, structlog"
IMPORTS: Final = f"import {LIBRARIES}; print(psutil.Process().memory_info().rss)"
L4: Final = NodeDevice(id="GPU-1", product="NVIDIA L4", architecture="sm_89", memory_bytes=23034 * MIB)
HARDWARE: Final = NodeFitnessStatus(vendor="nvidia", source="nvidia-smi", device_class="nvidia-l4x1", int4=True)


@contextlib.asynccontextmanager
async def serve_api(api: NodeApi) -> AsyncIterator[str]:
    """Serve an API server with one Node; yields its address."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
            return response
        asked = Request(request.method, request.path, dict(request.query), await request.read())
        reply = await api.request(asked)
        return web.Response(status=reply.status, body=reply.body, content_type="application/json")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def read_peak(pid: int) -> int:
    """Return the most resident memory that a process has had, as the kernel counts it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kib) << 10


async def measure_agent() -> list[Figure]:
    """Run one agent, and return its memory and its share of a processor after its start."""
    floor = int(subprocess.check_output([sys.executable, "-P", "-c", IMPORTS]))  # noqa: ASYNC221 - nothing else runs
    api = NodeApi()
    with tempfile.TemporaryDirectory() as folder:
        async with serve_api(api) as server:
            kubeconfig = write_kubeconfig(Path(folder), server)
            (Path(folder) / "sitecustomize.py").write_text("import os\nos.cpu_count = lambda: 16\n")
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "cli.main", "node-agent", f"--node-name={NAME}"),
                *(f"--kubeconfig={kubeconfig}", "--metrics-port=0", "--port=0"),
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": f"{folder}:{Path.cwd()}"},
            )
            try:
                await eventually(lambda: api.fitness is not None and "conditions" in api.status)
                process = psutil.Process(agent.pid)
                before, started = sum(process.cpu_times()[:2]), time.monotonic()
                await asyncio.sleep(SECONDS)
                spent = sum(process.cpu_times()[:2]) - before
                percent = 100 * spent / (time.monotonic() - started)
                resident = process.memory_info().rss
                own = process.memory_full_info().uss
                peak = read_peak(agent.pid)
            finally:
                agent.kill()
                await agent.wait()
    return [
        Figure("resident memory of one agent", resident / MIB, floor / MIB, MOST_MIB, "MiB"),
        Figure("most since its start", peak / MIB, floor / MIB, MOST_MIB, "MiB"),
        Figure("the part that it shares with nobody", own / MIB, None, None, "MiB"),
        Figure(f"processor of one agent in {SECONDS:.0f} s", percent, None, MOST_PERCENT, "%"),
    ]


class _LiveHardware:
    """The hardware of a node whose values of the moment change with each probe."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def probe(self, _labels: Mapping[str, str]) -> HardwareReading:
        self._number += 1
        device = msgspec.structs.replace(
            L4, temperature_celsius=40 + self._number % 40, free_bytes=self._number % 20 * GIB
        )
        available_bytes = self._number % 60 * GIB
        return HardwareReading(msgspec.structs.replace(HARDWARE, devices=[device], available_bytes=available_bytes))


async def count_writes() -> Counter[int]:
    """Run a thousand agents for an hour; return the number of writes in each second."""
    servers = [NodeApi() for _ in range(AGENTS)]
    agents = []
    for number, api in enumerate(servers):
        hardware = _LiveHardware(number)
        options = NodeAgentOptions(NAME)
        agent = NodeAgent(api.client, options, hardware.probe, None, NodeMetrics(NAME, "pomona"))
        agents.append(asyncio.ensure_future(agent.run()))
    await asyncio.sleep(HOUR_SECONDS)
    for task in agents:
        task.cancel()
    await asyncio.gather(*agents, return_exceptions=True)
    return Counter(int(at) for api in servers for _, at in api.writes)


def measure_writes() -> list[Figure]:
    """Return the writes a second of all agents."""
    seconds = virtual_time.run(count_writes())
    settled = [seconds[second] for second in range(60, int(HOUR_SECONDS))]
    return [
        Figure(f"writes of {AGENTS} agents", sum(settled) / len(settled), AGENTS / 60, MOST_WRITES, "/s"),
        Figure("most in one second after the first minute", max(settled), None, None, "/s"),
        Figure("in the second in which all start", seconds[0], None, None, "/s"),
    ]


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print_figures("node agents", [*asyncio.run(measure_agent()), *measure_writes()])
