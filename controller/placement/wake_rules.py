"""The changes for which the queue is planned again.

Agents report their hosts every few seconds and pods change all the time; a change that no decision of the queue reads,
or that makes room for none that waits, plans nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from controller.placement.effects import find_gate
from controller.placement.units import Amounts, Cell, Unit, fits
from controller.reconcile.indexes import OWNER_INDEX, SERVICE_INDEX, controller_of, namespaced
from crds.meta import DISRUPTION_TARGET, ENQUEUED_AT, LABEL_SERVICE, NOMINATED
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, PODS, Resource
from kube.store import Store

_READ: Final = frozenset({ACCELERATOR_POOLS, PODS, METAL_PROCESSES, INFERENCE_SERVICES, DEPLOYMENTS})
_FINAL_PHASES: Final = frozenset({"Succeeded", "Failed", "Stopped", "Rejected"})


class RoomWatch:
    """The cells as last seen, and the least that any waiting unit needs."""

    def __init__(self) -> None:
        """Start without cells and without units that wait."""
        self._cells: Sequence[Cell] = ()
        self._least_needs: Mapping[str, Amounts] = {}

    def expect(self, waiting: Iterable[Unit]) -> None:
        """Note what the units need at the least that wait from now on."""
        self._least_needs = find_least(waiting)

    def take_cells(self, cells: Sequence[Cell]) -> bool:
        """Replace the cells; return whether a waiting unit may fit now, or may have lost what it was promised."""
        before, self._cells = self._cells, cells
        if not self._least_needs:  # no unit waits
            return False

        # This is called several times a second, and nearly always a few of the same cells have changed.
        changed = [(old, new) for old, new in zip(before, cells, strict=False) if old is not new]
        are_same_cells = len(before) == len(cells) and all(old.id == new.id for old, new in changed)
        if are_same_cells:
            return any(self._matters(old, new) for old, new in changed)

        # Cells have come or gone: compare them by `Cell.id`.
        old_cells, new_cells = {cell.id: cell for cell in before}, {cell.id: cell for cell in cells}
        has_lost_cell = not old_cells.keys() <= new_cells.keys()
        return has_lost_cell or any(
            self._matters(old_cells.get(name), cell)
            for name, cell in new_cells.items()
            if cell is not old_cells.get(name)
        )

    def _matters(self, old: Cell | None, new: Cell) -> bool:
        """Return whether a cell is new, has changed in more than amounts and ratings, or has got room for a unit."""
        if old is None or _drop_ratings(old, new) != new:
            return True
        # The least of each resource that any waiting unit of the pool needs; None: none waits there.
        least = self._least_needs.get(new.pool)
        has_gained = any(amount > old.free.get(name, 0) for name, amount in new.free.items())
        return least is not None and has_gained and fits(least, new.free)


def _drop_ratings(old: Cell, new: Cell) -> Cell:
    """Return the old cell with the new free amounts and ratings: if it then equals the new one, only these differ.

    `lasting` is what pods hold that are no units.
    """
    return msgspec.structs.replace(
        old,
        free=new.free,
        lasting=new.lasting,
        weights=new.weights,
        utilization_percent=new.utilization_percent,
        cost_permille=new.cost_permille,
    )


def find_least(waiting: Iterable[Unit]) -> Mapping[str, Amounts]:
    """Return by pool the least of each resource that any waiting unit needs: a cell with less has room for none.

    A resource that one of the units does not need is left out.
    """
    least: dict[str, dict[str, int]] = {}
    for unit in waiting:
        for pool in unit.pools:
            for part in unit.parts:
                amounts = least.setdefault(pool, dict(part))  # begins with the first part
                # What one part does not need at all is no obstacle to it.
                for name in [name for name in amounts if name not in part]:
                    del amounts[name]
                for name in amounts:
                    amounts[name] = min(amounts[name], part[name])
    return least


def is_decisive(store: Store, resource: Resource, old: Obj | None, new: Obj | None) -> bool:
    """Return whether the queue is planned again after a change; `old` and `new` are an object before and after it."""
    # `_READ`: the resources that decisions read, such as pods, processes and services.
    if resource not in _READ:
        return False
    obj = new or old
    if obj is None or not _is_of_units(store, resource, obj):
        return False
    if old is None or new is None:
        return True
    return decisive_facts(resource, old) != decisive_facts(resource, new)


def has_waiting_objects(store: Store) -> bool:
    """Return whether any pod or process waits, also one that is no unit here, such as the rest of a gang."""
    has_waiting_pod = any(find_gate(pod) is not None for pod in store.list(PODS))
    return has_waiting_pod or any("hostName" not in process["spec"] for process in store.list(METAL_PROCESSES))


def _is_of_units(store: Store, resource: Resource, obj: Obj) -> bool:
    """Return whether an object may concern a unit: a service without replicas does not, nor does a pod of a Job."""
    metadata = obj["metadata"]
    if resource == PODS:
        return LABEL_SERVICE in (metadata.get("labels") or {})
    if resource == INFERENCE_SERVICES:
        processes = store.by_index(METAL_PROCESSES, OWNER_INDEX, namespaced(metadata["namespace"], metadata["uid"]))
        return bool(processes or _list_pods(store, metadata["namespace"], metadata["name"]))
    if resource == DEPLOYMENTS:
        owner = controller_of(obj)
        return owner is not None and bool(_list_pods(store, metadata["namespace"], owner["name"]))
    return True


def _list_pods(store: Store, namespace: str, service: str) -> Sequence[Obj]:
    """Return the pods of a service."""
    return store.by_index(PODS, SERVICE_INDEX, namespaced(namespace, service))


def decisive_facts(resource: Resource, obj: Obj) -> object:
    """Return the facts of an object that decisions of the queue depend on; no other change starts a round."""
    metadata, status = obj["metadata"], obj.get("status") or {}

    if resource == INFERENCE_SERVICES:
        # The rest of a status counts only once it is of the present spec; units wait for that.
        generation = metadata.get("generation")
        if status.get("observedGeneration") != generation:
            return generation, status.get("accelerator")
        # A device class that is newly accepted makes room; another speed of one does not.
        assessed = [(speed["deviceClass"], speed.get("refusal")) for speed in status.get("speeds") or ()]
        accepted = sorted(name for name, refusal in assessed if refusal is None)
        return generation, status.get("accelerator"), status.get("deviceMemoryBytes"), accepted, len(assessed)

    if resource == ACCELERATOR_POOLS:
        return metadata["uid"], metadata.get("generation")
    if resource == DEPLOYMENTS:
        # Its pods are units of the service once it exists, and may be seen before it is.
        return metadata["uid"]

    # A pod or a process.
    annotations = metadata.get("annotations") or {}
    conditions = {
        condition["type"]: (condition["status"], condition.get("reason"))
        for condition in status.get("conditions") or ()
    }
    return (
        metadata["uid"],
        "deletionTimestamp" in metadata,
        annotations.get(ENQUEUED_AT),  # its place in the queue
        annotations.get(NOMINATED),  # the cells that are promised to it
        obj["spec"].get("hostName") or obj["spec"].get("nodeName"),  # None: it is not bound
        # A better estimate changes it while a process waits.
        obj["spec"].get("memoryBytes"),
        find_gate(obj) is None,
        status.get("phase") in _FINAL_PHASES,
        conditions.get("PodScheduled"),
        conditions.get(DISRUPTION_TARGET),
    )
