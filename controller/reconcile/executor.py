"""The execution of a plan: read the store, decide, then make one API call after the other.

The process may die between any two calls: each call is harmless when repeated, and calls that were not made are
decided again. Only differences from the store are written. The status is decided after the other writes, whose answers
are in the store by then, so that one status write reports them.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

import msgspec
import structlog

from controller.reconcile.labels import LABEL_MANAGER, desired_labels
from controller.reconcile.plan import FIELD_MANAGER, Plan, Reconciler, Snapshot
from controller.reconcile.plan_writer import PlanWriter
from controller.reconcile.reported_writes import DroppedFields, WriteRefusals
from kube.apply import apply_status, merge_conditions
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, NotFound, NotOurs
from kube.events import EventRecorder
from kube.resources import ObjectKey, Resource
from kube.store import Store

LABEL_SECONDS: Final = 60.0
"""Time after which labels are written again whose write has failed, unless the controller has no right to it."""

log = structlog.get_logger()


class Executor:
    """Decides about an object and executes the plan.

    `require_leadership` is called before each write, and raises LeadershipLost when another replica may lead by now.
    """

    def __init__(
        self,
        client: Client,
        store: Store,
        recorder: EventRecorder,
        now: Callable[[], datetime],
        require_leadership: Callable[[], None],
    ) -> None:
        # The API server, the watch cache, the recorder of Events, and the wall clock.
        self._client = client
        self._store = store
        self._recorder = recorder
        self._now = now
        # What it remembers between reconciles, and the writer of all but the status.
        self._refusals = WriteRefusals(now)
        """The last refusals of writes, for the condition Reconciled."""
        self._dropped = DroppedFields(client, store, now)
        """The fields that the API server has not kept, for the same condition."""
        self.writer = PlanWriter(client, store, self._dropped, require_leadership)

    async def reconcile(self, reconciler: Reconciler, key: ObjectKey) -> float | None:
        """Reconcile one object; returns the seconds after which to reconcile it again, or None.

        The plan's writes come first, and the status last, so that it reports them: if they have changed the store, the
        object is decided once more, for its status alone. What that decision would write is left to the next call,
        which is due at once. Lasting refusals, and fields that the API server has dropped, become a condition.

        Raises ApiError, LeadershipLost, Unreachable and NotOurs; the caller retries with back-off.
        """
        snapshot, plan, resource = Snapshot(self._store, self._now()), Plan(), reconciler.resource

        # 1. Read the inputs, decide, and make all writes but that of the status.
        observed = self._find(resource, key)  # the object itself; None: it is gone
        try:
            if reconciler.observe is not None:
                inputs = await reconciler.observe(self._client, snapshot, key)
                snapshot = Snapshot(self._store, self._now(), inputs)
            observed = self._find(resource, key)
            plan = reconciler.decide(snapshot, key)
            if (perform := reconciler.perform) is not None:
                for effect in plan.effects:
                    perform(key, effect)
            revision = self._store.revision  # which each change of the store raises
            others_wrote = await self.writer.write((resource, key), plan, reconciler.written)
        except (ApiError, NotOurs) as error:
            if observed is not None and (refused := self._refusals.find_report(resource, observed, plan, error)):
                await self._report(resource, key, refused)
            raise
        self._refusals.forget(resource, key)
        dropped_fields = self._dropped.list_missing((resource, key))

        # 2. If the writes have changed the store, and so its revision, decide once more for the status.
        if self._store.revision != revision:
            executed, snapshot = plan, Snapshot(self._store, self._now(), snapshot.inputs)
            # The objects just written are not at work yet, so this decision ends nothing in this process.
            plan = reconciler.decide(snapshot, key)
            if others_wrote or _has_more_writes(plan, executed):
                plan = msgspec.structs.replace(plan, again_seconds=0.0)

        # 3. Write the status, the Events and the labels.
        if dropped_fields and observed is not None:
            plan = await self._dropped.add_condition(plan, dropped_fields, observed, (resource, key))
        await self._report(resource, key, plan)
        labels_seconds = await self._write_labels(resource, key, plan.labels) if plan.labels is not None else None
        return min((seconds for seconds in (plan.again_seconds, labels_seconds) if seconds is not None), default=None)

    def _find(self, resource: Resource, key: ObjectKey) -> Obj | None:
        return self._store.get(resource, key.name, key.namespace or None)

    async def _report(self, resource: Resource, key: ObjectKey, plan: Plan) -> None:
        """Write the status and send the Events."""
        observed = self._find(resource, key)
        if observed is None:
            return
        if plan.status is not None:
            await self._write_status(resource, key, observed, plan.status)
        for event in plan.events:
            log.info("event_sent", object=f"{resource.kind} {key}", reason=event.reason, note=event.note)
            await self._recorder.event(observed, event.type, event.reason, event.note, event.action)

    async def _write_labels(self, resource: Resource, key: ObjectKey, labels: Mapping[str, str]) -> float | None:
        """Write the discovery labels, and return the seconds until the object is due again.

        0.0: somebody else has changed the object meanwhile. `LABEL_SECONDS`: the write has failed. None: nothing is
        left to do, or nothing can be done.
        """
        observed = self._find(resource, key)
        desired = desired_labels(resource, labels, observed) if observed is not None else None
        if desired is None:  # the object is gone, or has these labels
            return None

        # While the write is under way, `write` collects the versions of the object that the watch reports.
        with self.writer.writing(resource, key, (resource, key)) as write:
            try:
                answer = await self.writer.client.apply(resource, desired, field_manager=LABEL_MANAGER)
            except (NotFound, Conflict):  # the name belongs to another object by now, which the watch brings
                return None
            except ApiError as error:  # labels help to find an object, and must not hold up anything else
                log.warning("labels_refused", object=f"{resource.kind} {key}", error=str(error))
                return None if isinstance(error, Forbidden) else LABEL_SECONDS
            self._store.put(resource, answer)

            # A version that is not that of the answer was written by others.
            others_wrote = not write.watched_versions <= {answer["metadata"]["resourceVersion"]}
            return 0.0 if others_wrote else None

    async def _write_status(self, resource: Resource, key: ObjectKey, observed: Obj, status: Obj) -> None:
        """Write a status, whose conditions keep their times where they have not changed, and store the answer."""
        old = observed.get("status", {}).get("conditions", [])
        status = status | {"conditions": merge_conditions(old, status.get("conditions", []), self._now())}
        try:
            self._store.put(resource, await apply_status(self.writer.client, resource, observed, status, FIELD_MANAGER))
        except NotFound:
            self._store.remove(resource, key.namespace or None, key.name, uid=observed["metadata"]["uid"])


def _has_more_writes(plan: Plan, earlier: Plan) -> bool:
    """Return whether a plan has a write that was not in the earlier one, which has just been executed."""
    # What exists is never changed by a creation, so the name is enough.
    created = {(resource, obj["metadata"]["name"]) for resource, obj in earlier.create}
    return (
        any((resource, obj["metadata"]["name"]) not in created for resource, obj in plan.create)
        or any(write not in earlier.apply for write in plan.apply)
        or any(patch not in earlier.patch for patch in plan.patch)
        or any(ref not in earlier.delete for ref in plan.delete)
    )
