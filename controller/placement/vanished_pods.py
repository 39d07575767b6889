"""Places of pods that vanish: by force, with their node, or sooner than a round of the queue sees their end.

A pod that ends hands its place on while it ends. One that is gone at once, or has failed and stays as a record, does
not; its place is written down, as that of an evicted pod is.
"""

from collections.abc import Iterable

from controller.placement.ledger import FreedPlace
from controller.placement.queue_places import format_place
from controller.placement.units import Unit
from controller.reconcile.triggers import ENDED
from kube.client import Obj
from kube.resources import PODS
from kube.store import Store


class VanishedPods:
    """The pods of the last round, and the places of those of them that have vanished since."""

    def __init__(self) -> None:
        self._known: dict[str, Unit] = {}
        self._freed: list[FreedPlace] = []

    def expect(self, units: Iterable[Unit]) -> None:
        """Take the units of a round."""
        # The service itself makes the successor of a process, with its place.
        self._known = {unit.uid: unit for unit in units if unit.key.kind != "process" and unit.service_uid}

    def note_change(self, old: Obj | None, new: Obj | None) -> None:
        """Write down the place of a pod that is gone; `old` and `new` are a pod before and after a change."""
        if old is None or (new is not None and not _has_failed(new)):
            return
        unit = self._known.pop(old["metadata"]["uid"], None)
        if unit is not None:
            self._freed.append(free_place(unit))

    def take(self) -> list[FreedPlace]:
        """Return the places that were written down since the last call."""
        freed, self._freed = self._freed, []
        return freed


def free_place(unit: Unit) -> FreedPlace:
    """Return the record by which the successor of a pod finds its place, when the pod itself is gone."""
    namespace, name = unit.objects[0]
    return FreedPlace(
        service=unit.service_uid,
        unit=unit.uid,
        namespace=namespace,
        name=name,
        enqueued_at=format_place(unit.enqueued_at),
    )


def is_gone(store: Store, place: FreedPlace) -> bool:
    """Return whether the pod of a freed place is gone: until then its successor finds the place in the pod itself."""
    found = store.get(PODS, place.name, place.namespace)
    return found is None or found["metadata"]["uid"] != place.unit or _has_failed(found)


def _has_failed(pod: Obj) -> bool:
    """Return whether a pod has ended and stays as a record: its ReplicaSet has made another one."""
    return "deletionTimestamp" not in pod["metadata"] and (pod.get("status") or {}).get("phase") in ENDED
