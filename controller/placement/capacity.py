"""The capacity of hosts: the memory that each has left, and which of them a process may use.

The free memory of a host is computed from the objects alone: the memory that its agent reports, less that of the bound
processes that are not in that report yet.
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from controller.reconcile.conditions import find
from controller.reconcile.indexes import HOST_INDEX
from crds.features import known_features
from crds.meta import ADDRESS_ACCEPTED, MEMORY_PRESSURE, PAUSED
from crds.metalhost import MetalHost
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from kube.store import Store

_HOLDS_NO_MEMORY: Final = frozenset({"Stopped", "Rejected"})
_ANY_NAMESPACE: Final = ""

MemoryPool = tuple[str, str, frozenset[str]]
"""Runtime, namespace and features of a process, which decide about the hosts that may run it."""
LargestFree = Mapping[tuple[str, str], Mapping[frozenset[str], int]]
"""The most memory that one host has left: by runtime and namespace, then by the features that the agents know."""


class HostCapacity(NamedTuple):
    """The capacity that one host has left."""

    host: str
    runtimes: frozenset[str]
    free_bytes: int
    short_of_memory: bool = False
    """The host accepts no process, whatever its budget: other programs use its memory."""
    budget_bytes: int = 0
    """Memory for models in all, which does not change all the time."""
    namespaces: frozenset[str] = frozenset()
    """Namespaces that the host is given to; none: all."""
    address_problem: str = ""
    """The reason why no endpoint of the host is accepted; empty if they are, or if that is not decided yet."""
    pause: str = ""
    """The reason why its owner has paused the host; empty if it is not paused."""
    is_cordoned: bool = False
    """An administrator has cordoned or drains the host."""
    features: frozenset[str] = frozenset()
    """Features that its agent knows, beyond those of the first release."""
    agent_version: str = ""
    bandwidth_bytes_per_second: int = 0
    """Memory bandwidth of its chip; 0 if it is unknown."""

    @property
    def is_open(self) -> bool:
        """True if the host takes any process at all, provided that it fits."""
        return not (self.short_of_memory or self.address_problem or self.pause or self.is_cordoned)

    def accepts(self, namespace: str) -> bool:
        """Return whether the host is given to this namespace."""
        return not self.namespaces or namespace in self.namespaces


def _host_capacity(host: MetalHost, bound: Iterable[Obj]) -> HostCapacity:
    """Return the capacity that a host has left; a host whose free memory is not known has none.

    `availableBytes` already subtracts the processes that the host lists in `status.processes`. All other processes that
    are bound to the host are subtracted here, also one that is being deleted or is not `readable`: until the host
    reports it as Stopped or Rejected, it may hold its memory.
    """
    listed = {process.uid for process in host.status.processes}
    promised_bytes = sum(
        process["spec"]["memoryBytes"]
        for process in bound
        if process["metadata"]["uid"] not in listed and process.get("status", {}).get("phase") not in _HOLDS_NO_MEMORY
    )
    free_bytes = max(0, (host.status.available_bytes or 0) - promised_bytes)
    pressure, paused, accepted = (
        find(host.status.conditions, kind) for kind in (MEMORY_PRESSURE, PAUSED, ADDRESS_ACCEPTED)
    )
    return HostCapacity(
        host=host.metadata.name,
        runtimes=frozenset(host.status.runtimes),
        free_bytes=free_bytes,
        short_of_memory=pressure is not None and pressure.status == "True",
        budget_bytes=host.status.budget_bytes or host.status.available_bytes or 0,
        namespaces=frozenset(host.spec.namespaces),
        address_problem=accepted.message if accepted is not None and accepted.status == "False" else "",
        pause=paused.message if paused is not None and paused.status == "True" else "",
        is_cordoned=host.spec.is_cordoned,
        features=known_features(host.status),
        agent_version=host.status.agent_version,
        bandwidth_bytes_per_second=host.status.memory_bandwidth_bytes_per_second or 0,
    )


def _stored(store: Store, host: str) -> Obj:
    found = store.get(METAL_HOSTS, host)
    if found is None:
        raise KeyError(host)
    return found


def stored_capacities(store: Store, hosts: Iterable[MetalHost]) -> list[HostCapacity]:
    """Return the capacity of hosts of the store; each is computed once until the host or a process bound to it changes.

    Raises KeyError for a host that is not in the store.
    """
    found = []
    for host in hosts:
        name = host.metadata.name
        bound = store.by_index(METAL_PROCESSES, HOST_INDEX, name)
        compute = functools.partial(_host_capacity, host, bound)
        found.append(store.derive(METAL_HOSTS, _stored(store, name), "capacity", compute, bound))
    return found


def eligible_hosts(
    runtime: str,
    namespace: str,
    avoid: Collection[str | None],
    among: Iterable[HostCapacity],
    features: frozenset[str] = frozenset(),
) -> list[HostCapacity]:
    """Return the hosts that can take this engine, are given to the namespace, can be reached and are not to be avoided.

    Their agents know all of `features`.
    The host with most free memory comes first, ties are in the order of names.
    """
    found = [
        capacity
        for capacity in among
        if runtime in capacity.runtimes
        and capacity.is_open
        and capacity.host not in avoid
        and capacity.accepts(namespace)
        and features <= capacity.features
    ]
    return sorted(found, key=lambda capacity: (-capacity.free_bytes, capacity.host))


def memory_pool(process: Obj) -> MemoryPool:
    """Return the pool of hosts that a process may use."""
    spec = process["spec"]
    return spec["runtime"], process["metadata"]["namespace"], frozenset(spec.get("features", ()))


def largest_free(capacities: Iterable[HostCapacity]) -> LargestFree:
    """Return the most memory that one open host has left, in bytes."""
    largest: dict[tuple[str, str], dict[frozenset[str], int]] = {}
    for capacity in capacities:
        for runtime in capacity.runtimes if capacity.is_open else ():
            for namespace in capacity.namespaces or (_ANY_NAMESPACE,):
                by_features = largest.setdefault((runtime, namespace), {})
                by_features[capacity.features] = max(capacity.free_bytes, by_features.get(capacity.features, 0))
    return largest


def largest_for(largest: LargestFree, pool: MemoryPool) -> int:
    """Return the most memory that one of the hosts has left which a process may use; -1 if there is no such host."""
    runtime, namespace, features = pool
    return max(
        (
            free_bytes
            for place in ((runtime, namespace), (runtime, _ANY_NAMESPACE))
            for known, free_bytes in largest.get(place, {}).items()
            if features <= known
        ),
        default=-1,
    )


def fits_largest(largest: LargestFree, process: Obj) -> bool:
    """Return whether one open host has room for a process; `largest` is what `largest_free` returned."""
    return bool(process["spec"]["memoryBytes"] <= largest_for(largest, memory_pool(process)))
