"""The hosts that may inspect Models of a namespace, and the Models that a change of a host concerns.

A host that was not given to a namespace (`MetalHost.spec.namespaces`) is neither asked about its Models nor believed.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from controller.reconcile.conditions import find
from controller.reconcile.indexes import INSPECTOR_INDEX, REASON_INDEX, controller_of
from controller.reconcile.plan import decode_stored
from crds.metalhost import MetalHost
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, MODELS, ObjectKey, object_key
from kube.store import Store

INSPECTED_REASONS: Final = frozenset({"Inspected", "HostInspects"})
"""Reasons of a Model that needs no inspection."""


class InspectingHost(NamedTuple):
    """A host that is given to a namespace."""

    is_live: bool
    """It renews its Lease and is not cordoned."""
    is_lost: bool = False
    """Its Lease has expired."""
    load: int = 0
    """Number of inspections that it has."""


def list_inspecting_hosts(store: Store, namespace: str) -> Mapping[str, InspectingHost]:
    """Return the hosts that are given to a namespace, by name."""
    found = {}
    for host in decode_stored(store, METAL_HOSTS, store.list(METAL_HOSTS), MetalHost):
        given = host.spec.namespaces
        if host.metadata.deletion_timestamp is not None or (given and namespace not in given):
            continue
        ready = find(host.status.conditions, "Ready")
        liveness = ready.status if ready is not None else "Unknown"
        found[host.metadata.name] = InspectingHost(
            is_live=liveness == "True" and not host.spec.is_cordoned,
            is_lost=liveness == "False",
            load=len(store.by_index(METAL_PROCESSES, INSPECTOR_INDEX, host.metadata.name)),
        )
    return found


def inspecting_facts(host: Obj) -> object:
    """Return what decides about the inspections of a host: its spec and its liveness."""
    status, metadata = host.get("status") or {}, host["metadata"]
    liveness = [each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"]
    return metadata["uid"], metadata.get("deletionTimestamp"), host.get("spec"), liveness


def models_of_host(store: Store, host: Obj) -> list[ObjectKey]:
    """Return the Models that a host inspects, and those that are not inspected and may be by this host."""
    inspections = store.by_index(METAL_PROCESSES, INSPECTOR_INDEX, host["metadata"]["name"])
    owners = ((each["metadata"]["namespace"], controller_of(each)) for each in inspections)
    found = {ObjectKey(namespace, owner["name"]) for namespace, owner in owners if owner is not None}
    for reason in set(store.index_values(MODELS, REASON_INDEX)) - INSPECTED_REASONS:
        found |= {object_key(each) for each in store.by_index(MODELS, REASON_INDEX, reason)}
    return sorted(found)
