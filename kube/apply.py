"""Server-side apply, sent only when it would change something: a needless request costs the server almost as much.

kube/comparison.py decides by the object as it was observed. A status is sent from here, other objects by their writers.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import structlog

from kube.client import Client, Obj
from kube.comparison import Comparison, owned_fields
from kube.errors import ApiError, Conflict, NotFound
from kube.resources import Resource
from kube.time import rfc3339

_STATUS_TRIES = 3
UNDECLARED_SECONDS: Final = 600.0
"""Time after which a field is sent again that the API server did not know: its CRD may have been updated."""
_SELECTOR: Final = r'\[(?:"(?:[^"\\]|\\.)*"|[^\]"])*\]'
"""An item of a list in the path of a field: its position, or its keys, whose values are quoted."""
_UNDECLARED: Final = re.compile(rf"\.status((?:\.[\w-]+|{_SELECTOR})+): field not declared in schema")
_FIELD_NAME: Final = re.compile(rf"{_SELECTOR}|\.([\w-]+)")
_INVALID: Final = 422

FieldPath = tuple[str, ...]
"""The names of fields on the way down from a status; items of lists are not told apart."""

log = structlog.get_logger()


class UndeclaredFields:
    """Fields of statuses that the API server does not know, because its CRDs are of an earlier release.

    It refuses a whole status for one such field, so that an agent that is updated first could report nothing at all.
    """

    def __init__(self) -> None:
        # The time, by `time.monotonic`, until which each field is left out.
        self._left_out_until: dict[tuple[Resource, FieldPath], float] = {}

    def leave_out(self, resource: Resource, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the status without fields that were refused in the last ten minutes."""
        pruned: Mapping[str, Any] = _prune(status, self._list_paths(resource))
        return pruned

    def note_refusal(self, resource: Resource, error: ApiError, sent: Mapping[str, Any]) -> bool:
        """Leave out of later statuses what the server refused in the status `sent`, for ten minutes.

        Return True if less than `sent` is sent the next time, so that another try is of use. Then it is logged.

        1. The fields that the error names as not declared are left out; others may be named by the next refusal.
        2. If it names none, but the object is invalid: perhaps because of a field that is left out already, and that
           the server requires within another. Then the whole top-level field of the status that has it is left out.
        """
        # The fields that the error names: of `.coreLevels[0].speed`, the path is ("coreLevels", "speed").
        paths = {tuple(filter(None, _FIELD_NAME.findall(text))) for text in _UNDECLARED.findall(error.message)}
        if not paths and error.status == _INVALID:  # 422: perhaps a field is required that is left out already
            paths = self._list_paths(resource)

        # Try the paths alone. Only if that changes nothing in what is sent, try their whole top-level fields.
        whole_fields = {path[:1] for path in paths}
        for left_out in (paths, whole_fields):
            for path in left_out:
                self._left_out_until[resource, path] = time.monotonic() + UNDECLARED_SECONDS
            if self.leave_out(resource, sent) != sent:  # without what is left out now, less is sent the next time
                fields = sorted(map(".".join, left_out))
                remedy = "apply the newer crds/"
                log.warning("status_fields_unknown", resource=str(resource), fields=fields, remedy=remedy)
                return True
        return False

    def _list_paths(self, resource: Resource) -> set[FieldPath]:
        """Return the paths of the fields that are left out of a status now."""
        now = time.monotonic()
        return {path for (kind, path), until in self._left_out_until.items() if kind == resource and until > now}


def _prune(value: Any, paths: Collection[FieldPath]) -> Any:
    """Return the value without the fields at these paths, in each item of the lists on the way.

    Each field gets the rest of the paths that begin with its name; a path that consists of its name alone removes it.
    """
    if not paths:
        return value
    if isinstance(value, list):
        return [_prune(item, paths) for item in value]
    if isinstance(value, Mapping):
        return {
            name: _prune(field, [path[1:] for path in paths if path[0] == name])
            for name, field in value.items()
            if (name,) not in paths
        }
    return value


_OF_THIS_PROCESS: Final = UndeclaredFields()
"""A process talks to one API server."""


def is_applied(
    resource: Resource, desired: Mapping[str, Any], observed: Obj, field_manager: str, subresource: str = ""
) -> bool:
    """Decide whether applying `desired` would change nothing: all its fields are there, and we own no others.

    `desired` must have only fields that can be read back: a Secret's `data`, never its write-only `stringData`.
    """
    owned = owned_fields(observed, field_manager, subresource)
    return owned is not None and Comparison(zero_is_absent=not resource.custom).covers(observed, desired, owned)


async def apply_status(
    client: Client,
    resource: Resource,
    observed: Obj,
    status: Mapping[str, Any],
    field_manager: str,
    *,
    undeclared: UndeclaredFields = _OF_THIS_PROCESS,
) -> Obj:
    """Apply `status` as the whole status of `field_manager` on exactly the object `observed`, if it differs.

    Return the object as the server has it then. The write is repeated in two cases:

    * Conflict: the object has changed. It is read again, a few times. The precondition is the resourceVersion, because
      the server ignores a uid on a status, and so would write to a new object of the same name.
    * Refused fields: a server with older CRDs does not know them. They are left out of what is sent.

    Raises as `Client`: NotFound also when the name belongs to another object by now, Conflict when others kept changing
    this one.
    """
    metadata = observed["metadata"]
    identity = {key: metadata[key] for key in ("name", "namespace") if key in metadata}

    tries_left = _STATUS_TRIES
    while True:
        # known_status: without the fields that this server has refused lately
        known_status = undeclared.leave_out(resource, status)
        if is_applied(resource, {"status": known_status}, observed, field_manager, "status"):
            return observed

        version = {"resourceVersion": observed["metadata"]["resourceVersion"]}
        desired = {"metadata": {**identity, **version}, "status": known_status}

        try:
            return await client.apply(resource, desired, field_manager=field_manager, subresource="status")
        except Conflict as conflict:
            observed = await client.get(resource, metadata["name"], metadata.get("namespace"))
            if observed["metadata"]["uid"] != metadata["uid"]:
                message = f"the object of uid {metadata['uid']} is gone; another has its name"
                raise NotFound(conflict.call, status=404, reason="NotFound", message=message) from conflict
            tries_left -= 1
            if not tries_left:
                raise
        except ApiError as error:
            # Less is sent each time, so that this ends.
            if not undeclared.note_refusal(resource, error, known_status):
                raise


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
