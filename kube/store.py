"""The watch cache: the objects observed in the cluster, one dict per resource, with indexes and listeners.

Sources put objects into it (kopf, kube/watch.py, answers to our own writes), reconcilers read from it. The sources race
each other, so the store never goes back in time: an older version of an object does not replace a newer one, and does
not bring back a deleted one. A stored object never changes, so what is derived from it (a decoded struct, a sum over an
index) is kept as long as it is the same object.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kube.client import Obj
from kube.resources import ObjectKey, Resource, object_key

Listener = Callable[[Resource, Obj | None, Obj | None], None]
IndexKeys = Callable[[Obj], Iterable[str]]
"""A pure function that returns the values under which an index finds an object."""
Objects = list[Obj]
Snapshot = Mapping[ObjectKey, tuple[str, str]]
"""(uid, resourceVersion) of each object at one moment."""

_REMEMBERED_DELETIONS = 4096

T = TypeVar("T")


class _ReducedObject(Obj):
    """An object that `keep_part` has reduced already, on its way to the store."""


@dataclass(slots=True)
class _Index:
    keys: IndexKeys
    by_value: defaultdict[str, dict[ObjectKey, Obj]] = field(default_factory=lambda: defaultdict(dict))
    cached_tuples: dict[str, tuple[Obj, ...]] = field(default_factory=dict)
    """The last answer for a value, until an object under that value changes."""

    def change(self, key: ObjectKey, old: Obj | None, new: Obj | None) -> None:
        """Move an object from the values that the index had for its old version to those of its new one.

        None as `old`: the object is new. None as `new`: it is removed.
        """
        if old:
            for value in self.keys(old):
                self.cached_tuples.pop(value, None)  # `get` makes the tuple of this value anew
                self.by_value[value].pop(key, None)
                if not self.by_value[value]:
                    del self.by_value[value]
        if new:
            for value in self.keys(new):
                self.cached_tuples.pop(value, None)
                self.by_value[value][key] = new

    def get(self, value: str) -> tuple[Obj, ...]:
        """Return the objects under a value: the same tuple until one of them changes."""
        if value not in self.by_value:
            return ()
        answer = self.cached_tuples.get(value)
        if answer is None:
            answer = self.cached_tuples[value] = tuple(self.by_value[value].values())
        return answer


class Store:
    """Objects by resource, namespace and name. Never change a returned object: it is shared."""

    def __init__(self) -> None:
        self._objects: defaultdict[Resource, dict[ObjectKey, Obj]] = defaultdict(dict)
        self._indexes: defaultdict[Resource, dict[str, _Index]] = defaultdict(dict)  # by the name given to `add_index`

        # Computed values, kept until what they were computed from changes.
        self._derived: defaultdict[Resource, dict[ObjectKey, dict[str, tuple[tuple[object, ...], Any]]]]
        """Results of `derive` for each object, by name: the inputs that they were computed from, and the value."""
        self._derived = defaultdict(dict)
        self._summaries: dict[str, tuple[tuple[int, ...], Any]] = {}
        """Results of `summarize`, by name: the revisions of its resources, and the value."""
        self._revisions: defaultdict[Resource, int] = defaultdict(int)
        """Number of changes of each resource so far."""
        self._reductions: dict[Resource, Callable[[Obj], Obj]] = {}
        """Functions that return the part of an object which is stored, to save memory."""
        self._listeners: list[Listener] = []
        self._deleted_versions: dict[str, str] = {}
        """The versions of the last deletions by uid, so that no late event brings a deleted object back."""
        self.revision = 0
        """Number of changes so far: while it is the same, so is everything that can be read."""

    def put(self, resource: Resource, obj: Obj) -> bool:
        """Put an observed object; return False if it is ignored, because it is known in this version or a later one.

        An object that was deleted since is ignored as well, and so is a predecessor with the same name: its last event
        may come late.
        """
        uid, version = _read_version(obj)
        old = self._objects[resource].get(object_key(obj))
        if old:
            old_uid, old_version = _read_version(old)
            is_same_object = old_uid == uid
            if is_same_object and not _is_newer(version, old_version):
                return False  # known in this version or a later one
            if not is_same_object and _is_newer(old_version, version):
                return False  # a predecessor of the object that is known

        if uid in self._deleted_versions and not _is_newer(version, self._deleted_versions[uid]):
            return False  # deleted since

        self._set(resource, object_key(obj), obj)
        return True

    def remove(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """Remove an object; return whether it was there.

        Args:
            resource: its resource.
            namespace: its namespace.
            name: its name.
            uid: remove it only if it has this uid.
            resource_version: version of the deletion; an older version that comes later is ignored.
        """
        key = ObjectKey(namespace or "", name)
        old = self._objects[resource].get(key)
        if uid and resource_version:
            self._remember_deletion(uid, resource_version)

        if not old or (uid and _read_version(old)[0] != uid):
            return False
        self._set(resource, key, None)
        return True

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj | None:
        """Return one object, or None when it is not known."""
        return self._objects[resource].get(ObjectKey(namespace or "", name))

    def count(self, resource: Resource) -> int:
        """Return the number of known objects of a resource."""
        return len(self._objects[resource])

    def list(self, resource: Resource, namespace: str | None = None) -> Objects:
        """Return all known objects of a resource, in one namespace or in all."""
        objects = self._objects[resource]
        return [obj for key, obj in objects.items() if not namespace or key.namespace == namespace]

    def add_index(self, resource: Resource, name: str, keys: IndexKeys) -> None:
        """Keep an index of a resource under `name`, which finds an object by each of the values in `keys(object)`."""
        index = _Index(keys)
        for key, obj in self._objects[resource].items():
            index.change(key, None, obj)
        self._indexes[resource][name] = index

    def set_reduction(self, resource: Resource, reduce: Callable[[Obj], Obj]) -> None:
        """Store from now on only the part of each object that `reduce`, a pure function, returns.

        Objects that are stored already stay whole.
        """
        self._reductions[resource] = reduce

    def keep_part(self, resource: Resource, obj: Obj) -> Obj:
        """Return the part of an object that the store keeps of this resource; `put` and `replace` take it as it is.

        A reader of a long list reduces each object so as soon as it is decoded, and never has all whole objects in
        memory: a pod alone takes 65 KB. Without a reduction for the resource, return the object itself.
        """
        reduce = self._reductions.get(resource)
        if reduce is None or isinstance(obj, _ReducedObject):
            return obj
        return _ReducedObject(reduce(obj))

    def by_index(self, resource: Resource, name: str, value: str) -> Sequence[Obj]:
        """Return the objects that the index has under `value`: the same sequence until one of them changes.

        Raises KeyError for an index that was never declared.
        """
        return self._indexes[resource][name].get(value)

    def index_values(self, resource: Resource, name: str) -> Iterable[str]:
        """Return the values under which the index has any object. Raises KeyError as `by_index`."""
        return self._indexes[resource][name].by_value.keys()

    def derive(self, resource: Resource, obj: Obj, name: str, compute: Callable[[], T], *inputs: object) -> T:
        """Return `compute()`, or its last result if `obj` and the `inputs` are the same objects as then.

        Results are kept by object and `name`, until the object changes. `compute` must read nothing but `obj` and the
        inputs. For an `obj` that is not in the store, nothing is kept.
        """
        key = object_key(obj)
        current_inputs = (obj, *inputs)
        is_stored = self._objects[resource].get(key) is obj
        derived = self._derived[resource].setdefault(key, {}) if is_stored else {}  # otherwise nothing is kept

        last_inputs, last_value = derived.get(name, ((), None))
        # The same objects, not equal ones: a stored object never changes.
        if len(last_inputs) == len(current_inputs) and all(map(operator.is_, last_inputs, current_inputs)):
            result: T = last_value
            return result

        value = compute()
        derived[name] = current_inputs, value
        return value

    def summarize(self, resources: Iterable[Resource], name: str, compute: Callable[[], T]) -> T:
        """Return `compute()`, which is kept under `name` until any object of these resources changes.

        `compute` reads nothing but objects of these resources, and nobody changes its result.
        """
        revisions = tuple(self._revisions[resource] for resource in resources)
        if name in self._summaries:
            last_revisions, last_value = self._summaries[name]
            if last_revisions == revisions:
                result: T = last_value
                return result
        value = compute()
        self._summaries[name] = revisions, value
        return value

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(resource, old or None, new or None)` after each change, in the order of changes."""
        self._listeners.append(listener)

    def snapshot(self, resource: Resource, namespace: str | None = None) -> Snapshot:
        """Return the versions known now; take it before a list is requested, and hand it to `replace`."""
        objects = self._objects[resource]
        return {key: _read_version(obj) for key, obj in objects.items() if not namespace or key.namespace == namespace}

    def replace(
        self, resource: Resource, items: Iterable[Obj], *, namespace: str | None = None, before: Snapshot | None = None
    ) -> None:
        """Make the store equal to a list; listeners get exactly the differences, vanished objects among them.

        `before` has the versions that the store knew before the list was requested; None: those that it knows now. An
        object that was put since is younger than the list, and stays.
        """
        before = self.snapshot(resource, namespace) if before is None else before
        present = {object_key(obj): obj for obj in items}
        self._drop_vanished(resource, before, present)

        for key, obj in present.items():
            old = self._objects[resource].get(key)
            if old and _read_version(old) == before.get(key):
                # Unchanged since before the list: the list is right even if its version is older (a restored etcd).
                if _read_version(old) != _read_version(obj):
                    self._set(resource, key, obj)
            else:  # new, or put since
                self.put(resource, obj)

    def _drop_vanished(self, resource: Resource, before: Snapshot, present: Mapping[ObjectKey, Obj]) -> None:
        """Remove objects that were known before a list, are not in it and were not put meanwhile.

        `before` has the versions from before the list, and `present` the objects of the list by namespace and name.
        If the list has another object of the same name (another uid), the old one is only remembered as deleted: the
        caller puts the new one in its place.
        """
        for key, (uid, version) in before.items():
            old = self._objects[resource].get(key)
            listed = present.get(key)
            # Unchanged: not put since `before`. Listed: the list has this very object, by its uid.
            is_unchanged = old is not None and _read_version(old) == (uid, version)
            is_listed = listed is not None and _read_version(listed)[0] == uid
            if is_unchanged and not is_listed:
                self._remember_deletion(uid, version)
                if not listed:  # else another object has its name
                    self._set(resource, key, None)

    def _remember_deletion(self, uid: str, version: str) -> None:
        """Note that an object was deleted, so that no late event of an older version brings it back."""
        self._deleted_versions[uid] = version
        if len(self._deleted_versions) > _REMEMBERED_DELETIONS:
            del self._deleted_versions[next(iter(self._deleted_versions))]  # the one that was noted first

    def _set(self, resource: Resource, key: ObjectKey, new: Obj | None) -> None:
        """Store an object, reduced if the resource has a reduction, or remove it; tell all indexes and listeners."""
        objects = self._objects[resource]
        old = objects.get(key)
        if new is not None and resource in self._reductions:
            # Reduced now, or already by `keep_part`, which marks its result by the class: only a plain dict is stored.
            new = dict(new) if isinstance(new, _ReducedObject) else self._reductions[resource](new)

        # Outdate what was computed from the old object.
        self.revision += 1
        self._revisions[resource] += 1  # outdates what `summarize` keeps of this resource
        self._derived[resource].pop(key, None)  # what was derived from the old object

        if new is None:
            objects.pop(key, None)
        else:
            objects[key] = new

        for index in self._indexes[resource].values():
            index.change(key, old, new)
        for listener in self._listeners:
            listener(resource, old, new)


def _read_version(obj: Obj) -> tuple[str, str]:
    metadata = obj["metadata"]
    return metadata.get("uid", ""), metadata.get("resourceVersion", "")


def _is_newer(version: str, than: str) -> bool:
    """Decide whether a resourceVersion is later; Kubernetes 1.35 promises that decimal ones are ordered."""
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than
