"""The capacity of hosts: the memory that each has left, and which of them a process may use.

The free memory of a host is computed from the objects alone: the memory that its agent reports, less that of the bound
processes that are not in that report yet.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from controller.placement.units import HostRequirement
from controller.reconcile.conditions import find
from controller.reconcile.indexes import HOST_INDEX
from controller.reconcile.plan import decode_stored
from crds.meta import ADDRESS_ACCEPTED, FLAPPING, MEMORY_PRESSURE, PAUSED, STABLE
from crds.metalhost import HostTaint, MetalHost
from crds.metalprocess import HostedProcess
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from kube.store import Store

CORDONED: Final = "Cordoned"
HOST_PAUSED: Final = "Paused"
SHORT_OF_MEMORY: Final = "MemoryPressure"
ADDRESS_REFUSED: Final = "AddressRefused"
"""Reasons for which a host is closed."""
MOST_HOST_BYTES: Final = 1 << 44
"""Memory that no host exceeds, whatever a stolen token reports: sums over hosts fit into the status of a pool."""


class Closure(NamedTuple):
    """The reason why a cell takes no new unit; it is empty if the cell is open."""

    reason: str = ""
    message: str = ""


OPEN: Final = Closure()


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
    distrust: str = ""
    """The reason why the host is trusted late, as its Lease has expired several times; empty if it is trusted."""
    is_cordoned: bool = False
    """An administrator has cordoned or drains the host."""
    bandwidth_bytes_per_second: int = 0
    """Memory bandwidth of its chip; 0 if it is unknown."""
    weights: frozenset[str] = frozenset()
    """Identities of the weights on its disk; none: they are unknown, or there are none."""
    labels: frozenset[tuple[str, str]] = frozenset()
    taints: tuple[HostTaint, ...] = ()

    @property
    def closure(self) -> Closure:
        """The reason why the host takes no process, even one that fits; OPEN if it takes some."""
        if self.address_problem:
            return Closure(ADDRESS_REFUSED, self.address_problem)
        if self.distrust:
            return Closure(FLAPPING, self.distrust)
        if self.is_cordoned:
            return Closure(CORDONED, f"host {self.host} is cordoned: pomona host uncordon {self.host}")
        if self.pause:
            return Closure(HOST_PAUSED, self.pause)
        if self.short_of_memory:
            return Closure(SHORT_OF_MEMORY, f"other programs use the memory of host {self.host}")
        return OPEN

    @property
    def is_open(self) -> bool:
        """True if the host takes any process at all, provided that it fits."""
        return self.closure == OPEN

    def accepts(self, namespace: str) -> bool:
        """Return whether the host is given to this namespace."""
        return not self.namespaces or namespace in self.namespaces


def _compute_capacity(store: Store, host: MetalHost, bound: Sequence[Obj]) -> HostCapacity:
    """Return the capacity that a host has left; one that reports no free memory has none.

    `availableBytes` already subtracts the processes that the host lists in `status.processes`. All other processes that
    are bound to the host are subtracted here, also one that is being deleted, or has values of a newer version: until
    the host reports it as Stopped or Rejected, it may hold its memory.
    """
    # 1. What the host's report does not subtract yet.
    listed = {process.uid for process in host.status.processes}
    promised_bytes = sum(
        process.spec.memory_bytes
        for process in decode_stored(store, METAL_PROCESSES, bound, HostedProcess)
        if process.metadata.uid not in listed and process.holds_memory
    )

    # 2. Its memory in all, and what is free of it. Both are limited, since a host may report anything.
    available_bytes = host.status.available_bytes or 0
    budget_bytes = max(0, min(host.status.budget_bytes or available_bytes, MOST_HOST_BYTES))
    free_bytes = max(0, min(available_bytes - promised_bytes, MOST_HOST_BYTES))

    # 3. The conditions that may close it.
    conditions = host.status.conditions
    pressure, paused = find(conditions, MEMORY_PRESSURE), find(conditions, PAUSED)
    accepted, stable = find(conditions, ADDRESS_ACCEPTED), find(conditions, STABLE)
    return HostCapacity(
        host=host.metadata.name,
        runtimes=frozenset(host.status.runtimes),
        free_bytes=free_bytes,
        short_of_memory=pressure is not None and pressure.status == "True",
        budget_bytes=budget_bytes,
        namespaces=frozenset(host.spec.namespaces),
        address_problem=accepted.message if accepted is not None and accepted.status == "False" else "",
        pause=paused.message if paused is not None and paused.status == "True" else "",
        distrust=stable.message if stable is not None and stable.status == "False" else "",
        is_cordoned=host.spec.is_cordoned,
        bandwidth_bytes_per_second=host.status.memory_bandwidth_bytes_per_second or 0,
        weights=frozenset(host.status.weights),
        labels=frozenset(host.metadata.labels.items()),
        taints=tuple(host.spec.taints),
    )


def _get_host(store: Store, host: str) -> Obj:
    """Return a host of the store. Raises KeyError if there is none of this name."""
    stored = store.get(METAL_HOSTS, host)
    if stored is None:
        raise KeyError(host)
    return stored


def list_capacities(store: Store, hosts: Iterable[MetalHost]) -> list[HostCapacity]:
    """Return the capacity of hosts of the store.

    Each is kept in the store (`derive`) until the host, or a process that is bound to it, changes. Raises KeyError for
    a host that is not in the store.
    """
    capacities = []
    for host in hosts:
        name = host.metadata.name
        bound = store.by_index(METAL_PROCESSES, HOST_INDEX, name)  # the processes that are bound to it
        compute = functools.partial(_compute_capacity, store, host, bound)
        capacities.append(store.derive(METAL_HOSTS, _get_host(store, name), "capacity", compute, bound))
    return capacities


def list_eligible_hosts(
    requirement: HostRequirement, avoid: Collection[str | None], among: Iterable[HostCapacity]
) -> list[HostCapacity]:
    """Return the hosts that meet a requirement, are open and are not to be avoided.

    The host with most free memory comes first, ties are in the order of names.
    """
    suitable = [
        capacity
        for capacity in among
        if capacity.is_open and capacity.host not in avoid and not requirement.refuse_host(capacity)
    ]
    return sorted(suitable, key=lambda capacity: (-capacity.free_bytes, capacity.host))
