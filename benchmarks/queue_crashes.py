"""A controller that is killed ten times while it admits 500 services on 1,000 nodes, and a record of each state.

The services are of all priorities and of four sizes, the nodes of three. Pods of others have all devices; nodes of a
part of them become free in as many portions as there are crashes, so that many services wait in the end.
The controller is killed with SIGKILL once the ledger has been written with a new portion, or after some of its pods
were admitted, and a moment more; it is started again at once, and leads when the Lease of the killed one has expired.
A pod that is pinned to a node, or promised it by the ledger, counts as on it: the scheduler would hide a device that is
promised twice. None is evicted for another, so that the order alone decides.
NODES, SERVICES, CRASHES and SEED make another one.
"""

import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from benchmarks.measured_cluster import MeasuredCluster
from benchmarks.queue_cluster import (
    describe_foreign_pod,
    end_foreign_pod,
    make_nodes,
    queue_cluster,
    serve,
    wait_until_queued,
    work_in_parallel,
)
from benchmarks.queue_record import QueueRecord
from benchmarks.report import Figure, print_figures
from controller.placement.ledger import LEDGER
from crds.meta import PRIORITY_RANK, Priority
from kube.resources import CONFIG_MAPS, PODS
from kube.store import Store
from kube.watch import Selection, reflect
from tests.controlplane import sandbox
from tests.controlplane.members import CONTROLLER_NAMESPACE
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU

NODE_COUNT: Final = int(os.environ.get("NODES", "1000"))
SERVICES: Final = int(os.environ.get("SERVICES", "500"))
CRASHES: Final = int(os.environ.get("CRASHES", "10"))
SEED: Final = int(os.environ.get("SEED", "1"))
SHARE: Final = 0.6
"""Devices that become free, as a share of what all services want."""
MOST_ADMITTED: Final = 12
"""Admissions of a portion after which the controller is killed at the latest."""
LED_SHARE: Final = 0.5
"""Portions that become free only once a new leader has taken over."""
LONGEST_MOMENT_SECONDS: Final = 0.1
PORTION_SECONDS: Final = 10.0
"""Time after the first decision in which the controller is killed in any case."""
LEAD_SECONDS: Final = 300.0
"""Time in which a new leader must have taken over and decided, also on a busy machine."""
END_SECONDS: Final = 120.0
"""Time after the last crash in which all must be admitted and bound that can be."""
MIN_RUN: Final = ("--min-run", "24h")
NAMESPACE: Final = "queue"
NODE_SIZES: Final = (2, 4, 8)
SERVICE_SIZES: Final = (1, 2, 4, 8)
_PRIORITIES: Final = tuple(PRIORITY_RANK)


def choose_portions(sizes: Sequence[int], wanted: int, chance: random.Random) -> list[list[int]]:
    """Return the numbers of nodes that become free, in portions of about equal count."""
    numbers = chance.sample(range(len(sizes)), len(sizes))
    freed = 0
    chosen = []
    for number in numbers:
        if freed >= wanted * SHARE:
            break
        chosen.append(number)
        freed += sizes[number]
    return [chosen[portion::CRASHES] for portion in range(CRASHES)]


class Crash(NamedTuple):
    """A moment at which the controller was killed."""

    admitted: int
    """Pods of the last portion that had been admitted."""
    promised: int
    """Pods that the ledger had given a node, and that did not have it yet."""


async def crash(cluster: MeasuredCluster, record: QueueRecord, nodes: Sequence[str], chance: random.Random) -> Crash:
    """Free nodes, and kill the controller while it admits.

    The next portion becomes free while nobody leads, and is decided at once, or node by node under a new leader.
    """
    admitted, decisions = record.admitted, record.decisions
    wanted = admitted + chance.randrange(MOST_ADMITTED)
    await work_in_parallel(lambda number: end_foreign_pod(cluster.plane, f"holder-{nodes[number]}"), len(nodes))
    await record.wait(lambda: record.decisions > decisions, LEAD_SECONDS)
    with contextlib.suppress(TimeoutError):  # a portion may have room for fewer
        await record.wait(lambda: record.admitted >= wanted, PORTION_SECONDS)
    await asyncio.sleep(chance.uniform(0, LONGEST_MOMENT_SECONDS))
    await cluster.controller.kill()
    outcome = Crash(record.admitted - admitted, record.promised)
    decisions = record.decisions
    cluster.controller.start()
    if chance.random() < LED_SHARE:
        await record.wait(lambda: record.decisions > decisions, LEAD_SECONDS)
    return outcome


async def wait_for_the_end(record: QueueRecord) -> None:
    """Wait until all that can have a node have it."""

    def is_over() -> bool:
        assert record.list_forgotten() == []  # noqa: S101 - `eventually` shows it
        assert record.list_unbound() == []  # noqa: S101 - as above
        return True

    with contextlib.suppress(AssertionError):  # the figures show what is missing
        await eventually(is_over, END_SECONDS)


class Stopwatch:
    """The seconds of each phase of this benchmark."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = time.monotonic()
        self.seconds[phase], self._since = now - self._since, now
        print(f"{phase}: {self.seconds[phase]:.0f} s", flush=True)


async def run() -> None:
    """Start all parts, crash, and print the figures."""
    watch = Stopwatch()
    chance = random.Random(SEED)  # noqa: S311 - to be repeated, not to be secret
    sizes = chance.choices(NODE_SIZES, k=NODE_COUNT)
    totals = {f"node-{number}": size for number, size in enumerate(sizes)}
    wanted = chance.choices(SERVICE_SIZES, k=SERVICES)
    priorities: Mapping[str, Priority] = {f"s{number:05}": chance.choice(_PRIORITIES) for number in range(SERVICES)}
    record, watched = QueueRecord(totals, priorities), Store()
    watched.subscribe(record.note)
    async with queue_cluster(NAMESPACE) as (cluster, store):
        cluster.controller.argv += MIN_RUN
        watch.end("start of the control plane")
        nodes = await make_nodes(cluster.client, sizes)
        watch.end("nodes")
        async with running(
            reflect(cluster.client, watched, Selection(PODS)),
            reflect(
                cluster.client,
                watched,
                Selection(CONFIG_MAPS, CONTROLLER_NAMESPACE, field_selector=f"metadata.name={LEDGER}"),
            ),
        ):
            await work_in_parallel(
                lambda number: cluster.client.create(
                    PODS, describe_foreign_pod(f"holder-{nodes[number]}", nodes[number], **{GPU: str(sizes[number])})
                ),
                NODE_COUNT,
            )
            watch.end("pods of others")
            cluster.controller.start()
            await work_in_parallel(
                lambda number: serve(
                    cluster.client,
                    NAMESPACE,
                    f"s{number:05}",
                    wanted[number],
                    priorities[f"s{number:05}"],
                ),
                SERVICES,
            )
            watch.end("services")
            await wait_until_queued(store, NAMESPACE, SERVICES)
            watch.end("all are queued")
            portions = choose_portions(sizes, sum(wanted), chance)
            crashes = [
                await crash(cluster, record, [nodes[index] for index in portion], chance) for portion in portions
            ]
            watch.end("crashes")
            await wait_for_the_end(record)
            watch.end("end")
    show(record, crashes, sum(wanted))
    watch.end("judgement")


def show(record: QueueRecord, crashes: Sequence[Crash], wanted: int) -> None:
    """Print the figures, and what went wrong."""
    double, unpinned, passed = record.list_double_bookings(), record.list_unpinned(), record.list_passed()
    # A record that sees no device finds nothing wrong.
    seen = sum(state.devices for state in record.now.values() if state.service)
    print_figures(
        f"{CRASHES} crashes while {SERVICES} services wait for {NODE_COUNT} nodes; {record.states} states of pods",
        [
            Figure("states with a device booked twice", len(double), None, 0, ""),
            Figure("pods that neither wait nor have a node", len(unpinned), None, 0, ""),
            Figure("decisions that passed one ahead", len(passed), None, 0, ""),
            Figure("pods that wait beside room for them", len(record.list_forgotten()), None, 0, ""),
            Figure("admitted pods that are not bound", len(record.list_unbound()), None, 0, ""),
            Figure("devices of services on record", seen, None, wanted, "", at_least=True),
            Figure("contents of the ledger", record.decisions, None, None, ""),
            Figure("admitted", record.admitted, None, None, ""),
            Figure(
                "  of a portion before its crash, median",
                statistics.median(crash.admitted for crash in crashes),
                None,
                None,
                "",
            ),
            Figure(
                "promised and not admitted at a crash, most", max(crash.promised for crash in crashes), None, None, ""
            ),
            Figure(
                "crashes with a promise that was open",
                sum(crash.promised > 0 for crash in crashes),
                None,
                1,
                "",
                at_least=True,
            ),
        ],
    )
    for problem in (*double, *unpinned, *passed, *record.list_forgotten(), *record.list_unbound()):
        print(problem)


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.queue_crashes"]))
    asyncio.run(run())
