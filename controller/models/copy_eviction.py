"""The eviction of copies from nodes whose cache is full: the unused ones go, the one unused for the longest time first.

All Models come to the same result by one pure function over all copies of a node, and each deletes only its own.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from controller.reconcile.indexes import NODE_INDEX, SHORTAGE_INDEX
from kube.client import Obj
from kube.resources import MODELS, NODES, ObjectKey, object_key
from kube.store import Store


class StoredCopy(NamedTuple):
    """One copy on a node, of any Model."""

    unused_since: str
    """Empty: the copy is in use, and stays."""
    model: ObjectKey
    claim: str
    """metadata.uid of its PersistentVolumeClaim."""
    size_bytes: int


def choose_victims(copies: Iterable[StoredCopy], limit_bytes: int) -> list[StoredCopy]:
    """Return the copies of one node that go, so that the others take at most `limit_bytes` if possible."""
    copies = list(copies)
    total = sum(stored_copy.size_bytes for stored_copy in copies)
    if total <= limit_bytes:
        return []
    victims = []
    for copy in sorted(stored_copy for stored_copy in copies if stored_copy.unused_since):
        if total > limit_bytes:
            victims.append(copy)
            total -= copy.size_bytes
    return victims


def find_victims(store: Store, node: str, limit_bytes: int | None) -> list[StoredCopy]:
    """Return the copies that go from a node of the cluster, whose limit the administrator states, or its disk."""
    short = store.by_index(MODELS, SHORTAGE_INDEX, node)
    limits = [
        shortage["keepBytes"]
        for model in short
        for shortage in model["status"]["shortages"]
        if shortage["node"] == node
    ]
    if limit_bytes is not None:
        limits.append(limit_bytes)
    return choose_victims(_list_copies(store, node), min(limits)) if limits else []


def count_bytes(store: Store, node: str) -> int:
    """Return the size of all copies on a node."""
    return sum(copy.size_bytes for copy in _list_copies(store, node))


def models_of_victims(store: Store, model: Obj, limit_bytes: int | None) -> list[ObjectKey]:
    """Return the Models with a copy that goes from one of the nodes of this Model."""
    nodes = {entry["node"] for part in _read_parts(model) for entry in part}
    return sorted({victim.model for node in sorted(nodes) for victim in find_victims(store, node, limit_bytes)})


def read_space(model: Obj) -> object:
    """Return what the eviction of other Models' copies depends on."""
    return [part for part in _read_parts(model) if part]


def _read_parts(model: Obj) -> list[list[Obj]]:
    status = model.get("status") or {}
    return [status.get("copies") or [], status.get("shortages") or []]


def _list_copies(store: Store, node: str) -> Sequence[StoredCopy]:
    """Return the copies on a node, which are gathered once for all Models with a copy there."""
    models, stored = store.by_index(MODELS, NODE_INDEX, node), store.get(NODES, node)
    gather = functools.partial(_gather_copies, store, node, models)
    return gather() if stored is None else store.derive(NODES, stored, "copies", gather, models)


def _gather_copies(store: Store, node: str, models: Sequence[Obj]) -> Sequence[StoredCopy]:
    by_node = (store.derive(MODELS, model, "copies", functools.partial(_group_copies, model)) for model in models)
    return [copy for copies in by_node for copy in copies[node]]


def _group_copies(model: Obj) -> Mapping[str, Sequence[StoredCopy]]:
    """Return the copies of a Model by their node."""
    key, by_node = object_key(model), dict[str, list[StoredCopy]]()
    for copy in model["status"]["copies"]:
        stored = StoredCopy(copy.get("unusedSince", ""), key, copy["claim"], copy.get("sizeBytes", 0))
        by_node.setdefault(copy["node"], []).append(stored)
    return by_node
