"""The writes of a plan but that of the status: one API call after the other, of what differs from the store.

The process may die between any two calls: each is harmless when repeated. What another owner has made is never changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import FIELD_MANAGER, Plan, Ref
from controller.reconcile.reported_writes import DroppedFields, Reconciled
from controller.reconcile.stamp import needs_apply
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, NotDeletedYet, NotFound, NotOurs
from kube.resources import METAL_HOSTS, POD_MONITORS, PVCS, SECRETS, ObjectKey, Resource, object_key
from kube.store import Store

UNWATCHED: Final = frozenset({SECRETS})
"""Resources that are not watched: a copy of an answer in the store would never be corrected."""
MONITORING: Final = frozenset({POD_MONITORS})
"""Kinds that only help to watch what serves: their refusal, or the end of the kind itself, holds up nothing else."""

log = structlog.get_logger()


@dataclass(slots=True)
class Write:
    """A write that is under way, whose answer and event of the watch come in any order.

    Neither enqueues the object for which it is made, as that is decided again after its writes.
    """

    resource: Resource
    writer: Reconciled
    """The object for which this write is made."""
    watched_versions: set[str] = field(default_factory=set)
    """The resourceVersions that a watch has reported meanwhile and that concern the writer; "": the object is gone."""


class PlanWriter:
    """Writes plans.

    `require_leadership` is called before each write, and raises LeadershipLost when another replica may lead by now.
    """

    def __init__(
        self, client: Client, store: Store, dropped: DroppedFields, require_leadership: Callable[[], None]
    ) -> None:
        self._client = client
        self._store = store
        self._dropped = dropped
        self._require_leadership = require_leadership
        self.under_way: dict[tuple[Resource, ObjectKey], Write] = {}
        """The writes that are under way, by object."""

    @property
    def client(self) -> Client:
        """The client for one write; raises LeadershipLost.

        A former leader decides from an old store, and few of its writes have a precondition: they would undo its
        successor's.
        """
        self._require_leadership()
        return self._client

    async def write(
        self, writer: Reconciled, plan: Plan, written: Callable[[Resource, Obj], None] | None = None
    ) -> bool:
        """Make all writes of a plan but that of the status: create, apply, patch, then delete.

        `writer` is the object that is reconciled. The answers are put into the store; those about kinds that are not
        watched are passed to `written` instead. Returns whether somebody else has changed one of the objects meanwhile,
        so that the plan may be outdated.
        """
        others_wrote = False
        must_apply_again = self._dropped.must_apply_again(writer)

        def record_answer(write: Write, answer: Obj, sent: Obj | None = None) -> None:
            """Keep an answer, the fields of `sent` that it lacks, and whether the watch saw a version of others.

            The watch notes the versions that it reports during a write: one that is not the answer's is of others, and
            sets `others_wrote`. The answers about Secrets, which are not watched, go to `written`, not into the store.
            """
            nonlocal others_wrote
            if sent is not None:
                self._dropped.note(write.writer, write.resource, sent, answer)
            if write.resource in UNWATCHED:
                if written is not None:
                    written(write.resource, answer)
            else:
                self._store.put(write.resource, answer)
                others_wrote |= not write.watched_versions <= {answer["metadata"]["resourceVersion"]}

        # Create what does not exist.
        for resource, obj in plan.create:
            with self.writing(resource, object_key(obj), writer) as write:
                answer, is_new = await self._create(resource, obj)
                record_answer(write, answer, obj if is_new else None)

        # Apply what differs from the store.
        for resource, obj in plan.apply:
            with self.writing(resource, object_key(obj), writer) as write:
                try:
                    applied = await self._apply(resource, obj, must_apply_again=must_apply_again)
                except (Forbidden, NotFound) as error:
                    if resource not in MONITORING:  # PodMonitors hold up nothing else
                        raise
                    log.warning("monitor_refused", object=f"{resource.kind} {object_key(obj)}", error=str(error))
                    continue
                if applied is not None:  # None: nothing differed
                    record_answer(write, applied, obj)

        # Patch, and delete.
        for patch in plan.patch:
            resource, namespace, name, _uid = patch.ref
            with self.writing(resource, ObjectKey(namespace, name), writer) as write:
                record_answer(write, await self.client.patch_json(resource, name, namespace or None, patch.operations))
        await self._delete_all(plan.delete)
        return others_wrote

    @contextlib.contextmanager
    def writing(self, resource: Resource, key: ObjectKey, writer: Reconciled) -> Iterator[Write]:
        """Register a write as under way in this context, so that its events do not enqueue its writer."""
        self.under_way[resource, key] = write = Write(resource, writer)
        try:
            yield write
        finally:
            self.under_way.pop((resource, key), None)

    async def _create(self, resource: Resource, obj: Obj) -> tuple[Obj, bool]:
        """Create an object, or read the one of this name that we made; return it, and whether it is new.

        Raises NotOurs if somebody else has made it.
        """
        try:
            return await self.client.create(resource, obj), True
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
            return await self._get_ours(resource, obj), False

    async def _apply(self, resource: Resource, obj: Obj, *, must_apply_again: bool) -> Obj | None:
        """Apply an object; returns the answer, or None if the store shows that it would change nothing.

        `must_apply_again`: apply it even so, as the API server has dropped a field of it, or of another object of its
        writer, before, which the store does not show, and may keep the field by now.
        """
        metadata = obj["metadata"]
        observed = self._store.get(resource, metadata["name"], metadata.get("namespace"))
        if observed is None:
            return await self._apply_first(resource, obj)
        _require_ours(resource, observed, obj)
        if not must_apply_again and not needs_apply(resource, obj, observed):
            return None
        return await self.client.apply(resource, obj, field_manager=FIELD_MANAGER)

    async def _apply_first(self, resource: Resource, obj: Obj) -> Obj:
        """Apply an object that the store does not have; returns the answer.

        Another owner may have made one of this name, so it is applied without force first, which then is a conflict. If
        the existing one is ours, it is applied by force; else NotOurs is raised.
        """
        try:
            # Without force, a field that another manager owns with another value is a conflict.
            return await self.client.apply(resource, obj, field_manager=FIELD_MANAGER, force=False)
        except Conflict as conflict:
            try:
                await self._get_ours(resource, obj)
            except NotFound:
                raise conflict from None  # there is no other owner: a webhook refused it
            return await self.client.apply(resource, obj, field_manager=FIELD_MANAGER)

    async def _get_ours(self, resource: Resource, obj: Obj) -> Obj:
        """Read the existing object with the name of a desired one; raises NotOurs unless it has the same owner."""
        metadata = obj["metadata"]
        existing = await self._client.get(resource, metadata["name"], metadata.get("namespace"))
        _require_ours(resource, existing, obj)
        return existing

    async def _delete_all(self, refs: Sequence[Ref]) -> None:
        """Delete all objects, also after a refusal; then raise the first refusal."""
        refused: list[ApiError] = []
        for ref in refs:
            try:
                await self._delete(ref)
            except ApiError as error:  # one that is refused keeps no other object alive
                refused.append(error)
        if refused:
            raise refused[0]

    async def _delete(self, ref: Ref) -> None:
        """Delete an object; if it is gone, or its name belongs to another one, only remove it from the store."""
        try:
            await self.client.delete(ref.resource, ref.name, ref.namespace or None, uid=ref.uid)
        except (NotFound, Conflict) as error:
            # A successor that has the name is a conflict, but a webhook may refuse by the same status.
            if isinstance(error, Conflict) and await self._exists(ref):
                raise
            self._store.remove(ref.resource, ref.namespace or None, ref.name, uid=ref.uid)

    async def _exists(self, ref: Ref) -> bool:
        """Return whether the API server still has this very object, and not only another one of its name."""
        try:
            current = await self._client.get(ref.resource, ref.name, ref.namespace or None)
        except NotFound:
            return False
        return bool(current["metadata"]["uid"] == ref.uid)


def _require_ours(resource: Resource, existing: Obj, wanted: Obj) -> None:
    """Raise NotOurs, which names the true owner, unless the existing object has the same owner as the wanted one.

    A former owner has the kind and name of ours and another uid: it was deleted and made anew. Its objects are left to
    the garbage collector, and NotDeletedYet is raised until they are gone (NotOurs for a claim that is being deleted).
    Those of a MetalHost are taken over, since its grants must not stay for the minutes that this may take: applying
    them replaces the owner reference.
    """
    ours, theirs = controller_of(wanted), controller_of(existing)  # the controlling owners
    if ours is None or (theirs is not None and theirs["uid"] == ours["uid"]):
        return

    # 1. Another owner has it, or none.
    metadata = wanted["metadata"]
    object_name = f"{resource.kind} {'/'.join(filter(None, (metadata.get('namespace'), metadata['name'])))}"
    owner_name = f"{ours['kind']} {ours['name']}"
    is_of_former_owner = theirs is not None and (theirs["kind"], theirs["name"]) == (ours["kind"], ours["name"])
    if not is_of_former_owner:
        made_by = f"belongs to {theirs['kind']} {theirs['name']}" if theirs else "was not made by Pomona"
        raise NotOurs(f"{object_name} exists and {made_by}: delete it, or choose another name for {owner_name}")

    # 2. A former owner of the same name has it: that of a MetalHost is taken over, others go to the garbage collector.
    if ours["kind"] == METAL_HOSTS.kind:
        return
    problem = f"{object_name} of a former {owner_name} still exists: waiting until"
    if resource == PVCS and "deletionTimestamp" in existing["metadata"]:
        raise NotOurs(f"{problem} no pod mounts it: suspend the InferenceServices of the Model")
    raise NotDeletedYet(f"{problem} it is deleted")
