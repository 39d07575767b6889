"""Server-side apply, sent only when it would change something: a needless request costs the server almost as much.

kube/comparison.py decides by the object as it was observed. A status is sent from here, other objects by their writers.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kube.client import Client, Obj
from kube.comparison import Comparison, owned_fields
from kube.errors import Conflict, NotFound
from kube.resources import Resource
from kube.time import rfc3339

_STATUS_TRIES = 3


def is_applied(
    resource: Resource, desired: Mapping[str, Any], observed: Obj, field_manager: str, subresource: str = ""
) -> bool:
    """Decide whether applying `desired` would change nothing: all its fields are there, and we own no others.

    `desired` must have only fields that can be read back: a Secret's `data`, never its write-only `stringData`.
    """
    owned = owned_fields(observed, field_manager, subresource)
    return owned is not None and Comparison(zero_is_absent=not resource.custom).covers(observed, desired, owned)


async def apply_status(
    client: Client, resource: Resource, observed: Obj, status: Mapping[str, Any], field_manager: str
) -> Obj:
    """Apply `status` as the whole status of `field_manager` on exactly the object `observed`, if it differs.

    The server ignores a uid on a status, so the version is the precondition; an outdated object is read again.

    Raises as `Client`: NotFound also when the name belongs to another object by now, Conflict when others kept changing
    this one.
    """
    metadata = observed["metadata"]
    identity = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    for tries_left in reversed(range(_STATUS_TRIES)):
        if is_applied(resource, {"status": status}, observed, field_manager, "status"):
            break
        version = {"resourceVersion": observed["metadata"]["resourceVersion"]}
        desired = {"metadata": {**identity, **version}, "status": status}
        try:
            return await client.apply(resource, desired, field_manager=field_manager, subresource="status")
        except Conflict as conflict:
            observed = await client.get(resource, metadata["name"], metadata.get("namespace"))
            if observed["metadata"]["uid"] != metadata["uid"]:
                message = f"the object of uid {metadata['uid']} is gone; another has its name"
                raise NotFound(conflict.call, status=404, reason="NotFound", message=message) from conflict
            if not tries_left:
                raise
    return observed


def merge_conditions(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], now: datetime) -> list[Obj]:
    """Return the conditions `new`, each with the lastTransitionTime of its predecessor unless its status changed."""
    before = {condition["type"]: condition for condition in old}
    merged = []
    for condition in new:
        predecessor = before.get(condition["type"], {})
        unchanged = predecessor.get("status") == condition["status"]
        since = predecessor.get("lastTransitionTime") if unchanged else None
        merged.append({**condition, "lastTransitionTime": since or rfc3339(now)})
    return merged
