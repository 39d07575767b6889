"""The changes for which the queue is planned again.

Agents report their hosts every few seconds and pods change all the time; a change that no decision of the queue reads,
or that makes room for none that waits, plans nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from controller.placement.effects import find_gate
from controller.placement.units import Amounts, Cell, Unit, fits
from crds.meta import DISRUPTION_TARGET, ENQUEUED_AT, NOMINATED
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, PODS, Resource

READ: Final = frozenset({ACCELERATOR_POOLS, PODS, METAL_PROCESSES, INFERENCE_SERVICES, DEPLOYMENTS})
"""Resources of which `decisive_facts` are compared."""
_FINAL_PHASES: Final = frozenset({"Succeeded", "Failed", "Stopped", "Rejected"})


class RoomWatch:
    """The cells as they were when they were last looked at, and the least that a waiting unit needs of one."""

    def __init__(self) -> None:
        self._cells: Mapping[str, Cell] = {}
        self._least: Mapping[str, Amounts] = {}

    def expect(self, waiting: Iterable[Unit]) -> None:
        """Take the units that wait from now on."""
        self._least = find_least(waiting)

    def take_cells(self, cells: Iterable[Cell]) -> bool:
        """Return whether a cell has changed so that a waiting unit may fit, or may have lost what it was promised."""
        before, self._cells = self._cells, {cell.id: cell for cell in cells}
        if not self._least:
            return False
        gone = before.keys() - self._cells.keys()
        return bool(gone) or any(
            self._matters(before.get(name), cell) for name, cell in self._cells.items() if cell is not before.get(name)
        )

    def _matters(self, old: Cell | None, new: Cell) -> bool:
        if old is None or msgspec.structs.replace(old, free=new.free) != new:
            return True
        least = self._least.get(new.pool)
        has_gained = any(amount > old.free.get(name, 0) for name, amount in new.free.items())
        return least is not None and has_gained and fits(least, new.free)


def find_least(waiting: Iterable[Unit]) -> Mapping[str, Amounts]:
    """Return by pool the least of each resource that any waiting unit needs: a cell with less has room for none."""
    least: dict[str, dict[str, int]] = {}
    for unit in waiting:
        for pool in unit.pools:
            for part in unit.parts:
                known = least.setdefault(pool, dict(part))
                for name in [name for name in known if name not in part]:
                    del known[name]
                for name in known:
                    known[name] = min(known[name], part[name])
    return least


def decisive_facts(resource: Resource, obj: Obj) -> object:
    """Return what the queue reads of an object: another change of it wakes nobody."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if resource == INFERENCE_SERVICES:
        is_current = status.get("observedGeneration") == metadata.get("generation")
        return metadata.get("generation"), status.get("accelerator"), status.get("deviceMemoryBytes"), is_current
    if resource == ACCELERATOR_POOLS:
        return metadata["uid"], metadata.get("generation")
    if resource == DEPLOYMENTS:
        # Its pods are units of the service once it exists, and may be seen before it is.
        return metadata["uid"]
    annotations = metadata.get("annotations") or {}
    conditions = {each["type"]: (each["status"], each.get("reason")) for each in status.get("conditions") or ()}
    return (
        metadata["uid"],
        "deletionTimestamp" in metadata,
        annotations.get(ENQUEUED_AT),
        annotations.get(NOMINATED),
        obj["spec"].get("hostName") or obj["spec"].get("nodeName"),
        # A better estimate changes it while a process waits.
        obj["spec"].get("memoryBytes"),
        find_gate(obj) is None,
        status.get("phase") in _FINAL_PHASES,
        conditions.get("PodScheduled"),
        conditions.get(DISRUPTION_TARGET),
    )
