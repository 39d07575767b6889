"""Which fields of an object the API server remembers as ours: managedFields, read as a tree.

A `FieldSet` is FieldsV1 as it is on the wire: `f:name` a field, `k:{...}` an item of an associative list by its
keys, `v:...` an item of a set, `.` the thing itself. A field without children is a leaf, or a list or map that is
owned as a whole (atomic).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kube.client import Obj

FieldSet = Mapping[str, Any]


def owned_fields(observed: Obj, field_manager: str, subresource: str = "") -> FieldSet | None:
    """What `field_manager` applied to `observed`, or None when it never did."""
    for entry in observed["metadata"].get("managedFields", ()):
        if (
            entry.get("manager") == field_manager
            and entry.get("operation") == "Apply"
            and entry.get("subresource", "") == subresource
        ):
            fields: FieldSet = entry.get("fieldsV1", {})
            return fields
    return None


def is_atomic(owned: FieldSet) -> bool:
    """Whether the field is owned as a whole, not by its parts."""
    return not owned


def children(owned: FieldSet) -> dict[str, FieldSet]:
    """The fields of a map, by name."""
    return {name[2:]: fields for name, fields in owned.items() if name.startswith("f:")}


def keyed_items(owned: FieldSet) -> list[tuple[Obj, FieldSet]]:
    """The items of an associative list: the fields that identify each, and what is owned of it."""
    return [(msgspec.json.decode(name[2:]), fields) for name, fields in owned.items() if name.startswith("k:")]


def set_items(owned: FieldSet) -> Sequence[Any]:
    """The items of a set."""
    return [msgspec.json.decode(name[2:]) for name in owned if name.startswith("v:")]
