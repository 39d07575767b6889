"""Snapshot, plan and reconciler: the seam between pure decisions and the shell that executes them.

A decision reads one `Snapshot` and returns one `Plan`, without touching the cluster or a clock. So it can be tested
without either, be tried on a hypothetical state, and be repeated after a crash at any point: executing a plan twice is
harmless, and a plan for a state that is already reached is empty.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from controller.reconcile.indexes import OWNER_INDEX, namespaced
from controller.reconcile.triggers import Reads, Trigger, all_but_status
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY, ObjectMeta
from kube.client import Client, Obj
from kube.events import EventRecorder
from kube.resources import ObjectKey, Resource
from kube.store import Store

FIELD_MANAGER: Final = "pomona-controller"

log = structlog.get_logger()

T = TypeVar("T")


class Ref(NamedTuple):
    """One object with its uid: a deletion by `uid` cannot hit a successor with the same name."""

    resource: Resource
    namespace: str
    name: str
    uid: str


class Patch(NamedTuple):
    """A JSON patch. If a `test` operation fails, the object has changed since, and is reconciled again."""

    ref: Ref
    operations: Sequence[Mapping[str, Any]]


class Event(NamedTuple):
    """A Kubernetes Event about the reconciled object."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All writes for one object, in this order; empty when the cluster is as desired."""

    create: tuple[tuple[Resource, Obj], ...] = ()
    """Objects to create if absent, such as a token; an existing object is a success and is never changed."""
    apply: tuple[tuple[Resource, Obj], ...] = ()
    """Whole desired objects for server-side apply; an object that the store already has is not sent."""
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    status: Obj | None = None
    """Whole desired status; its conditions are without lastTransitionTime, which the executor adds."""
    waiting: tuple[str, ...] = ()
    """Conditions beside Ready that wait for these writes: while they are not True, a refusal is their reason."""
    labels: Mapping[str, str] | None = None
    """All discovery labels of the reconciled object; None leaves those that it has."""
    events: tuple[Event, ...] = ()
    again_seconds: float | None = None
    """Reconcile again after this time even if no watch reports a change."""
    effects: tuple[Any, ...] = ()
    """Work to begin or end in this process, such as a probe; each effect is harmless when repeated."""


class Snapshot(msgspec.Struct, frozen=True):
    """Inputs of one decision: the store, the wall clock, and inputs that are not in the watch cache."""

    store: Store
    now: datetime
    inputs: Any = None
    """The result of the reconciler's `observe`."""

    def get(self, resource: Resource, key: ObjectKey) -> Obj | None:
        """Return the object as the API server sent it, or None."""
        return self.store.get(resource, key.name, key.namespace or None)

    def read(self, resource: Resource, key: ObjectKey, struct: type[T]) -> T | None:
        """Return the object as `struct`, or None if it does not exist or cannot be decoded."""
        stored = self.get(resource, key)
        if stored is None:
            return None
        decoded = decode_stored(self.store, resource, [stored], struct)
        return decoded[0] if decoded else None

    def children(self, resource: Resource, namespace: str, owner_uid: str) -> Sequence[Obj]:
        """Return the objects of a namespace whose controlling owner has this uid."""
        return self.store.by_index(resource, OWNER_INDEX, namespaced(namespace, owner_uid))


class Reconciler(msgspec.Struct, frozen=True, kw_only=True):
    """One reconciler: its resource, its decision, and the changes that trigger it."""

    resource: Resource
    decide: Callable[[Snapshot, ObjectKey], Plan]
    """A pure function. Also called for an object that is gone or being deleted."""
    reads: Reads = all_but_status
    """The part of the object itself that the decision reads: any other change of it enqueues nothing."""
    triggers: tuple[Trigger, ...] = ()
    """The changes of other objects that enqueue an object."""
    observe: Callable[[Client, Snapshot, ObjectKey], Awaitable[Any]] | None = None
    """Reads the inputs that are not in the watch cache, such as a Secret or a probe's result, for `Snapshot.inputs`."""
    perform: Callable[[ObjectKey, Any], None] | None = None
    """Performs one of the effects of a plan, before its writes."""
    written: Callable[[Resource, Obj], None] | None = None
    """Gets the answer to each write of an object that is not watched, such as a Secret."""
    restart: Callable[[], None] | None = None
    """Forgets what `observe` and `written` have learned, before this replica leads: another leader may have written."""


def lead_alone() -> None:
    """Raise nothing: a controller that runs alone always leads."""


class Leading(NamedTuple):
    """Client, store, event recorder and `enqueue`, for a task that runs while this replica leads."""

    client: Client
    store: Store
    recorder: EventRecorder
    enqueue: Callable[[Resource, ObjectKey], None]
    require_leadership: Callable[[], None] = lead_alone
    """Raises LeadershipLost; called right before a write that a suspended leader must not make later."""


LeaderTask = Callable[[Leading], Awaitable[None]]
"""A task that starts when leadership is gained and is cancelled when it is lost; the task must not return earlier."""


def readable(objects: Iterable[Obj], struct: type[T]) -> list[T]:
    """Return the objects that can be decoded, as structs: one malformed object must not stop all other decisions.

    A status with values that only a newer agent writes counts as empty, so that running replicas keep running.
    """
    return [decoded for obj in objects if (decoded := _decode(obj, struct)) is not None]


def decode_stored(store: Store, resource: Resource, objects: Iterable[Obj], struct: type[T]) -> list[T]:
    """Return objects of the store as `readable` does; each version of an object is decoded once."""
    decoded = (store.derive(resource, obj, struct.__name__, functools.partial(_decode, obj, struct)) for obj in objects)
    return [instance for instance in decoded if instance is not None]


def _decode(obj: Obj, struct: type[T]) -> T | None:
    """Return the object as a struct, with an empty status if its status cannot be decoded.

    None: the rest cannot be decoded, either. Each failure is logged.
    """
    for variant in (obj, {**obj, "status": {}}):
        try:
            return msgspec.convert(variant, struct)
        except msgspec.ValidationError as error:
            log.warning("object_not_decoded", kind=struct.__name__, name=obj["metadata"]["name"], error=str(error))
    return None


def owned_by(resource: Resource, owner: ObjectMeta) -> Obj:
    """Return the owner reference that makes an object controlled by `owner`, and garbage-collected with it."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(
    resource: Resource, name: str, parent: Resource, owner: ObjectMeta, labels: Mapping[str, str], **body: object
) -> tuple[Resource, Obj]:
    """Return a desired object in the namespace of `owner`, an object of kind `parent`, which controls it.

    It has our label beside `labels`; `body` has its other top-level fields, such as spec.
    """
    metadata: Obj = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {LABEL_MANAGED_BY: MANAGED_BY, **labels},
        "ownerReferences": [owned_by(parent, owner)],
    }
    return resource, {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **body}


def ref(resource: Resource, obj: Obj) -> Ref:
    """Return the reference to an object with its uid."""
    metadata = obj["metadata"]
    return Ref(resource, metadata.get("namespace", ""), metadata["name"], metadata["uid"])


def ref_to(resource: Resource, metadata: ObjectMeta) -> Ref:
    """Return the reference to an object with this metadata."""
    return Ref(resource, metadata.namespace, metadata.name, metadata.uid)


def prune(observed: Iterable[tuple[Resource, Obj]], desired: Iterable[tuple[Resource, Obj]]) -> tuple[Ref, ...]:
    """Return the observed children that are no longer desired and not being deleted yet."""
    wanted = {(resource, obj["metadata"]["name"]) for resource, obj in desired}
    return tuple(
        ref(resource, obj)
        for resource, obj in observed
        if (resource, obj["metadata"]["name"]) not in wanted and "deletionTimestamp" not in obj["metadata"]
    )
