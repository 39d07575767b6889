"""The controller's work for each process that moves when an administrator drains many hosts at once.

Everything runs in this process on a simulated API server, whose agents serve and stop at once: so the figures are
calls and CPU time of the controller alone. The floor is the drain of as many hosts where there are few others.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Final

import structlog

from benchmarks.report import Figure, print_figures
from benchmarks.simulated_controller import GIB, NAMESPACE, fill, simulated_controller, simulated_service
from benchmarks.simulated_server import SimulatedServer
from crds.meta import DRAINED
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, MODELS
from tests.support.eventually import eventually

DRAINED_HOSTS: Final = 20
FEW: Final = 40
MANY: Final = 200
PER_HOST: Final = 5
WAITING: Final = 100
"""Services that fit nowhere: each states which hosts are cordoned."""
TURNS: Final = 3
MOST_GROWTH: Final = 1.5
"""The more hosts there are, the fewer processes share the one that takes them, and so its Secret and its grants."""


def prepare(server: SimulatedServer, hosts: int) -> None:
    """Create hosts that serve `PER_HOST` services each and have room for as many, and services that wait."""
    fill(server, in_pods=0, on_hosts=hosts * PER_HOST, waiting=0, hosts=hosts, per_host=PER_HOST, spare=PER_HOST)
    spec = {"source": "file:///models/large.gguf", "memoryBytes": 1000 * GIB}
    server.put(MODELS, {"metadata": {"name": "large", "namespace": NAMESPACE}, "spec": spec})
    for number in range(WAITING):
        service = simulated_service(f"waiting-{number:03}", "metal")
        server.put(INFERENCE_SERVICES, {**service, "spec": {**service["spec"], "modelRef": "large"}})


def drain(server: SimulatedServer, hosts: Iterable[Obj]) -> None:
    """Drain hosts as an administrator does."""
    for host in hosts:
        server.put(METAL_HOSTS, {**host, "spec": {"unschedulable": True, "drain": True}})


def count_drained(hosts: Iterable[Obj]) -> int:
    """Return the number of hosts on which nothing is left, as the controller reports it."""
    conditions = (condition for host in hosts for condition in host["status"]["conditions"])
    return sum((condition["type"], condition["status"]) == (DRAINED, "True") for condition in conditions)


async def measure(hosts: int) -> dict[str, float]:
    """Return the figures of a drain of `DRAINED_HOSTS` hosts, for each process on them."""
    server = SimulatedServer()
    prepare(server, hosts)
    async with simulated_controller(server) as world:
        server.calls.clear()
        started = time.process_time()
        drain(server, server.list_objects(METAL_HOSTS)[:DRAINED_HOSTS])
        await eventually(lambda: count_drained(world.controller.store.list(METAL_HOSTS)) == DRAINED_HOSTS)
        spent_seconds = time.process_time() - started
        await world.settle()
    moved = DRAINED_HOSTS * PER_HOST
    reads = server.calls.total() - server.writes
    return {"writes": server.writes / moved, "reads": reads / moved, "CPU": 1000 * spent_seconds / moved}


async def run() -> None:
    """Measure with few and with many hosts, and print the figures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    turns = [(await measure(FEW), await measure(MANY)) for _ in range(TURNS)]
    few, many = (
        {kind: min(figures[kind] for figures in measured) for kind in measured[0]}
        for measured in zip(*turns, strict=True)
    )
    print_figures(
        f"Drain of {DRAINED_HOSTS} of {MANY} hosts, each with {PER_HOST} processes, while {WAITING} services wait; the "
        f"floor is that of {DRAINED_HOSTS} of {FEW}",
        [
            Figure(f"{kind} for each process", many[kind], few[kind], MOST_GROWTH * few[kind], unit)
            for kind, unit in (("writes", ""), ("reads", ""), ("CPU", "ms"))
        ],
    )


if __name__ == "__main__":
    asyncio.run(run())
