"""The controller's CPU for one report of a host, and for one reconcile, whatever else there is.

Everything runs in this process on a simulated API server, from the bytes of a watch to the decision: so the figures
are CPU time of the controller alone, without TLS and HTTP.
"""

import asyncio
import logging
import random
import time
from typing import Final

import structlog

from benchmarks.report import Figure, print_figures
from benchmarks.simulated_controller import SimulatedController, fill, simulated_controller
from benchmarks.simulated_host import JITTER_BYTES
from benchmarks.simulated_server import SimulatedServer
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey, Resource, object_key

HOSTS: Final = 100
FEW: Final = 100
MANY: Final = 1000
REPORTS: Final = 2000
PER_HOST: Final = 4
RECONCILES: Final = 30
"""The same number whatever there is, so that both find as much in the caches of the processor."""
FULL_HOSTS: Final = FEW // 3 // PER_HOST
"""So many hosts run `PER_HOST` services whatever there is: a host with ten times the services is no fair comparison."""
ROUNDS: Final = 10
TURNS: Final = 3
"""Few and many services take turns, for the first to be measured would pay for what Python does only once."""
STEPS: Final = 5
"""Steps of the event loop in which begins what an event has enqueued."""
MOST_EVENT_MILLISECONDS: Final = 1.0
MOST_GROWTH: Final = 1.3


async def measure_reports(world: SimulatedController) -> float:
    """Return the milliseconds of CPU for each report of a host; the least of some rounds."""
    server, store = world.server, world.controller.store
    names = [host["metadata"]["name"] for host in server.list_objects(METAL_HOSTS)]
    seen = asyncio.Event()
    store.subscribe(lambda *_: seen.set())
    best = float("inf")
    for _ in range(ROUNDS):
        reports = [(random.choice(names), random.randrange(JITTER_BYTES)) for _ in range(REPORTS // ROUNDS)]  # noqa: S311 - no secret
        spent = 0.0
        for name, free_bytes in reports:
            server.report_host(name, free_bytes)
            seen.clear()
            started = time.process_time()
            await seen.wait()
            for _ in range(STEPS):
                await asyncio.sleep(0)
            spent += time.process_time() - started
        best = min(best, spent / len(reports))
    return 1000 * best


async def measure_reconciles(world: SimulatedController, resource: Resource, keys: list[ObjectKey]) -> float:
    """Return the milliseconds of CPU for each reconcile that finds nothing to do; the least of some rounds."""
    controller = world.controller
    reconciler, executor = controller._reconcilers[resource], controller._executor  # noqa: SLF001 - no queue, no pause
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for key in keys:
            await executor.reconcile(reconciler, key)
        rounds.append((time.process_time() - started) / len(keys))
    return 1000 * min(rounds)


def keys_by_phase(world: SimulatedController) -> dict[str, list[ObjectKey]]:
    """Return up to `RECONCILES` services of each kind: in pods, on hosts, and those that wait for a host."""
    found: dict[str, list[ObjectKey]] = {"in pods": [], "on a host": [], "waiting for a host": []}
    for service in world.controller.store.list(INFERENCE_SERVICES):
        on_metal = service["spec"]["hardware"]["accelerator"] == "metal"
        serves = service["status"]["phase"] == "Ready"
        found["in pods" if not on_metal else "on a host" if serves else "waiting for a host"].append(
            object_key(service)
        )
    return {kind: keys[:RECONCILES] for kind, keys in found.items()}


async def measure(services: int) -> dict[str, float]:
    """Return all figures in milliseconds, with this many services: a third of each kind."""
    server = SimulatedServer()
    third = services // 3
    fill(server, in_pods=services - 2 * third, on_hosts=third, waiting=third, hosts=HOSTS, per_host=PER_HOST)
    async with simulated_controller(server) as world:
        figures = {
            f"a service {kind}": await measure_reconciles(world, INFERENCE_SERVICES, keys)
            for kind, keys in keys_by_phase(world).items()
        }
        hosts = [object_key(host) for host in world.controller.store.list(METAL_HOSTS)][:FULL_HOSTS]
        figures["a host"] = await measure_reconciles(world, METAL_HOSTS, hosts)
        processes = [object_key(process) for process in world.controller.store.list(METAL_PROCESSES)][:RECONCILES]
        figures["a process"] = await measure_reconciles(world, METAL_PROCESSES, processes)
        figures["report"] = await measure_reports(world)
    return figures


async def run() -> None:
    """Measure with few and with many services, and print the figures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    turns = [(await measure(FEW), await measure(MANY)) for _ in range(TURNS)]
    few, many = (
        {kind: min(figures[kind] for figures in measured) for kind in measured[0]}
        for measured in zip(*turns, strict=True)
    )
    print_figures(
        f"CPU of the controller with {MANY} services and {HOSTS} hosts; the floor is that with {FEW} services",
        [
            Figure("a report of a host", many.pop("report"), few.pop("report"), MOST_EVENT_MILLISECONDS, "ms"),
            *(Figure(f"reconcile of {kind}", many[kind], few[kind], MOST_GROWTH * few[kind], "ms") for kind in few),
        ],
    )


if __name__ == "__main__":
    asyncio.run(run())
