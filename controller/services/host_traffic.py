"""The tokens per second of services on hosts: the sum of what agents report of their processes.

An agent writes its number once a minute at most. What changes is a number for people, so that a service is decided
again for it once a minute at most, however many processes it has.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from controller.reconcile.plan import Leading, Snapshot, decode_stored
from controller.services.rollout import host_is_lost
from controller.services.traffic import MOST_TOKENS_PER_SECOND, Traffic, differs_notably
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from crds.rate import MOST_REPORTED
from kube.client import Obj
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey, Resource
from kube.store import Store

PAUSE_SECONDS: Final = 60.0
_WAKE_SECONDS: Final = 5.0


def find_host_tokens(snapshot: Snapshot, namespace: str, service_uid: str) -> float | None:
    """Return the tokens per second of a service on hosts; None: it has no process there that reports them."""
    children = snapshot.children(METAL_PROCESSES, namespace, service_uid)
    if not children:
        return None
    processes = decode_stored(snapshot.store, METAL_PROCESSES, children, MetalProcess)
    names = {each.spec.host_name for each in processes if each.spec.host_name}
    there = (snapshot.read(METAL_HOSTS, ObjectKey("", name), MetalHost) for name in sorted(names))
    return sum_host_tokens(processes, {each.metadata.name: each for each in there if each is not None})


def sum_host_tokens(processes: Iterable[MetalProcess], hosts: Mapping[str, MetalHost]) -> float | None:
    """Return the sum over the processes that serve; a host that is lost reports nothing any more."""
    rates = [
        min(float(each.status.tokens_per_second), MOST_REPORTED)
        for each in processes
        if each.status.tokens_per_second and each.status.phase == "Ready"
        if not host_is_lost(each.spec.host_name or "", hosts)
    ]
    return sum(rates) if rates else None


def take_host_tokens(shown: Traffic, of_hosts: float | None) -> Traffic:
    """Return that part of the traffic in a status that is of pods."""
    rate = shown.tokens_per_second
    return shown if rate is None or of_hosts is None else shown._replace(tokens_per_second=max(0.0, rate - of_hosts))


def add_host_tokens(of_pods: Traffic, of_hosts: float | None, shown: Traffic) -> Traffic:
    """Return the traffic of a service in pods and on hosts; a sum that hardly differs from what is shown is that."""
    if of_hosts is None:
        return of_pods
    total = min((of_pods.tokens_per_second or 0.0) + of_hosts, MOST_TOKENS_PER_SECOND)
    found, before = Traffic(tokens_per_second=total), Traffic(tokens_per_second=shown.tokens_per_second)
    return of_pods._replace(tokens_per_second=total if differs_notably(before, found) else shown.tokens_per_second)


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
    return (process.get("status") or {}).get("tokensPerSecond")
