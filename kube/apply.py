"""Write only what differs: a server-side apply that changes nothing still costs a quarter of one that does.

Whether an apply would change anything is decided from three things: what we want, what is there, and which fields
the server remembers as ours (managedFields). The last finds a field that we set once and no longer want, which a
comparison of values cannot see.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kube.client import Client, Obj
from kube.resources import Resource
from kube.store import Store


def is_subset(desired: Any, observed: Any) -> bool:
    """Whether `observed` has all that `desired` says; what the server added by itself does not count."""
    raise NotImplementedError


def is_applied(
    resource: Resource, desired: Mapping[str, Any], observed: Obj, field_manager: str, subresource: str = ""
) -> bool:
    """Whether applying `desired` would change nothing: all is there, and we own nothing that we no longer want."""
    raise NotImplementedError


async def apply_if_changed(
    client: Client, store: Store, resource: Resource, obj: Mapping[str, Any], field_manager: str
) -> Obj:
    """Apply unless the store shows that it would change nothing; the answer goes into the store. Raises as `Client`."""
    raise NotImplementedError


async def apply_status(
    client: Client, resource: Resource, observed: Obj, status: Mapping[str, Any], field_manager: str
) -> Obj:
    """Apply `status` as the whole status of `field_manager` on the very object `observed` (by uid), if it differs.

    Raises, besides the usual of `Client`: Conflict when the name now belongs to another object, NotFound when to none.
    """
    raise NotImplementedError


def merge_conditions(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], now: datetime) -> list[Obj]:
    """The conditions `new`, each with the lastTransitionTime of its predecessor unless its status changed."""
    raise NotImplementedError
