"""What a reconciler decides, and how it is registered: the seam between pure decisions and the shell in `run.py`.

A decision reads one `Snapshot` and returns one `Plan`, without touching the cluster or a clock. So it can be tested
without either, be asked "what if", and be repeated after a crash at any point: executing a plan twice is harmless, and
a plan for a state that already holds is empty.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from crds.meta import LABEL_MANAGED_BY, MANAGED_BY, ObjectMeta
from kube.client import Client, Obj
from kube.events import Recorder
from kube.resources import Resource
from kube.store import Store

FIELD_MANAGER: Final = "pomona-controller"
OWNER_INDEX: Final = "owner"
"""Name of the store index from the uid of the controlling owner to its children."""

log = structlog.get_logger()

T = TypeVar("T")


class Key(NamedTuple):
    """Name of an object; `namespace` is empty for a cluster-scoped one."""

    namespace: str
    name: str


class Ref(NamedTuple):
    """One object of one life: a deletion by `uid` cannot hit a successor with the same name."""

    resource: Resource
    namespace: str
    name: str
    uid: str


class Patch(NamedTuple):
    """A JSON patch; a failed `test` operation means that the world moved on, and is decided anew."""

    ref: Ref
    operations: Sequence[Mapping[str, Any]]


class Event(NamedTuple):
    """A Kubernetes Event about the reconciled object."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be done for one object, in this order; empty when the state already holds."""

    create: tuple[tuple[Resource, Obj], ...] = ()
    """Made when absent and never touched again, as a token is; one that exists already is success."""
    apply: tuple[tuple[Resource, Obj], ...] = ()
    """Whole desired objects for server-side apply; one that the store already has is not sent."""
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    status: Obj | None = None
    """Whole desired status, with conditions as `status.condition` makes them: the shell adds lastTransitionTime."""
    events: tuple[Event, ...] = ()
    again_seconds: float | None = None
    """Decide again after this time even if nothing is seen to change."""


class Snapshot(msgspec.Struct, frozen=True):
    """What one decision may read: the store as it is now, the wall clock, and facts that no watch brings."""

    store: Store
    now: datetime
    facts: Any = None
    """Whatever the kind's `observe` returned."""

    def get(self, resource: Resource, key: Key) -> Obj | None:
        """Return the object as the API server sent it, or None."""
        return self.store.get(resource, key.name, key.namespace or None)

    def read(self, resource: Resource, key: Key, struct: type[T]) -> T | None:
        """Return the object as `struct`, or None."""
        found = self.get(resource, key)
        return None if found is None else msgspec.convert(found, struct)

    def children(self, resource: Resource, owner_uid: str) -> list[Obj]:
        """Return the objects whose controlling owner has this uid."""
        return self.store.by_index(resource, OWNER_INDEX, owner_uid)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of a reconciler."""

    resource: Resource
    decide: Callable[[Snapshot, Key], Plan]
    """Pure. Called also for an object that is gone or being deleted."""
    owns: tuple[Resource, ...] = ()
    """A change of one of these is a change of its controlling owner."""
    maps: Mapping[Resource, Callable[[Store, Obj], Iterable[Key]]] = {}
    """A change of one of these is a change of the objects that the function names."""
    observe: Callable[[Client, Snapshot, Key], Awaitable[Any]] | None = None
    """Reads what no watch brings, such as a Secret or the answer of an endpoint; becomes `Snapshot.facts`."""


class Leading(NamedTuple):
    """What a task that runs while this replica leads gets: the doors, and a way to have an object decided anew."""

    client: Client
    store: Store
    recorder: Recorder
    enqueue: Callable[[Resource, Key], None]


LeaderTask = Callable[[Leading], Awaitable[None]]
"""Runs from gaining leadership until cancelled on its loss; it must not return earlier."""


def readable(objects: Iterable[Obj], struct: type[T]) -> list[T]:
    """Return objects as structs, those that can be read: one odd object must not stop the decisions about all others.

    A status in words that only a newer agent knows counts as none, so that what is there stays there.
    """
    found = []
    for obj in objects:
        for known in (obj, {**obj, "status": {}}):
            try:
                found.append(msgspec.convert(known, struct))
                break
            except msgspec.ValidationError as error:
                log.warning("not readable", kind=struct.__name__, name=obj["metadata"]["name"], error=str(error))
    return found


def controller_of(obj: Obj) -> Obj | None:
    """Return the owner reference of the object that controls this one, or None."""
    references: list[Obj] = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


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
    """Return a desired object in the owner's namespace: ours by label, its owner's by reference."""
    metadata: Obj = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {LABEL_MANAGED_BY: MANAGED_BY, **labels},
        "ownerReferences": [owned_by(parent, owner)],
    }
    return resource, {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **body}


def ref(resource: Resource, obj: Obj) -> Ref:
    """Return what identifies this life of an object."""
    metadata = obj["metadata"]
    return Ref(resource, metadata.get("namespace", ""), metadata["name"], metadata["uid"])


def prune(observed: Iterable[tuple[Resource, Obj]], desired: Iterable[tuple[Resource, Obj]]) -> tuple[Ref, ...]:
    """Return the observed children that are no longer desired and not being deleted yet."""
    wanted = {(resource, obj["metadata"]["name"]) for resource, obj in desired}
    return tuple(
        ref(resource, obj)
        for resource, obj in observed
        if (resource, obj["metadata"]["name"]) not in wanted and "deletionTimestamp" not in obj["metadata"]
    )
