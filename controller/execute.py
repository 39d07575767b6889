"""The shell around a decision: read the store, decide, and do what the plan says, one API call after the other.

It may die between any two calls: each is harmless when repeated, and what was not done is decided again. Only what
differs from the store is written. What the API server refuses for good (a quota, a name that is taken) is told on the
object itself, because whoever applied it reads that and not our log.
"""

from collections.abc import Callable
from datetime import datetime

import structlog

from controller.plan import FIELD_MANAGER, Key, Kind, Patch, Plan, Ref, Snapshot, controller_of
from controller.status import condition
from kube.apply import apply_if_changed, apply_status, merge_conditions
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from kube.events import Recorder
from kube.resources import Resource
from kube.store import Store

log = structlog.get_logger()


class NotOurs(Exception):  # noqa: N818 - what was found, as the errors of kube/ are named
    """An object with the name that we need belongs to somebody else, or to a predecessor that is still going."""


class Executor:
    """Decides and executes, with what both need."""

    def __init__(self, client: Client, store: Store, recorder: Recorder, now: Callable[[], datetime]) -> None:
        self._client = client
        self._store = store
        self._recorder = recorder
        self._now = now

    async def reconcile(self, kind: Kind, key: Key) -> float | None:
        """Bring one object's world closer to what is desired; returns the seconds until it wants to be called again.

        Raises ApiError, Unreachable and NotOurs, to be tried again with back-off.
        """
        snapshot = Snapshot(self._store, self._now())
        if kind.observe is not None:
            facts = await kind.observe(self._client, snapshot, key)
            snapshot = Snapshot(self._store, self._now(), facts)
        plan = kind.decide(snapshot, key)
        try:
            await self._write_others(plan)
        except (Invalid, Forbidden, NotOurs) as error:
            await self._write_status(kind.resource, key, _refused(plan, error, snapshot.get(kind.resource, key)))
            raise
        await self._write_status(kind.resource, key, plan.status)
        await self._tell(kind.resource, key, plan)
        return plan.again_seconds

    async def _write_others(self, plan: Plan) -> None:
        for resource, obj in plan.create:
            await self._create(resource, obj)
        for resource, obj in plan.apply:
            await self._apply(resource, obj)
        for patch in plan.patch:
            await self._patch(patch)
        for ref in plan.delete:
            await self._delete(ref)

    async def _create(self, resource: Resource, obj: Obj) -> None:
        try:
            self._store.put(resource, await self._client.create(resource, obj))
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
            metadata = obj["metadata"]
            existing = await self._client.get(resource, metadata["name"], metadata.get("namespace"))
            if _is_of_another(existing, obj):
                raise NotOurs(_taken(resource, obj)) from error
            self._store.put(resource, existing)

    async def _apply(self, resource: Resource, obj: Obj) -> None:
        metadata = obj["metadata"]
        observed = self._store.get(resource, metadata["name"], metadata.get("namespace"))
        if observed is None:
            await self._apply_first(resource, obj)
            return
        if _is_of_another(observed, obj):
            raise NotOurs(_taken(resource, obj))
        await apply_if_changed(self._client, self._store, resource, obj, FIELD_MANAGER)

    async def _apply_first(self, resource: Resource, obj: Obj) -> None:
        """Apply what the store does not know, without force: it may be somebody else's, with all fields theirs."""
        try:
            applied = await self._client.apply(resource, obj, field_manager=FIELD_MANAGER, force=False)
        except Conflict as error:
            raise NotOurs(_taken(resource, obj)) from error
        self._store.put(resource, applied)

    async def _patch(self, patch: Patch) -> None:
        resource, namespace, name, _uid = patch.ref
        self._store.put(resource, await self._client.patch_json(resource, name, namespace or None, patch.operations))

    async def _delete(self, ref: Ref) -> None:
        try:
            await self._client.delete(ref.resource, ref.name, ref.namespace or None, uid=ref.uid)
        except (NotFound, Conflict):  # gone, or a successor has the name: this life of it has ended
            self._store.remove(ref.resource, ref.namespace or None, ref.name, uid=ref.uid)

    async def _write_status(self, resource: Resource, key: Key, status: Obj | None) -> None:
        observed = self._store.get(resource, key.name, key.namespace or None)
        if status is None or observed is None:
            return
        old = observed.get("status", {}).get("conditions", [])
        status = status | {"conditions": merge_conditions(old, status.get("conditions", []), self._now())}
        try:
            self._store.put(resource, await apply_status(self._client, resource, observed, status, FIELD_MANAGER))
        except NotFound:
            self._store.remove(resource, key.namespace or None, key.name, uid=observed["metadata"]["uid"])

    async def _tell(self, resource: Resource, key: Key, plan: Plan) -> None:
        regarding = self._store.get(resource, key.name, key.namespace or None)
        if regarding is None:
            return
        for event in plan.events:
            log.info("told", object=f"{resource.kind} {'/'.join(key)}", reason=event.reason, note=event.note)
            await self._recorder.event(regarding, event.type, event.reason, event.note, event.action)


def _is_of_another(existing: Obj, wanted: Obj) -> bool:
    """Whether what has the name has not the owner that it should have."""
    owner, theirs = controller_of(wanted), controller_of(existing)
    return owner is not None and (theirs is None or theirs["uid"] != owner["uid"])


def _taken(resource: Resource, obj: Obj) -> str:
    metadata = obj["metadata"]
    where = f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else metadata["name"]
    return f"{resource.kind} {where} exists and belongs to something else: delete it, or choose another name here"


def _refused(plan: Plan, error: Exception, observed: Obj | None) -> Obj | None:
    """Return the planned status with why it could not be reached; the next plan that succeeds leaves that out.

    None where none is planned: that status may be another's, as a MetalProcess's is its agent's.
    """
    if plan.status is None:
        return None
    reason = error.reason if isinstance(error, ApiError) and error.reason else type(error).__name__
    told = condition(
        "Reconciled",
        true=False,
        reason=reason,
        message=str(error),
        generation=observed["metadata"]["generation"] if observed else 0,
    )
    others = [each for each in plan.status.get("conditions", []) if each["type"] != "Reconciled"]
    return plan.status | {"conditions": [*others, told]}
