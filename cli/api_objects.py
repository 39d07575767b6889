"""Objects of the API as the server sends them: any part of their status may be absent."""

from collections.abc import Callable
from typing import Any

Obj = dict[str, Any]


def find_condition(obj: Obj, kind: str) -> Obj:
    """Return a condition of an object; empty if it has none of this type."""
    return next(
        (condition for condition in obj.get("status", {}).get("conditions", []) if condition["type"] == kind), {}
    )


def has_condition(obj: Obj, kind: str) -> bool:
    """Return whether a condition of an object is True; False also if it has none of this type."""
    return find_condition(obj, kind).get("status") == "True"


def count_serving(service: Obj) -> int:
    """Return the replicas of a service that serve, those of an earlier spec included."""
    return int(service.get("status", {}).get("availableReplicas", 0))


def status_reader(field: str) -> Callable[[Obj], str]:
    """Return a function that returns a field of the status of an object as text; empty if it is absent."""
    return lambda obj: str(obj.get("status", {}).get(field, ""))
