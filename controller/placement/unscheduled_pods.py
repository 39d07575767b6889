"""Pods that the queue admitted and the scheduler does not place: they go back to the queue, with their place.

The queue counts what it knows: a scheduler plugin, a volume or a port may stand in the way all the same. Such a pod
would hold the room of its cell for ever. Its service is not tried there again for some time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from controller.placement.units import Unit
from kube.client import Obj
from kube.resources import PODS, ObjectKey
from kube.store import Store

PINNED_SECONDS: Final = 60.0
"""Time for which the scheduler may refuse a pod that is pinned to its node."""
BLAME_SECONDS: Final = 4 * PINNED_SECONDS
"""Time in which a node that refuses pods of two namespaces is taken for the cause itself."""
UNPINNED_SECONDS: Final = 900.0
"""Time for which it may refuse one that goes to any node: an autoscaler adds a node within it, or none."""


class OverduePod(NamedTuple):
    """A unit that goes back."""

    unit: Unit
    message: str
    """The reason that the scheduler states."""


class OverduePods(NamedTuple):
    """The units that go back now."""

    found: tuple[OverduePod, ...]
    again_seconds: float | None
    """Time after which the next one does."""


class UnscheduledPods:
    """The time since when the scheduler refuses each admitted pod: no condition states it.

    The condition PodScheduled of a pod is False from its creation, when a gate was the reason.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Time of the loop, by uid of the unit."""
        self._refusals: dict[tuple[str, ObjectKey], float] = {}
        """Time of the loop when a cell last refused a service."""

    def list_overdue(
        self, store: Store, units: Iterable[Unit], now: float, is_elastic: Callable[[Unit], bool]
    ) -> OverduePods:
        """Return the units that the scheduler has refused for too long.

        Args:
            store: the watch cache.
            units: all units.
            now: the time of the event loop.
            is_elastic: returns whether the queue gives a unit no node; another one without a pin was made without a
                gate, and so would its successor be.
        """
        refused = [OverduePod(unit, found) for unit in units if (found := find_refusal(store, unit)) is not None]
        self._since = {each.unit.uid: self._since.get(each.unit.uid, now) for each in refused}
        overdue, waits = [], []
        for each in refused:
            if not each.unit.cells and not is_elastic(each.unit):
                continue
            limit = PINNED_SECONDS if each.unit.cells else UNPINNED_SECONDS
            left = self._since[each.unit.uid] + limit - now
            if left <= 0:
                overdue.append(each)
            else:
                waits.append(left)
        return OverduePods(tuple(overdue), min(waits, default=None))

    def note_refusal(self, unit: Unit, now: float) -> Sequence[str]:
        """Note that its cells refuse a service, and return those that refuse services of several namespaces.

        A pod that no node takes says nothing of nodes, or one tenant could close them all to others.
        """
        recent = {key: since for key, since in self._refusals.items() if now - since < BLAME_SECONDS}
        self._refusals = recent | {(cell, unit.service): now for cell in unit.cells}
        return [
            cell
            for cell in unit.cells
            if len({service.namespace for place, service in self._refusals if place == cell}) > 1
        ]

    def list_avoided(self, service: ObjectKey, now: float) -> frozenset[str]:
        """Return the cells on which a service is not tried again yet."""
        return frozenset(
            cell
            for (cell, refused), since in self._refusals.items()
            if refused == service and now - since < PINNED_SECONDS
        )


def find_refusal(store: Store, unit: Unit) -> str | None:
    """Return why the scheduler places no pod of an admitted unit; None: it places it, or has not tried."""
    is_placed = unit.key.kind == "pod" and unit.evictable_since is not None
    if unit.state != "running" or unit.key.kind == "process" or is_placed:
        return None
    for name in unit.objects:
        pod = store.get(PODS, name.name, name.namespace)
        for condition in _conditions(pod):
            if (condition["type"], condition.get("reason")) == ("PodScheduled", "Unschedulable"):
                return str(condition.get("message", ""))
    return None


def _conditions(pod: Obj | None) -> Iterable[Obj]:
    return ((pod or {}).get("status") or {}).get("conditions") or ()
