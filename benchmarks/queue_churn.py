"""The controller's processor time while 1,000 services wait and a full cluster of 1,000 nodes changes all the time.

What changes, at steady rates: nodes report their status three times as often as kubelets do by default, and their node
agents the values of their devices each minute; pods of others without devices come, start and go, services are created
and deleted, and now and then devices become free, so that services are admitted and the positions of all others move.
Leases of nodes are not renewed: the controller does not follow them. Before, the same controller is measured while
nothing changes, and while nobody but the node agents reports. NODES, SERVICES and SECONDS make a small one.
"""

import asyncio
import collections
import itertools
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final

import psutil

from benchmarks.audit_log import CpuSample
from benchmarks.measured_cluster import MeasuredCluster
from benchmarks.queue_cluster import (
    describe_foreign_pod,
    describe_hardware,
    describe_heartbeat,
    end_foreign_pod,
    make_nodes,
    queue_cluster,
    serve,
    wait_until_queued,
    work_in_parallel,
)
from benchmarks.report import Figure, print_figures
from controller.placement.effects import find_gate
from crds.meta import LABEL_SERVICE, PRIORITY_RANK
from kube.resources import INFERENCE_SERVICES, NODE_FITNESSES, NODES, PODS
from kube.store import Store
from node_agent.node_fitness import HEARTBEAT_SECONDS, build_object
from node_agent.node_labels import FIELD_MANAGER
from tests.controlplane import sandbox
from tests.support.background import running
from tests.support.simulated_nodes import GPU

NODE_COUNT: Final = int(os.environ.get("NODES", "1000"))
SERVICES: Final = int(os.environ.get("SERVICES", "1000"))
SECONDS: Final = float(os.environ.get("SECONDS", "120"))
REST_SECONDS: Final = SECONDS / 3
SETTLED_SECONDS: Final = 20.0
"""Longer than a killed or stopped leader's Lease."""
LIMIT_SECONDS: Final = 600.0
DEVICES: Final = 8
NODE_STATUS_SECONDS: Final = 100.0
"""Time between two reports of a node; a kubelet whose node does not change reports each 300 s."""
FOREIGN_EACH_SECOND: Final = 2.0
"""Pods of others that come, and as many that go."""
SERVICE_SECONDS: Final = 5.0
"""Time between two new services."""
DELETION_SECONDS: Final = 10.0
"""Time between two deletions of a service that waits."""
ROOM_SECONDS: Final = 20.0
"""Time between two moments at which all devices of a node become free."""
NAMESPACE: Final = "churn"
MOST_PERCENT: Final = 5
MOST_AGENTS_PERCENT: Final = 3
MIB: Final = 2**20
_PRIORITIES: Final = tuple(PRIORITY_RANK)


class Churn:
    """All that changes; each change is one call of a method."""

    def __init__(self, cluster: MeasuredCluster, store: Store, chance: random.Random) -> None:
        self._plane, self._client, self._store, self._chance = cluster.plane, cluster.client, store, chance
        self._nodes: list[str] = []
        self._reporting: Iterator[str] = iter(())
        self._probing: Iterator[str] = iter(())
        self._pods: collections.deque[str] = collections.deque()
        self._numbers = itertools.count()
        self.counts: collections.Counter[str] = collections.Counter()

    async def fill(self) -> None:
        """Make nodes whose devices others have, and services that wait."""
        self._nodes = await make_nodes(self._client, [DEVICES] * NODE_COUNT)
        self._reporting = itertools.cycle(self._nodes)
        # A node whose devices become free goes on reporting.
        self._probing = itertools.cycle([*self._nodes])
        await work_in_parallel(self._take_devices, NODE_COUNT)
        await work_in_parallel(self._create_fitness, NODE_COUNT)

    async def create_services(self) -> None:
        """Make the services."""
        await work_in_parallel(lambda _: self.create_service(), SERVICES)

    def list_changes(self) -> list[Coroutine[Any, Any, None]]:
        """Return the endless changes."""
        return [
            self._repeat(self.report_node, NODE_STATUS_SECONDS / NODE_COUNT),
            self._repeat(self.replace_pod, 1 / FOREIGN_EACH_SECOND),
            self._repeat(self.create_service, SERVICE_SECONDS),
            self._repeat(self.delete_service, DELETION_SECONDS),
            self._repeat(self.free_node, ROOM_SECONDS),
        ]

    def list_agents(self) -> list[Coroutine[Any, Any, None]]:
        """Return the endless changes by node agents."""
        return [self._repeat(self.report_hardware, HEARTBEAT_SECONDS / NODE_COUNT)]

    async def _repeat(self, change: Callable[[], Awaitable[None]], seconds: float) -> None:
        due = time.monotonic()

        async def make() -> None:
            await change()
            self.counts[change.__name__] += 1

        async with asyncio.TaskGroup() as changes:
            while True:
                due += seconds
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                changes.create_task(make())  # a slow answer delays no other change

    async def report_node(self) -> None:
        """Report the status of a node, as its kubelet does."""
        operation = {"op": "add", "path": "/status/conditions", "value": [describe_heartbeat()]}
        await self._client.patch_json(NODES, next(self._reporting), None, [operation], subresource="status")

    async def report_hardware(self) -> None:
        """Report the hardware of a node, as its node agent does with each heartbeat."""
        await self._apply_hardware(next(self._probing), next(self._numbers))

    async def replace_pod(self) -> None:
        """Start a pod of others, which wants no device, and end the oldest one of several."""
        name = f"application-{next(self._numbers)}"
        await self._client.create(PODS, describe_foreign_pod(name, self._chance.choice(self._nodes), cpu="100m"))
        operation = {"op": "replace", "path": "/status/phase", "value": "Running"}
        await self._client.patch_json(PODS, name, "foreign", [operation], subresource="status")
        self._pods.append(name)
        if len(self._pods) > FOREIGN_EACH_SECOND * 10:
            await end_foreign_pod(self._plane, self._pods.popleft())

    async def create_service(self) -> None:
        """Make a service."""
        gpus, priority = self._chance.choice((1, 2, 4, DEVICES)), self._chance.choice(_PRIORITIES)
        await serve(self._client, NAMESPACE, f"s{next(self._numbers):05}", gpus, priority)

    async def delete_service(self) -> None:
        """Delete a service that waits."""
        waiting = [pod for pod in self._store.list(PODS, NAMESPACE) if find_gate(pod) is not None]
        name = self._chance.choice(waiting)["metadata"]["labels"][LABEL_SERVICE]
        await self._client.delete(INFERENCE_SERVICES, name, NAMESPACE)

    async def free_node(self) -> None:
        """End the pod that has all devices of a node."""
        node = self._nodes.pop(self._chance.randrange(len(self._nodes)))
        await end_foreign_pod(self._plane, f"holder-{node}")

    async def _take_devices(self, number: int) -> None:
        node = self._nodes[number]
        await self._client.create(PODS, describe_foreign_pod(f"holder-{node}", node, **{GPU: str(DEVICES)}))

    async def _create_fitness(self, number: int) -> None:
        node = await self._client.get(NODES, self._nodes[number])
        await self._client.create(NODE_FITNESSES, build_object(node))
        await self._apply_hardware(self._nodes[number], number)

    async def _apply_hardware(self, node: str, number: int) -> None:
        body = {"metadata": {"name": node}, "status": describe_hardware(DEVICES, number)}
        await self._client.apply(NODE_FITNESSES, body, field_manager=FIELD_MANAGER, subresource="status")


async def measure(cluster: MeasuredCluster, seconds: float) -> tuple[float, collections.Counter[str]]:
    """Return the controller's share of a core in percent, and its calls, in the next seconds."""
    start, began, cpu = cluster.audit.size_bytes, time.monotonic(), CpuSample(cluster.controller.pid)
    await asyncio.sleep(seconds)
    cpu.take()
    took = time.monotonic() - began
    calls = cluster.audit.of_user(cluster.audit.read(start))
    return 100 * cpu.seconds / took, collections.Counter(f"{call.verb} {call.resource}" for call in calls)


async def run() -> None:
    """Start all parts, measure, and print the figures."""
    async with queue_cluster(NAMESPACE) as (cluster, store):
        churn = Churn(cluster, store, random.Random(1))  # noqa: S311 - to be repeated, not to be secret
        await churn.fill()
        cluster.controller.start()
        await churn.create_services()
        await wait_until_queued(store, NAMESPACE, SERVICES)
        # A new leader tells each service its place at once.
        await cluster.controller.stop()
        cluster.controller.start()
        await cluster.audit.wait_for_silence(SETTLED_SECONDS, LIMIT_SECONDS)
        idle_percent, idle_calls = await measure(cluster, REST_SECONDS)
        async with running(*churn.list_agents()):
            fitness_percent, _ = await measure(cluster, SECONDS)
        churn.counts.clear()
        async with running(*churn.list_changes(), *churn.list_agents()):
            percent, calls = await measure(cluster, SECONDS)
        resident = psutil.Process(cluster.controller.pid).memory_info().rss / MIB
        waiting = sum(find_gate(pod) is not None for pod in store.list(PODS, NAMESPACE))
    changes = {name: count / SECONDS for name, count in churn.counts.items()}
    print_figures(
        f"{waiting} services wait for {NODE_COUNT} full nodes; the floor is the same controller while nothing changes",
        [
            Figure("CPU of the controller", percent, idle_percent, MOST_PERCENT, "% of a core"),
            Figure("the same, node agents alone", fitness_percent, idle_percent, MOST_AGENTS_PERCENT, "% of a core"),
            *(Figure(f"changes: {name}", rate, None, None, "/s") for name, rate in changes.items()),
            *(
                Figure(f"calls: {kind}", count / SECONDS, idle_calls[kind] / REST_SECONDS, None, "/s")
                for kind, count in calls.most_common()
            ),
            Figure("resident", resident, None, None, "MiB"),
        ],
    )


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.queue_churn"]))
    asyncio.run(run())
