"""The indexes of the controller's store, so that a decision finds an owner's children without a look at all objects."""

from collections.abc import Iterable
from typing import Final

from kube.client import Obj
from kube.resources import Resource
from kube.store import Store

OWNER_INDEX: Final = "owner"
"""Name of the store index from the uid of the controlling owner to its children."""


def index_by_owner(store: Store, resources: Iterable[Resource]) -> None:
    """Keep `OWNER_INDEX` for these resources."""
    for resource in resources:
        store.index(resource, OWNER_INDEX, _owner_uids)


def controller_of(obj: Obj) -> Obj | None:
    """Return the owner reference of the object that controls this one, or None."""
    references: list[Obj] = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def _owner_uids(obj: Obj) -> list[str]:
    owner = controller_of(obj)
    return [owner["uid"]] if owner else []
