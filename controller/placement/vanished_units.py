"""Units that are gone before all that follows from it is known: their places in the queue, and their memory on hosts.

A pod that ends hands its place to its successor while it is being deleted. One whose object vanishes at once, by force
or with its node, or that failed and stays as a record, cannot. Nor can a process whose successor is a pod. Their places
are written down here.

An agent reports each process and its host in two writes. Between these, the room of a process that is over is neither
taken by a unit nor free: a unit that was promised it would lose it, and others would be evicted in vain. So the process
counts as ending until its host has reported it.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from controller.placement.ledger import FreedPlace
from controller.placement.process_units import is_over
from controller.placement.queue_places import format_place
from controller.placement.units import Unit
from controller.reconcile.triggers import ENDED
from crds.metalprocess import HostedProcess
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, PODS, Resource
from kube.store import Store

UNREPORTED_SECONDS: Final = 30.0
"""Time in which a host certainly reports the end: one that does not has an engine that it cannot end."""


class _UnreportedEnd(NamedTuple):
    unit: Unit
    until: float


class UnreportedEnds:
    """The processes of the last round, and the ended ones whose memory their host still reports as taken.

    Args:
        wake: called when a host has not reported an end in time.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Start without processes; `add_to` learns them from round to round."""
        self._wake = wake
        # By uid: the processes with a host at the last call, and the ended ones that their host still counts.
        self._last_placed: dict[str, Unit] = {}
        self._ends: dict[str, _UnreportedEnd] = {}

    def add_to(self, units: tuple[Unit, ...], store: Store) -> tuple[Unit, ...]:
        """Return the units, with ended processes added as ending units while their host reports their memory as taken.

        Otherwise this memory would seem to be lost between the two reports of an agent, of the process and of its host.
        Processes that have gone since the last call are noted as ended; they are forgotten once the host has reported
        it, or after UNREPORTED_SECONDS.
        """
        loop = asyncio.get_running_loop()

        # 1. Note processes that were placed at the last call and are gone now, if their host still counts them.
        placed = {unit.uid: unit for unit in units if unit.key.kind == "process" and unit.cells}
        for uid in self._last_placed.keys() - placed.keys():
            unit = msgspec.structs.replace(self._last_placed[uid], state="ending")
            if _is_reported(store, unit):
                self._ends[uid] = _UnreportedEnd(unit, loop.time() + UNREPORTED_SECONDS)
                loop.call_later(UNREPORTED_SECONDS, self._wake)
        self._last_placed = placed

        # 2. Forget those that the host has reported, that are back, or that took too long.
        for uid, end in list(self._ends.items()):
            if end.until <= loop.time() or uid in placed or not _is_reported(store, end.unit):
                del self._ends[uid]
        return (*units, *(end.unit for end in self._ends.values()))


def _is_reported(store: Store, unit: Unit) -> bool:
    """Return whether the host of a process reports its memory as taken."""
    host = store.get(METAL_HOSTS, unit.cells[0].removeprefix("host/"))
    if host is None:
        return False
    processes = (host.get("status") or {}).get("processes") or ()
    return any(process["uid"] == unit.uid for process in processes)


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
