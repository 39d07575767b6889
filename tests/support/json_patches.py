"""JSON patches as the API server applies them, for tests of pure builders of patches."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from kube.client import Obj


def apply_patch(obj: Obj, operations: Sequence[Mapping[str, Any]]) -> Obj:
    """Return the patched object. Raises LookupError: a `test` fails, or a path does not exist."""
    patched = deepcopy(obj)
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = patched
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        _apply(place, last, operation)
    return patched


def _apply(place: Any, last: str, operation: Mapping[str, Any]) -> None:
    if isinstance(place, list):
        if operation["op"] == "add":
            place.insert(len(place) if last == "-" else int(last), operation["value"])
            return
        last_index = int(last)
        if operation["op"] == "remove":
            del place[last_index]
            return
        _require(place[last_index], operation)
        return
    if operation["op"] == "add":
        place[last] = operation["value"]
    elif operation["op"] == "remove":
        del place[last]
    else:
        _require(place[last], operation)


def _require(found: object, operation: Mapping[str, Any]) -> None:
    if found != operation["value"]:
        raise LookupError(f"{operation['path']} is {found!r}, not {operation['value']!r}")
