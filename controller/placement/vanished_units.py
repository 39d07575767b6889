"""Places of pods and processes that vanish: by force, with their node, or sooner than a round of the queue sees it.

A pod that ends hands its place to its successor while it is being deleted. One whose object vanishes at once, or that
failed and stays as a record, cannot. Nor can a process whose successor is a pod. Their places are written down here.
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
        """Start without units; each round tells those that it has read to `expect`."""
        self._units: dict[str, Unit] = {}
        """By uid, the units of services in the last round that are still there."""
        self._freed: list[FreedPlace] = []
        """Queue places of units that are gone, until they are taken for the ledger."""
        self._vanished_in_round: set[str] | None = None
        """uids of units unknown here that have vanished while a round reads the units; None: no round does."""

    def begin_round(self) -> None:
        """Record units that vanish from now until `expect`: the round may have read them before."""
        self._vanished_in_round = set()

    def expect(self, units: Iterable[Unit]) -> None:
        """Remember the units that a round has read, to know the place of each that vanishes before the next round.

        Units that vanished while the round read them are recorded now: when they vanished, their places were unknown.
        """
        self._units = {unit.uid: unit for unit in units if unit.service_uid}
        for uid in self._units.keys() & (self._vanished_in_round or ()):
            self._freed.append(build_freed_place(self._units.pop(uid)))
        self._vanished_in_round = None

    def note_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Record the queue place of a pod or process that was deleted or has ended; `new` is None if it was deleted.

        While a round reads the units, the uid of a unit that is unknown here is kept for `expect`.
        """
        if old is None:
            return
        if new is not None and not _is_out_of_queue(resource, new):
            return
        uid = old["metadata"]["uid"]
        unit = self._units.pop(uid, None)
        if unit is not None:
            self._freed.append(build_freed_place(unit))
        elif self._vanished_in_round is not None:
            self._vanished_in_round.add(uid)

    def take(self) -> list[FreedPlace]:
        """Return the places that were recorded since the last call, and forget them."""
        freed, self._freed = self._freed, []
        return freed


def build_freed_place(unit: Unit) -> FreedPlace:
    """Return the record by which the successor of a unit finds its place once the unit itself is gone."""
    namespace, name = unit.objects[0]
    return FreedPlace(
        service=unit.service_uid,
        unit=unit.uid,
        namespace=namespace,
        name=name,
        enqueued_at=format_place(unit.enqueued_at),
    )


def is_gone(store: Store, place: FreedPlace) -> bool:
    """Return whether the unit of a freed place is gone: until then its successor reads the place from the pod itself.

    A process is always gone here: its place is recorded only once it is over, and no pod has its uid.
    """
    pod = store.get(PODS, place.name, place.namespace)
    return pod is None or pod["metadata"]["uid"] != place.unit or _is_out_of_queue(PODS, pod)


def _is_out_of_queue(resource: Resource, obj: Obj) -> bool:
    """Return whether a pod or process has ended, and so is no unit of the queue, although its object is still there."""
    if resource == METAL_PROCESSES:
        return is_over(msgspec.convert(obj, HostedProcess))
    # A pod that has ended is replaced by its ReplicaSet; one that is being deleted still hands its place on.
    return "deletionTimestamp" not in obj["metadata"] and (obj.get("status") or {}).get("phase") in ENDED
