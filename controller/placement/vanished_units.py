"""Places of pods and processes that vanish: by force, with their node, or sooner than a round of the queue sees it.

A unit that ends hands its place on while it ends. One that is gone at once, or has failed and stays as a record, does
not; its place is written down, as that of an evicted pod is. So does a process whose successor is a pod.
"""

from collections.abc import Iterable

import msgspec

from controller.placement.ledger import FreedPlace
from controller.placement.process_units import is_over
from controller.placement.queue_places import format_place
from controller.placement.units import Unit
from controller.reconcile.triggers import ENDED
from crds.metalprocess import HostedProcess
from kube.client import Obj
from kube.resources import METAL_PROCESSES, PODS, Resource
from kube.store import Store


class VanishedUnits:
    """The units of the last round, and the places of those of them that have vanished since."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}
        self._freed: list[FreedPlace] = []
        self._left: set[str] | None = None
        """Units unknown here that have vanished while a round reads the units; None: none does."""

    def begin_round(self) -> None:
        """Record units that vanish from now until `expect`: the round may have read them already."""
        self._left = set()

    def expect(self, units: Iterable[Unit]) -> None:
        """Take the units of a round."""
        self._units = {unit.uid: unit for unit in units if unit.service_uid}
        for uid in self._units.keys() & (self._left or ()):
            self._freed.append(free_place(self._units.pop(uid)))
        self._left = None

    def note_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Write down the place of a unit that is gone; `old` and `new` are a pod or process before and after."""
        if old is None or (new is not None and not _has_left(resource, new)):
            return
        uid = old["metadata"]["uid"]
        unit = self._units.pop(uid, None)
        if unit is not None:
            self._freed.append(free_place(unit))
        elif self._left is not None:
            self._left.add(uid)

    def take(self) -> list[FreedPlace]:
        """Return the places that were written down since the last call."""
        freed, self._freed = self._freed, []
        return freed


def free_place(unit: Unit) -> FreedPlace:
    """Return the record by which the successor of a unit finds its place, when the unit itself is gone."""
    namespace, name = unit.objects[0]
    return FreedPlace(
        service=unit.service_uid,
        unit=unit.uid,
        namespace=namespace,
        name=name,
        enqueued_at=format_place(unit.enqueued_at),
    )


def is_gone(store: Store, place: FreedPlace) -> bool:
    """Return whether the unit of a freed place is gone: until then its successor finds the place in the pod itself.

    The place of a process is written down only once that is over.
    """
    pod = store.get(PODS, place.name, place.namespace)
    return pod is None or pod["metadata"]["uid"] != place.unit or _has_left(PODS, pod)


def _has_left(resource: Resource, obj: Obj) -> bool:
    """Return whether a pod or process is in the queue no more, although its object is still there."""
    if resource == METAL_PROCESSES:
        return is_over(msgspec.convert(obj, HostedProcess))
    # It has failed, and its ReplicaSet has made another one.
    return "deletionTimestamp" not in obj["metadata"] and (obj.get("status") or {}).get("phase") in ENDED
