"""The traffic of services on hosts: the sum of what agents report of their processes.

An agent writes its numbers once a minute at most. What changes is a number for people, so that a service is decided
again for it once a minute at most, however many processes it has.
"""

from typing import Final

from controller.reconcile.plan import Leading, Snapshot, decode_stored
from controller.services.metal_processes import read_hosts
from controller.services.rollout import is_host_lost
from controller.services.traffic import UNKNOWN_TRAFFIC, Traffic, combine_traffic, differs_notably
from crds.metalprocess import MetalProcess
from crds.rate import MOST_REPORTED
from kube.client import Obj
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, ObjectKey, Resource
from kube.store import Store

PAUSE_SECONDS: Final = 60.0
MOST_REQUESTS_REPORTED: Final = 1_000_000
"""Requests per minute that are believed of one process of a host."""
_WAKE_SECONDS: Final = 5.0


def find_host_traffic(snapshot: Snapshot, namespace: str, service_uid: str) -> Traffic:
    """Return the traffic of a service on hosts: the sum of what its processes report that serve on hosts that live."""
    children = snapshot.children(METAL_PROCESSES, namespace, service_uid)
    processes = decode_stored(snapshot.store, METAL_PROCESSES, children, MetalProcess)
    hosts = read_hosts(snapshot.store, {process.spec.host_name for process in processes})
    traffic = UNKNOWN_TRAFFIC
    for process in processes:
        status = process.status
        if status.phase != "Ready" or is_host_lost(process.spec.host_name or "", hosts):
            continue
        rate, requests, average = status.tokens_per_second, status.requests_per_minute, status.average_latency_ms
        if min(requests or 0, average or 0) < 0:  # these count nothing
            continue
        traffic = combine_traffic(
            traffic,
            Traffic(
                None if requests is None else min(requests, MOST_REQUESTS_REPORTED),
                average,
                min(float(rate), MOST_REPORTED) if rate else None,
            ),
        )
    return traffic


def add_host_traffic(of_pods: Traffic, of_hosts: Traffic, shown: Traffic) -> Traffic:
    """Return the traffic of a service in pods and on hosts; a sum that hardly differs from what is shown is that."""
    if of_hosts == UNKNOWN_TRAFFIC:
        return of_pods
    total = combine_traffic(of_pods, of_hosts)
    return total if differs_notably(shown, total) else shown


class HostTraffic:
    """Enqueues each service of which a process reports another number; `store` is the watch cache."""

    def __init__(self, store: Store) -> None:
        self._due: WorkQueue[ObjectKey] | None = None
        """None: this replica does not lead."""
        store.subscribe(self._take_change)

    async def run(self, leading: Leading) -> None:
        """Enqueue for ever."""

        async def enqueue(key: ObjectKey) -> None:
            leading.enqueue(INFERENCE_SERVICES, key)

        self._due = due = WorkQueue[ObjectKey](PAUSE_SECONDS)
        try:
            await run_workers(due, enqueue, 1, _WAKE_SECONDS)
        finally:
            self._due = None

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        if resource != METAL_PROCESSES or self._due is None or old is None or new is None:
            return
        service = new["spec"].get("serviceName")
        if service and _find_reported(old) != _find_reported(new):
            self._due.add(ObjectKey(new["metadata"]["namespace"], service))


def _find_reported(process: Obj) -> object:
    status = process.get("status") or {}
    return [status.get(field) for field in ("tokensPerSecond", "requestsPerMinute", "averageLatencyMs")]
