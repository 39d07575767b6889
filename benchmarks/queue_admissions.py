"""Admissions a second of the controller, beside a bare loop that makes the same writes on the same API server.

Services wait for a quota of their namespace, on nodes with room for all, until the quota is lifted; the clock stops
with the last pod that has its node and no gate. Namespaces of the controller and of the bare loop take turns, so that
what else the machine does meets both alike; while the loop works, the controller is stopped.

The bare loop knows nothing and decides nothing. With as many writes at once as the controller, it makes those without
which no such system can do: the ledger once for each batch of pods, as large as the controller's were; the JSON patch
that pins a pod and removes its gate; and beside them, by as many workers as the controller has, as many statuses of
services as the controller wrote. It reads nothing, and sends no Events. The loop's account is that of
the controller, so that the API server does as much for it.
NODES, UNITS and WAVES make a small one: in each wave the controller admits UNITS / WAVES pods, and then the loop.
"""

import asyncio
import collections
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from benchmarks.audit_log import Call
from benchmarks.measured_cluster import MeasuredCluster
from benchmarks.queue_cluster import (
    LIMIT_SECONDS,
    make_nodes,
    queue_cluster,
    serve,
    wait_until_queued,
    work_in_parallel,
)
from benchmarks.report import Figure, print_figures
from controller.placement.admission import WRITES_AT_ONCE
from controller.placement.effects import admit_pod, find_gate
from controller.placement.ledger import LEDGER
from controller.reconcile.plan import FIELD_MANAGER
from controller.run import WORKERS
from kube import credentials
from kube.apply import apply_status
from kube.client import Client, Obj, connect
from kube.resources import ACCELERATOR_POOLS, CONFIG_MAPS, INFERENCE_SERVICES, PODS
from kube.store import Store
from tests.controlplane import sandbox
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.support.eventually import eventually

NODE_COUNT: Final = int(os.environ.get("NODES", "1000"))
UNITS: Final = int(os.environ.get("UNITS", "500"))
WAVES: Final = int(os.environ.get("WAVES", "2"))
SIZE: Final = UNITS // WAVES
DEVICES: Final = 8
SETTLED_SECONDS: Final = 15.0
LEAST_OF_THE_FLOOR: Final = 0.75
KUEUE_PER_SECOND: Final = 42.7
"""The figure that Kueue publishes of its own performance test."""
POOL: Final = "nvidia"


class Wave(NamedTuple):
    """The admissions of one namespace."""

    seconds: float
    calls: Sequence[Call]
    """Calls until the last pod was admitted."""

    @property
    def per_second(self) -> float:
        """Admissions a second."""
        return SIZE / self.seconds


def list_namespaces(kind: str) -> list[str]:
    """Return the namespaces of the `controller` or the `loop`."""
    return [f"{kind}-{number}" for number in range(WAVES)]


def find_wave(cluster: MeasuredCluster, start_bytes: int, begin: datetime, namespace: str) -> Wave:
    """Return the wave that began then, by the times of the audit log."""
    calls = list(cluster.audit.of_user(cluster.audit.read(start_bytes)))
    admissions = [
        call
        for call in calls
        if (call.verb, call.resource, call.object_ref.namespace) == ("patch", "pods", namespace) and call.succeeded
    ]
    if len(admissions) != SIZE:
        raise RuntimeError(f"{len(admissions)} pods were patched in {namespace}, not {SIZE}")
    end = max(call.stage_timestamp for call in admissions)
    return Wave((end - begin).total_seconds(), [call for call in calls if call.stage_timestamp <= end])


async def admit_by_controller(cluster: MeasuredCluster, store: Store, namespace: str) -> Wave:
    """Lift the quota of a namespace, and wait until all its pods are admitted."""
    start = cluster.audit.size_bytes
    quotas = [{"namespace": "*", "devices": 0}, *({"namespace": name} for name in list_namespaces("controller"))]
    lifted = quotas[: 2 + list_namespaces("controller").index(namespace)]
    begin = datetime.now(UTC)
    await cluster.client.patch_merge(
        ACCELERATOR_POOLS, POOL, None, {"spec": {"quotas": lifted}}, field_manager="administrator"
    )
    await eventually(lambda: not any(find_gate(pod) is not None for pod in store.list(PODS, namespace)), LIMIT_SECONDS)
    return find_wave(cluster, start, begin, namespace)


class BareLoop:
    """The loop, which writes as the controller does."""

    def __init__(self, client: Client, store: Store, nodes: Iterable[str], batch: int, statuses: int) -> None:
        self._client, self._store = client, store
        self._nodes, self._batch, self._statuses = iter(nodes), batch, statuses

    async def admit(self, namespace: str) -> None:
        """Admit all pods of a namespace."""
        pods = self._store.list(PODS, namespace)
        services = self._store.list(INFERENCE_SERVICES, namespace)
        async with asyncio.TaskGroup() as tasks:
            told = enumerate(itertools.islice(itertools.cycle(services), self._statuses))
            tellers = [tasks.create_task(self._tell(told)) for _ in range(WORKERS)]
            for begin in range(0, len(pods), self._batch):
                batch = pods[begin : begin + self._batch]
                await self._write_ledger(batch)
                waiting = iter(batch)
                await asyncio.gather(*(self._ungate(waiting) for _ in range(WRITES_AT_ONCE)))
            for teller in tellers:
                teller.cancel()

    async def _write_ledger(self, pods: Iterable[Obj]) -> None:
        claims = [
            {"uid": pod["metadata"]["uid"], "name": pod["metadata"]["name"], "cells": ["node/any"]} for pod in pods
        ]
        operations = [{"op": "add", "path": "/data/loop.json", "value": str(claims)}]
        await self._client.patch_json(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE, operations)

    async def _ungate(self, pods: Iterable[Obj]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            operations = admit_pod(pod, next(self._nodes))
            await self._client.patch_json(PODS, metadata["name"], metadata["namespace"], operations)

    async def _tell(self, services: Iterable[tuple[int, Obj]]) -> None:
        for number, service in services:
            status = {name: value for name, value in service["status"].items() if name != "queue"}
            status["phase"] = ("Pending", "Loading")[number // SIZE % 2]
            await apply_status(self._client, INFERENCE_SERVICES, service, status, FIELD_MANAGER)


async def run() -> None:
    """Start all parts, measure, and print the figures."""
    namespaces = [*list_namespaces("controller"), *list_namespaces("loop")]
    async with queue_cluster(*namespaces) as (cluster, store):
        await cluster.client.create(
            ACCELERATOR_POOLS,
            {
                "metadata": {"name": POOL},
                "spec": {"accelerator": POOL, "quotas": [{"namespace": "*", "devices": 0}]},
            },
        )
        nodes = await make_nodes(cluster.client, [DEVICES] * NODE_COUNT)
        cluster.controller.start()
        for namespace in namespaces:
            await work_in_parallel(lambda number: serve(cluster.client, namespace, f"s{number:05}", DEVICES // 2), SIZE)  # noqa: B023
        for namespace in namespaces:
            await wait_until_queued(store, namespace, SIZE)
        await cluster.audit.wait_for_silence(SETTLED_SECONDS, LIMIT_SECONDS)
        waves, floors = [], []
        await cluster.controller.stop()
        for number in range(WAVES):
            # A new leader tells each service its place at once; then nothing is left to be told.
            cluster.controller.start()
            await cluster.audit.wait_for_silence(SETTLED_SECONDS, LIMIT_SECONDS)
            wave = await admit_by_controller(cluster, store, f"controller-{number}")
            await cluster.controller.stop()
            waves.append(wave)
            floors.append(await admit_by_loop(cluster, store, f"loop-{number}", nodes, wave))
    show(waves, floors)


async def admit_by_loop(
    cluster: MeasuredCluster, store: Store, namespace: str, nodes: Sequence[str], wave: Wave
) -> Wave:
    """Admit the pods of a namespace by the bare loop."""
    kinds = count_kinds(wave.calls)
    batch = -(-SIZE // max(1, kinds["patch configmaps"]))
    statuses = kinds["patch inferenceservices/status"]
    login = credentials.load(await cluster.plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT))
    # From the last node on: the controller has filled others.
    free = [node for node in find_free_nodes(store, nodes) for _ in range(2)]
    async with connect(login) as client:
        start, begin = cluster.audit.size_bytes, datetime.now(UTC)
        await BareLoop(client, store, free, batch, statuses).admit(namespace)
        return find_wave(cluster, start, begin, namespace)


def find_free_nodes(store: Store, nodes: Iterable[str]) -> list[str]:
    """Return the nodes without a pod of a service."""
    taken = {pod["spec"].get("nodeName") for pod in store.list(PODS)}
    return [node for node in nodes if node not in taken]


def count_kinds(calls: Iterable[Call]) -> collections.Counter[str]:
    """Return the number of calls by verb and resource."""
    return collections.Counter(f"{call.verb} {call.resource}" for call in calls)


def show(waves: Sequence[Wave], floors: Sequence[Wave]) -> None:
    """Print the figures."""
    rate = WAVES * SIZE / sum(each.seconds for each in waves)
    floor = WAVES * SIZE / sum(each.seconds for each in floors)
    kinds = count_kinds(call for each in waves for call in each.calls)
    floor_kinds = count_kinds(call for each in floors for call in each.calls)
    print_figures(
        f"{WAVES} times {SIZE} admissions on {NODE_COUNT} nodes, beside as many by a bare loop, in turns",
        [
            Figure("admissions", rate, floor, LEAST_OF_THE_FLOOR * floor, "/s", at_least=True),
            Figure("  Kueue publishes", KUEUE_PER_SECOND, None, None, "/s"),
            *(
                Figure(f"  wave {number}", wave.per_second, bare.per_second, None, "/s")
                for number, (wave, bare) in enumerate(zip(waves, floors, strict=True))
            ),
            *(
                Figure(f"{kind}, for each admission", count / UNITS, floor_kinds[kind] / UNITS, None, "")
                for kind, count in kinds.most_common()
            ),
        ],
    )


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.queue_admissions"]))
    asyncio.run(run())
