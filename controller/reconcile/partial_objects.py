"""Objects of which the store keeps a part: whole ones take 45 KB of memory for a pod alone, most of it unread.

What drops here must be read by no decision. Of managedFields, our own entries say what we applied; in an object that
is only created and never applied they say nothing. The field sets in them are the same for most objects of a kind, so
equal ones are kept once.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from controller.reconcile.plan import FIELD_MANAGER
from controller.reconcile.stamp import is_stamped
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SERVICES,
    Resource,
)
from kube.store import Store

_MOST_SHARED: Final = 4096


class _SharedFields:
    """The field sets that many objects have in common."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def share(self, obj: Obj) -> Obj:
        """Return the object with the field sets that are kept already in place of equal ones."""
        entries = [
            {**entry, "fieldsV1": {name: self._find(fields) for name, fields in entry.get("fieldsV1", {}).items()}}
            for entry in obj["metadata"].get("managedFields", ())
        ]
        return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}

    def share_part(self, part: Callable[[Obj], Obj], obj: Obj) -> Obj:
        """Return a part of the object as `share` does."""
        return self.share(part(obj))

    def _find(self, fields: Any) -> Any:
        if len(self._known) > _MOST_SHARED:
            self._known.clear()
        return self._known.setdefault(msgspec.json.encode(fields), fields)


def declare_partial_objects(store: Store) -> None:
    """Keep only the part of each object that decisions read."""
    shared = _SharedFields()
    for resource in (INFERENCE_SERVICES, MODELS, METAL_HOSTS, METAL_PROCESSES):
        store.reduce(resource, shared.share)
    for resource, part in _PARTS.items():
        store.reduce(resource, functools.partial(shared.share_part, part))


def _of_pod(obj: Obj) -> Obj:
    return {name: value for name, value in _unmanaged(obj).items() if name != "spec"}


def _unmanaged(obj: Obj) -> Obj:
    return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name != "managedFields"}}


def _managed_by_us(obj: Obj) -> Obj:
    entries = [entry for entry in obj["metadata"].get("managedFields", ()) if entry.get("manager") == FIELD_MANAGER]
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def _of_deployment(obj: Obj) -> Obj:
    """Return a Deployment without what its stamp stands for; one of an earlier version is compared by all values."""
    if not is_stamped(obj):
        return _managed_by_us(obj)
    containers = obj["spec"]["template"]["spec"]["containers"]
    kept = [{name: each[name] for name in ("name", "resources", "lifecycle") if name in each} for each in containers]
    spec = {"replicas": obj["spec"].get("replicas"), "template": {"spec": {"containers": kept}}}
    return {**_managed_by_us(obj), "spec": spec}


_PARTS: Final[Mapping[Resource, Callable[[Obj], Obj]]] = {
    PODS: _of_pod,
    DEPLOYMENTS: _of_deployment,
    **dict.fromkeys((JOBS, PVCS, ENDPOINT_SLICES), _unmanaged),
    **dict.fromkeys((SERVICES, ROLES, ROLE_BINDINGS), _managed_by_us),
}
