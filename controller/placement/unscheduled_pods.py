"""Pods that the queue admitted and the scheduler does not place: they go back to the queue, with their place.

The queue counts what it knows: a scheduler plugin, a volume or a port may stand in the way all the same. Such a pod
would hold the room of its cell for ever. Its service is not tried there again for some time.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from controller.placement.device_registry import find_need
from controller.placement.units import Unit
from controller.reconcile.indexes import discard_from_index
from kube.client import Obj
from kube.resources import PODS, ObjectKey
from kube.store import Store

PINNED_SECONDS: Final = 60.0
"""Time for which the scheduler may refuse a pod that is pinned to its node."""
BLAME_SECONDS: Final = 4 * PINNED_SECONDS
"""Time in which a node that refuses pods of two namespaces is taken for the cause itself."""
UNPINNED_SECONDS: Final = 900.0
"""Time for which it may refuse one that goes to any node: an autoscaler adds a node within it, or none."""
_UNTRIED: Final = "no scheduler has tried to place it"


class OverduePod(NamedTuple):
    """A unit that returns to the queue."""

    unit: Unit
    message: str
    """The reason that the scheduler states."""


class OverduePods(NamedTuple):
    """The units that return to the queue now."""

    overdue: tuple[OverduePod, ...]
    again_seconds: float | None
    """Time after which the next one does."""


class UnscheduledPods:
    """The time since when the scheduler refuses each admitted pod: no condition states it.

    The condition PodScheduled of a pod is False from its creation, when a gate was the reason.
    """

    def __init__(self) -> None:
        """Start without refusals."""
        self._since: dict[str, float] = {}
        """By uid of the unit: since when the scheduler refuses it, on the clock of the event loop."""
        self._refusals: dict[tuple[str, ObjectKey], float] = {}
        """Time of the loop when a cell last refused a service; the latest comes last."""
        self._services_of: dict[str, set[ObjectKey]] = {}
        """The services of these refusals by cell."""
        self._cells_of: dict[ObjectKey, set[str]] = {}
        """The cells of these refusals by service."""

    def list_overdue(
        self, store: Store, units: Iterable[Unit], now: float, is_elastic: Callable[[Unit], bool]
    ) -> OverduePods:
        """Note which admitted units the scheduler refuses now; return those that it has refused for too long.

        Their pods go back to the queue. One without a cell that a scheduler has tried has more time: an autoscaler may
        add a node for it.

        Args:
            store: the watch cache.
            units: all units.
            now: the time of the event loop.
            is_elastic: returns whether one of a unit's pools has an autoscaler, so that the queue may have given the
                unit no node. Another one without a node was made without a gate, and so would its successor be.
        """
        # 1. Note since when each unit is refused; one that is not refused any more is forgotten.
        refused = [OverduePod(unit, message) for unit in units if (message := find_refusal(store, unit)) is not None]
        self._since = {pod.unit.uid: self._since.get(pod.unit.uid, now) for pod in refused}

        # 2. Find those that are refused for too long, and the seconds that the others have left.
        overdue, waits = [], []
        for pod in refused:
            # It was made without the gate of the queue, as its successor would be: to return it does not help.
            if not pod.unit.cells and not is_elastic(pod.unit):
                continue
            # A pod that no scheduler looks at holds room on each node of its pool, or claimed devices, in vain.
            limit = PINNED_SECONDS if pod.unit.cells or pod.message == _UNTRIED else UNPINNED_SECONDS
            seconds_left = self._since[pod.unit.uid] + limit - now
            if seconds_left <= 0:
                overdue.append(pod)
            else:
                waits.append(seconds_left)
        return OverduePods(tuple(overdue), min(waits, default=None))

    def note_refusal(self, unit: Unit, now: float) -> Sequence[str]:
        """Note that the cells of a unit refuse its service; return those that refuse services of several namespaces.

        Such a cell is probably the cause itself. A pod that no node takes says nothing of a cell: otherwise one tenant
        could close all cells to others.
        """
        # Forget the oldest refusals, which do not count any more.
        while self._refusals:
            cell, service = next(iter(self._refusals))  # the oldest
            if now - self._refusals[cell, service] < BLAME_SECONDS:
                break
            self._forget(cell, service)

        # A refusal that is noted again moves to the end, as the latest.
        for cell in unit.cells:
            self._refusals.pop((cell, unit.service), None)
            self._refusals[cell, unit.service] = now
            self._services_of.setdefault(cell, set()).add(unit.service)
            self._cells_of.setdefault(unit.service, set()).add(cell)
        return [cell for cell in unit.cells if len({key.namespace for key in self._services_of[cell]}) > 1]

    def _forget(self, cell: str, service: ObjectKey) -> None:
        """Forget that a cell has refused a service."""
        del self._refusals[cell, service]
        discard_from_index(self._services_of, cell, service)
        discard_from_index(self._cells_of, service, cell)

    def list_avoided(self, service: ObjectKey, now: float) -> frozenset[str]:
        """Return the cells on which a service is not tried again yet."""
        return frozenset(
            cell for cell in self._cells_of.get(service, ()) if now - self._refusals[cell, service] < PINNED_SECONDS
        )


def find_refusal(store: Store, unit: Unit) -> str | None:
    """Return why no scheduler places the pods of an admitted unit; None: it places them, or has not tried yet.

    A unit without a cell, or that claims devices, holds up others until it is bound. So it counts as refused even
    before a scheduler has tried: its scheduler may not exist.
    """
    # `evictable_since` is the time at which the pod was bound.
    is_placed = unit.key.kind == "pod" and unit.evictable_since is not None
    if unit.state != "running" or unit.key.kind == "process" or is_placed:
        return None

    # 1. The scheduler says why it does not place a pod.
    pods = [store.get(PODS, name.name, name.namespace) for name in unit.objects]
    for condition in itertools.chain.from_iterable(map(_conditions, pods)):
        if (condition["type"], condition.get("reason")) == ("PodScheduled", "Unschedulable"):
            return str(condition.get("message", ""))

    # 2. It has not tried to place one that holds up others.
    unbound = [pod for pod in pods if pod is not None and not pod["spec"].get("nodeName")]
    # `find_need`: the pod claims devices. `_UNTRIED` is the message for that.
    is_untried = any(not unit.cells or find_need(pod) is not None for pod in unbound)
    return _UNTRIED if is_untried else None


def _conditions(pod: Obj | None) -> Iterable[Obj]:
    return ((pod or {}).get("status") or {}).get("conditions") or ()
