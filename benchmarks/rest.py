"""A controller at rest: hosts renew and report memory that always changes, and there is nothing to do.

Most services are served by hosts, the others wait for memory that no host has. Then the controller is started again.
The goal is no write at all. SERVICES=50 and HOSTS=5 make a small one; the floor of every figure is zero.
"""

import asyncio
import collections
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Final

import psutil

from benchmarks.audit_log import WRITES, Call, CpuSample
from benchmarks.host_fleet import HostFleet
from benchmarks.measured_cluster import MeasuredCluster, measured_cluster
from benchmarks.report import Figure, print_figures
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, MODELS
from kube.store import Store
from kube.watch import Selection, reflect
from tests.controlplane import sandbox
from tests.support.background import running
from tests.support.eventually import eventually

SERVICES: Final = int(os.environ.get("SERVICES", "1000"))
HOSTS: Final = int(os.environ.get("HOSTS", "100"))
SERVED: Final = SERVICES * 7 // 10
"""Services that find a host; the others wait."""
CLIENTS: Final = 8
REST_SECONDS: Final = 60.0
SETTLED_SECONDS: Final = 15.0
LIMIT_SECONDS: Final = 900.0
NAMESPACE: Final = "rest"
WAITING: Final = "WaitingForGPU"
"""The phase of a service in the queue, for memory of a host, too."""
GIB: Final = 2**30
MIB: Final = 2**20
BUDGET_BYTES: Final = (SERVED // HOSTS) * GIB + GIB // 2
MOST_PERCENT: Final = 2
MOST_MIB: Final = 130
MOST_WARM_SECONDS: Final = 5


async def create_services(cluster: MeasuredCluster) -> None:
    """Create a Model that only hosts read, and all services of it."""
    model = {"source": "file:///models/tiny.gguf", "memoryBytes": GIB}
    await cluster.client.create(MODELS, {"metadata": {"name": "tiny", "namespace": NAMESPACE}, "spec": model})
    names = iter(f"s{number:05}" for number in range(SERVICES))
    spec = {"modelRef": "tiny", "hardware": {"accelerator": "metal"}}

    async def create() -> None:
        for name in names:
            metadata = {"name": name, "namespace": NAMESPACE}
            await cluster.client.create(INFERENCE_SERVICES, {"metadata": metadata, "spec": spec})

    await asyncio.gather(*(create() for _ in range(CLIENTS)))


async def wait_until_settled(cluster: MeasuredCluster, store: Store) -> int:
    """Wait until as many services serve as there is room for, and all others say why not; return how many wait."""

    def settled() -> bool:
        phases = collections.Counter(_phase(service) for service in store.list(INFERENCE_SERVICES))
        assert phases["Ready"] >= SERVED // HOSTS * HOSTS, phases  # noqa: S101 - `eventually` shows it
        assert phases["Ready"] + phases[WAITING] == SERVICES, phases  # noqa: S101 - as above
        return True

    await eventually(settled, timeout=LIMIT_SECONDS)
    with contextlib.suppress(TimeoutError):
        await cluster.audit.wait_for_silence(SETTLED_SECONDS, 2 * REST_SECONDS)
    return sum(_phase(service) == WAITING for service in store.list(INFERENCE_SERVICES))


def _phase(service: Obj) -> str:
    return str((service.get("status") or {}).get("phase", ""))


async def start_again(cluster: MeasuredCluster) -> tuple[float, list[Call]]:
    """Start the controller again; return the seconds until its caches are full, and its calls until it is silent."""
    await cluster.controller.stop()
    before = cluster.controller.log.stat().st_size
    start = cluster.audit.size_bytes
    began = time.monotonic()
    cluster.controller.start()
    await eventually(lambda: b"store_complete" in cluster.controller.log.read_bytes()[before:])
    took = time.monotonic() - began
    await eventually(lambda: b"leadership_acquired" in cluster.controller.log.read_bytes()[before:])
    with contextlib.suppress(TimeoutError):
        await cluster.audit.wait_for_silence(SETTLED_SECONDS, REST_SECONDS)
    return took, cluster.audit.read(start)


def write_figures(cluster: MeasuredCluster, name: str, calls: Iterable[Call]) -> list[Figure]:
    """Return the number of writes, in all and by kind, and that of the other calls."""
    ours = list(cluster.audit.of_user(calls))
    kinds = collections.Counter(f"{call.verb} {call.resource}" for call in ours)
    writes = sum(call.verb in WRITES for call in ours)
    return [
        Figure(f"{name}: writes", writes, None, 0, ""),
        *(Figure(f"  {kind}", count, None, None, "") for kind, count in kinds.most_common()),
    ]


async def measure(cluster: MeasuredCluster, fleet: HostFleet, waiting: int) -> None:
    """Measure rest and restart, and print the figures."""
    start, reports = cluster.audit.size_bytes, fleet.reports
    began, cpu = time.monotonic(), CpuSample(cluster.controller.pid)
    await asyncio.sleep(REST_SECONDS)
    cpu.take()
    seconds, reports = time.monotonic() - began, fleet.reports - reports
    resident = psutil.Process(cluster.controller.pid).memory_info().rss / MIB
    at_rest = cluster.audit.read(start)
    warm_seconds, again = await start_again(cluster)
    print_figures(
        f"{SERVICES} services, {waiting} of them waiting, and {HOSTS} hosts that reported {reports} times in a minute",
        [
            Figure("CPU of the controller", 100 * cpu.seconds / seconds, None, MOST_PERCENT, "% of a core"),
            Figure("CPU for each report, all else included", 1000 * cpu.seconds / reports, None, None, "ms"),
            Figure("resident", resident, None, MOST_MIB, "MiB"),
            *write_figures(cluster, "a minute at rest", at_rest),
            Figure("started again: caches full after", warm_seconds, None, MOST_WARM_SECONDS, "s"),
            *write_figures(cluster, "started again", again),
        ],
    )


async def run() -> None:
    """Start all parts, measure, and print the figures."""
    async with measured_cluster() as cluster:
        await cluster.make_namespace(NAMESPACE)
        cluster.controller.start()
        store = Store()
        fleet = HostFleet(cluster.client, store, HOSTS, BUDGET_BYTES)
        async with running(
            reflect(cluster.client, store, Selection(METAL_PROCESSES)),
            reflect(cluster.client, store, Selection(INFERENCE_SERVICES)),
            fleet.run(),
        ):
            await create_services(cluster)
            waiting = await wait_until_settled(cluster, store)
            await measure(cluster, fleet, waiting)


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.rest"]))
    asyncio.run(run())
