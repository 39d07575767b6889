"""Services of which nothing but the place in the queue has changed since they were decided.

With each admission the places of hundreds of services move. Neither the objects of a service nor its preconditions
follow from its place, which is only reported: after a mere move, the status is built from the last view of the service.
"""

from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from controller.placement.board import FindStanding
from controller.reconcile.plan import Plan, Snapshot
from controller.services.queue_report import recall_standing
from controller.services.replicas import Replicas
from controller.services.service_view import ServiceInputs
from controller.services.status import ServiceView, build_events, build_status
from crds.inferenceservice import InferenceService
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, ObjectKey

DECIDE_AGAIN_SECONDS: Final = 3600.0
"""Longest time for which a decision about a service that waits is taken to hold."""
_UNREPORTED: Final = ("apply", "keep", "create", "patch", "delete")
"""Fields of `Replicas` from which no status is built: whole Deployments of a thousand services need not be kept."""


class _DecidedService(NamedTuple):
    """A service as it was decided."""

    view: ServiceView
    status: Obj
    since: datetime
    until: datetime
    """When time alone may change the decision."""
    again_seconds: float
    """Time after which its place is reported again, though nothing tells of a move."""


class MovedServices:
    """The last views of services that wait, each until something else about its service changes.

    Args:
        find_standing: returns the place of a service in the queue, or None; it gets the last one that was reported.
    """

    def __init__(self, find_standing: FindStanding) -> None:
        """Begin with nothing kept, so each service is decided once before its place alone is reported."""
        self._find_standing = find_standing
        self._current: set[ObjectKey] = set()
        """Services of which nothing has changed since they were read."""
        self._decided: dict[ObjectKey, _DecidedService] = {}
        """The last view and status of each service that waits, for as long as its decision holds."""

    def forget(self, key: ObjectKey) -> None:
        """Forget a service, of which something has changed."""
        self._decided.pop(key, None)
        self._current.discard(key)

    def restart(self) -> None:
        """Forget all services: another replica may have led since."""
        self._decided.clear()
        self._current.clear()

    def keep(self, snapshot: Snapshot, key: ObjectKey, plan: Plan) -> None:
        """Keep the view and status of a service that was just decided, so that `report` can build the next status.

        Only a service that waits whole is kept: all of its replicas are in the queue, and until the plan is due again
        nothing but their place is to change. It is not kept if the store has changed since the view was built.
        """
        # 1. The view must be as new as the store.
        inputs: ServiceInputs | None = snapshot.inputs
        if inputs is None or inputs.view is None or inputs.revision != snapshot.store.revision:
            return
        view, now, again_seconds = inputs.view, snapshot.now, plan.again_seconds

        # 2. The service must wait whole. An event since `report` takes it out of `_current`.
        has_changed_since = key not in self._current
        if has_changed_since or not waits_whole(view) or plan.status is None or again_seconds is None:
            return
        # Of a service with a choice of accelerators or with endpoints, more may change than its place.
        if view.accelerator_choice is not None or view.endpoints:
            return

        # 3. Keep it. Fields that no status is built from are replaced by their empty defaults, to save memory.
        no_replicas = Replicas(total=0)
        replicas = msgspec.structs.replace(view.replicas, **{name: getattr(no_replicas, name) for name in _UNREPORTED})
        # A decision that is due again only to read the Secret holds for longer: a service that waits does not use it.
        lasts_seconds = DECIDE_AGAIN_SECONDS if again_seconds == inputs.token.again_seconds else again_seconds
        until, view = now + timedelta(seconds=lasts_seconds), msgspec.structs.replace(view, replicas=replicas)
        self._decided[key] = _DecidedService(view, plan.status, since=now, until=until, again_seconds=again_seconds)

    def report(self, snapshot: Snapshot, key: ObjectKey) -> Plan | None:
        """Return a plan that only reports the place of a service; None: it must be decided, as more may have changed.

        The reconciler calls this first. With None, it decides about the service, and gives the plan to `keep` if that
        writes the status alone. From now on the service is current until an event calls `forget`: so `keep` sees if
        something has changed meanwhile.
        """
        plan = self._find_report(snapshot, key)
        if plan is None:
            self._decided.pop(key, None)
            self._current.add(key)
        return plan

    def _find_report(self, snapshot: Snapshot, key: ObjectKey) -> Plan | None:
        """Return the plan of `report`: the status by the kept view, with the present place in the queue.

        None: no view is kept, its time is over, the service was edited or deleted, or no replica waits any more.
        """
        # 1. The kept view must still hold, for the same service with the same spec.
        decided_service, now = self._decided.get(key), snapshot.now
        if decided_service is None or not decided_service.since <= now < decided_service.until:
            return None
        service = snapshot.read(INFERENCE_SERVICES, key, InferenceService)
        # _identify: uid, generation and time of deletion.
        if service is None or _identify(service) != _identify(decided_service.view.service):
            return None

        # 2. Its present place in the queue; None: no replica waits any more.
        standing = self._find_standing(key, recall_standing(service.status.queue))
        if standing is None:
            return None

        # 3. The status by the kept view with this place.
        view = msgspec.structs.replace(decided_service.view, service=service, standing=standing)
        # Fields that the view does not give, such as the traffic, stay as they were decided.
        status = decided_service.status | build_status(view, None)
        seconds = min(decided_service.again_seconds, (decided_service.until - now).total_seconds())
        return Plan(status=status, events=build_events(service, status), again_seconds=seconds)


def waits_whole(view: ServiceView) -> bool:
    """Return whether all replicas of a service wait in the queue."""
    return view.standing is not None and not view.replicas.ready and not view.replicas.awaiting


def _identify(service: InferenceService) -> tuple[str, int, str | None]:
    """Return what differs if a service was made anew, edited or deleted."""
    return service.metadata.uid, service.metadata.generation, service.metadata.deletion_timestamp
