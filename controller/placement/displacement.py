"""Displacement: the reason why a process should move to another host although its spec is the wanted one.

There are several causes and one way: a displaced process serves until its replacement on another host answers, and is
then stopped (`controller/services/rollout.py`). The replacement avoids the host.

An upgrade of an agent is no cause: engines run on while their agent is replaced.
"""

import functools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.placement.capacity import HostCapacity, list_eligible_hosts
from controller.placement.node_rules import find_untolerated
from controller.placement.queue_places import parse_time
from controller.placement.queued_service import HostDemands, require_host
from controller.placement.units import HostRequirement
from controller.reconcile.conditions import find
from controller.reconcile.indexes import HAS_ORDERS, ORDERS_INDEX
from controller.reconcile.plan import decode_stored
from crds.meta import DISRUPTION_TARGET, MOVES, Toleration
from crds.metalhost import HostTaint, MetalHost
from crds.metalprocess import HOLDS_NO_MEMORY, MetalProcess
from kube.resources import METAL_HOSTS
from kube.store import Store

DRAIN: Final = "Drain"
TAINT: Final = "Taint"
REBALANCE: Final = "Rebalance"
"""Causes; those that an agent reports in condition DisruptionTarget have its reason, such as MemoryPressure."""
REQUEST_SECONDS: Final = 600.0
"""Time for which a request to rebalance holds: a host that joins days later moves nothing by surprise."""


class Displacement(NamedTuple):
    """The reason why a process should leave its host."""

    cause: str
    """One CamelCase word."""
    message: str


NO_DISPLACEMENTS: Final[Mapping[str, Displacement]] = MappingProxyType({})


class HostOrders(NamedTuple):
    """An administrator's orders about the processes of a host."""

    is_drained: bool
    evicting: tuple[HostTaint, ...]
    """Its taints with effect NoExecute."""


def read_orders(store: Store) -> Mapping[str, HostOrders]:
    """Return the orders of the hosts that have any, by name: the same object while none changes."""
    hosts = decode_stored(store, METAL_HOSTS, store.by_index(METAL_HOSTS, ORDERS_INDEX, HAS_ORDERS), MetalHost)
    # The argument is a tuple, since it is the key of a cache.
    return _share_orders(
        tuple(
            (host.metadata.name, HostOrders(host.spec.drain, _list_evicting(host.spec.taints)))
            for host in sorted(hosts, key=lambda host: host.metadata.name)
        )
    )


@functools.lru_cache(maxsize=64)
def _share_orders(orders: tuple[tuple[str, HostOrders], ...]) -> Mapping[str, HostOrders]:
    """Return one shared object for equal orders, so that what is derived from it stays cached."""
    return dict(orders)


def _list_evicting(taints: Iterable[HostTaint]) -> tuple[HostTaint, ...]:
    """Return the taints that also displace processes which run already: those with the effect NoExecute."""
    return tuple(taint for taint in taints if taint.effect == "NoExecute")


def find_displacements(
    processes: Iterable[MetalProcess],
    orders: Mapping[str, HostOrders],
    tolerations: Collection[Toleration],
    moved: Container[str],
) -> dict[str, Displacement]:
    """Return why processes of a service should leave their hosts, by uid; one that may stay is absent.

    Args:
        processes: the processes of the service.
        orders: the orders of administrators, by host.
        tolerations: the tolerations of the service.
        moved: uids of processes that move to a better host.
    """
    bound = ((process, process.spec.host_name) for process in processes)
    # A process without a host has none to leave; None: it may stay.
    causes = {
        process.metadata.uid: _find_cause(process, host, orders.get(host), tolerations, moved)
        for process, host in bound
        if host is not None
    }
    return {uid: cause for uid, cause in causes.items() if cause is not None}


def _find_cause(
    process: MetalProcess,
    host: str,
    orders: HostOrders | None,
    tolerations: Collection[Toleration],
    moved: Container[str],
) -> Displacement | None:
    """Return why a process should leave its host: orders first, then what the agent reports, then a move; or None."""
    # 1. The administrator's orders.
    if orders is not None and orders.is_drained:
        return Displacement(DRAIN, f"host {host} is drained")
    if orders is not None and (taint := find_untolerated(orders.evicting, tolerations)) is not None:
        return Displacement(TAINT, f"host {host} has the taint {taint.text}, which the service does not tolerate")

    # 2. The agent's report, such as of memory pressure.
    reported = find(process.status.conditions, DISRUPTION_TARGET)
    if reported is not None and reported.status == "True":
        return Displacement(reported.reason, f"host {host}: {reported.message}")

    # 3. A move to a better host.
    if process.metadata.uid in moved:
        return Displacement(REBALANCE, f"host {host} is left for a better one")
    return None


def list_moved(processes: Iterable[MetalProcess], *, bound_only: bool = False) -> set[str]:
    """Return the uids of the processes for which a living replacement exists that was made to move to a better host.

    The annotation MOVES of a replacement has the uid of the process in whose place it was made.

    bound_only: count only replacements that have a host.
    """
    return {
        uid
        for process in processes
        if (uid := process.metadata.annotations.get(MOVES))
        and process.metadata.deletion_timestamp is None
        and process.status.phase not in HOLDS_NO_MEMORY
        and (process.spec.host_name is not None or not bound_only)
    }


def is_requested(annotation: str | None, now: datetime) -> bool:
    """Return whether the annotation that asks to rebalance a service, which is a time, holds now."""
    requested = parse_time(annotation)
    return requested is not None and abs((now - requested).total_seconds()) < REQUEST_SECONDS


def choose_moves(
    processes: Sequence[MetalProcess],
    requested_at: str | None,
    demands: HostDemands,
    capacities: Sequence[HostCapacity],
    now: datetime,
) -> set[str]:
    """Return the uids of the processes of a service that move to a better host; of new moves one at a time.

    Args:
        processes: the processes of the service with the wanted spec.
        requested_at: the annotation that asks to rebalance the service, which is a time.
        demands: the demands of the service on its hosts.
        capacities: the capacity that each live host has left.
        now: the wall clock.
    """
    # 1. A move whose replacement has a host already goes on, whatever becomes of the request.
    moved = list_moved(processes, bound_only=True) & {metal_process.metadata.uid for metal_process in processes}
    requested = parse_time(requested_at)
    if moved or requested is None or not is_requested(requested_at, now):
        return moved

    # 2. Others begin only while the annotation asks for them, and only of processes that are ready and older than the
    #    request, so that none moves twice for it.
    settled = [
        metal_process
        for metal_process in processes
        if metal_process.status.phase == "Ready"
        and metal_process.metadata.deletion_timestamp is None
        and (created := parse_time(metal_process.metadata.creation_timestamp)) is not None
        and created < requested
    ]

    # 3. A move whose replacement still waits (`begun`) is judged first, and given up when no host is better any more.
    begun = list_moved(processes)
    for process in sorted(settled, key=lambda process: (process.metadata.uid not in begun, process.metadata.name)):
        if _has_better_host(process, processes, require_host(process, demands), capacities):
            return {process.metadata.uid}
    return set()


def _has_better_host(
    process: MetalProcess,
    siblings: Iterable[MetalProcess],
    requirement: HostRequirement,
    capacities: Sequence[HostCapacity],
) -> bool:
    """Return whether an open host is better for a process than its own; False if its own host is not live.

    Whether the weights are there does not count: a host that has just joined has none. `siblings` are the processes of
    its service, itself among them.
    """
    own_host, needed = process.spec.host_name, process.spec.memory_bytes
    others = [sibling for sibling in siblings if sibling is not process]
    present = next((capacity for capacity in capacities if capacity.host == own_host), None)
    if present is None:
        return False

    # Hosts that rejected a sibling are left out.
    avoid = {own_host, *(other.spec.host_name for other in others if other.status.phase == "Rejected")}

    def rank(capacity: HostCapacity, free_bytes: int) -> tuple[int, int, int]:
        """Return a sort key: fewest siblings first, then most free memory, then most bandwidth."""
        siblings_there = sum(other.spec.host_name == capacity.host for other in others)
        return siblings_there, -free_bytes, -capacity.bandwidth_bytes_per_second

    # Its own host counts as if the process were gone: it would have `needed` bytes more.
    return any(
        host.free_bytes >= needed and rank(host, host.free_bytes) < rank(present, present.free_bytes + needed)
        for host in list_eligible_hosts(requirement, avoid, capacities)
    )
