"""Resident memory of a controller with thousands of services, and all that they bring, on a simulated API server.

A third of the services runs in pods, a third on hosts, and a third waits for a host. The floor is the same process
before the first object. What lacks here is TLS, HTTP and kopf, which `rest` has. SERVICES=1000 makes a small one.
"""

import asyncio
import logging
import os
import time
from typing import Final

import psutil
import structlog

from benchmarks.report import Figure, print_figures
from benchmarks.simulated_controller import fill, simulated_controller
from benchmarks.simulated_server import SimulatedServer

SERVICES: Final = int(os.environ.get("SERVICES", "10000"))
HOSTS: Final = 100
PER_HOST: Final = -(-SERVICES // 3 // HOSTS)
MOST_MIB: Final = 600 if SERVICES > 1000 else 130  # noqa: PLR2004 - the two promises
MIB: Final = 2**20
KIB: Final = 2**10


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss


async def run() -> None:
    """Fill the store, wait until all is decided, and print the figures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    server, third = SimulatedServer(), SERVICES // 3
    fill(server, in_pods=SERVICES - 2 * third, on_hosts=third, waiting=third, hosts=HOSTS, per_host=PER_HOST)
    before, started = resident_bytes(), time.process_time()
    async with simulated_controller(server):
        spent, after = time.process_time() - started, resident_bytes()
    per_service = (after - before) / KIB / SERVICES
    print_figures(
        f"memory of the controller with {SERVICES} services and {HOSTS} hosts",
        [
            Figure("resident", after / MIB, before / MIB, MOST_MIB, "MiB"),
            Figure("each service", per_service, None, None, "KiB"),
            Figure("CPU for each service, with the simulated server", 1000 * spent / SERVICES, None, None, "ms"),
        ],
    )


if __name__ == "__main__":
    asyncio.run(run())
