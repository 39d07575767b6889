"""The shell around a decision: read the store, decide, and do what the plan says, one API call after the other.

It may die between any two calls: each is harmless when repeated, and what was not done is decided again. Only what
differs from the store is written. What the API server refuses for good (a quota, a name that is taken) is told on the
object itself, because whoever applied it reads that and not our log.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec
import structlog

from controller.plan import FIELD_MANAGER, Event, Key, Kind, Patch, Plan, Ref, Snapshot, controller_of
from controller.status import MESSAGE_LENGTH, condition
from kube.apply import apply_if_changed, apply_status, merge_conditions
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, NotOurs
from kube.events import Recorder
from kube.resources import SECRETS, Resource
from kube.store import Store

UNFED: Final = frozenset({SECRETS})
"""Resources that no source feeds into the store: a copy of our answers there would never be corrected."""

log = structlog.get_logger()


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
            await self._report(kind.resource, key, _refused(plan, error, snapshot.get(kind.resource, key)))
            raise
        await self._report(kind.resource, key, plan)
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
            self._take(resource, await self._client.create(resource, obj))
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
            self._take(resource, await self._find(resource, obj))

    async def _apply(self, resource: Resource, obj: Obj) -> None:
        metadata = obj["metadata"]
        observed = self._store.get(resource, metadata["name"], metadata.get("namespace"))
        if observed is None:
            self._take(resource, await self._apply_first(resource, obj))
            return
        _require_ours(resource, observed, obj)
        await apply_if_changed(self._client, self._store, resource, obj, FIELD_MANAGER)

    async def _apply_first(self, resource: Resource, obj: Obj) -> Obj:
        """Apply what the store does not know, without force: it may be somebody else's, with all fields theirs."""
        try:
            return await self._client.apply(resource, obj, field_manager=FIELD_MANAGER, force=False)
        except Conflict:
            await self._find(resource, obj)
            return await self._client.apply(resource, obj, field_manager=FIELD_MANAGER)

    async def _find(self, resource: Resource, obj: Obj) -> Obj:
        """Read what has the name of a desired object; raises NotOurs when it is not that."""
        metadata = obj["metadata"]
        existing = await self._client.get(resource, metadata["name"], metadata.get("namespace"))
        _require_ours(resource, existing, obj)
        return existing

    def _take(self, resource: Resource, answer: Obj) -> None:
        if resource not in UNFED:
            self._store.put(resource, answer)

    async def _patch(self, patch: Patch) -> None:
        resource, namespace, name, _uid = patch.ref
        self._store.put(resource, await self._client.patch_json(resource, name, namespace or None, patch.operations))

    async def _delete(self, ref: Ref) -> None:
        try:
            await self._client.delete(ref.resource, ref.name, ref.namespace or None, uid=ref.uid)
        except (NotFound, Conflict):  # gone, or a successor has the name: this life of it has ended
            self._store.remove(ref.resource, ref.namespace or None, ref.name, uid=ref.uid)

    async def _report(self, resource: Resource, key: Key, plan: Plan) -> None:
        """Write the status and tell the Events."""
        observed = self._store.get(resource, key.name, key.namespace or None)
        if observed is None:
            return
        if plan.status is not None:
            await self._write_status(resource, key, observed, plan.status)
        for event in plan.events:
            log.info("told", object=f"{resource.kind} {'/'.join(key)}", reason=event.reason, note=event.note)
            await self._recorder.event(observed, event.type, event.reason, event.note, event.action)

    async def _write_status(self, resource: Resource, key: Key, observed: Obj, status: Obj) -> None:
        old = observed.get("status", {}).get("conditions", [])
        status = status | {"conditions": merge_conditions(old, status.get("conditions", []), self._now())}
        try:
            self._store.put(resource, await apply_status(self._client, resource, observed, status, FIELD_MANAGER))
        except NotFound:
            self._store.remove(resource, key.namespace or None, key.name, uid=observed["metadata"]["uid"])


def _require_ours(resource: Resource, existing: Obj, wanted: Obj) -> None:
    """Raise NotOurs, which names the true owner, unless what has the name has the owner that it should have."""
    ours, theirs = controller_of(wanted), controller_of(existing)
    if ours is None or (theirs is not None and theirs["uid"] == ours["uid"]):
        return
    metadata = wanted["metadata"]
    what = f"{resource.kind} {'/'.join(filter(None, (metadata.get('namespace'), metadata['name'])))}"
    if theirs is not None and (theirs["kind"], theirs["name"]) == (ours["kind"], ours["name"]):
        raise NotOurs(f"{what} of a former {ours['kind']} {ours['name']} is still there: waits until it is gone")
    owner = f"belongs to {theirs['kind']} {theirs['name']}" if theirs else "belongs to something else"
    raise NotOurs(f"{what} exists and {owner}: delete it, or choose another name here")


def _refused(plan: Plan, error: Exception, observed: Obj | None) -> Plan:
    """Return what is told instead of the plan that could not be reached; the next one that succeeds leaves it out.

    No status where none is planned: it may be another's, as a MetalProcess's is its agent's.
    """
    reason = error.reason if isinstance(error, ApiError) and error.reason else type(error).__name__
    told = Plan(events=(Event("Warning", reason, str(error)[:MESSAGE_LENGTH], "Reconcile"),))
    if plan.status is None:
        return told
    generation = observed["metadata"]["generation"] if observed else 0
    status = plan.status
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    kinds = ["Reconciled"]
    # Without a phase, Ready is not about what we make: a host's says whether it lives, and others decide by it.
    if "phase" in status and conditions["Ready"]["status"] != "True":
        status, kinds = status | {"phase": "Failed"}, ["Ready", "Reconciled"]
    for kind in kinds:
        conditions[kind] = condition(kind, true=False, reason=reason, message=str(error), generation=generation)
    return msgspec.structs.replace(told, status=status | {"conditions": [*conditions.values()]})
