"""Decide without asking the server whether applying an object would change it.

Three trees are walked together: the desired object, the observed one, and the fields that the server has recorded as
ours in managedFields. If a field is ours, its kind is known (associative list, set, atomic), so lists are matched as
the server matches them, and a field that we own and no longer desire is found, which a comparison of values alone
cannot see.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from crds.quantity import parse_quantity
from kube.client import Obj

FieldSet = Mapping[str, Any]
"""FieldsV1 as it is on the wire: `f:name` a field, `k:{...}` an item of an associative list by its keys, `v:...` an
item of a set, `.` the object itself. A field without children is a leaf, or a list or map owned as a whole (atomic).
"""

_QUANTITY_MAPS: Final = frozenset({"limits", "requests", "capacity", "overhead"})
_QUANTITY_FIELDS: Final = frozenset({"sizeLimit"})
_SERVER_DEFAULTS: Final = frozenset({"apiVersion", "divisor", "protocol", "expirationSeconds"})
"""Fields that the server adds in maps and lists owned as a whole (fieldRef, endpoint ports, projected tokens)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of desired and observed, with its strictness.

    Attributes:
        zero_is_absent: the server drops empty strings, zeros and similar values of built-in kinds, so their absence is
            no difference; it keeps them in custom resources.
    """

    zero_is_absent: bool

    def covers(self, observed: Any, desired: Any, owned: FieldSet | None) -> bool:
        """Decide whether `observed` has all of `desired`, and nothing that we own and no longer desire.

        Args:
            observed: a value of an object, as the server has it: a map, a list or a scalar.
            desired: the value that we want there.
            owned: the fields within it that we own, as managedFields states them. None: we own nothing there, so
                nothing counts as no longer desired, and lists are compared by position.
        """
        if isinstance(desired, Mapping):
            return isinstance(observed, Mapping) and self._covers_map(observed, desired, owned)
        if isinstance(desired, list):
            return isinstance(observed, list) and self._covers_list(observed, desired, owned)
        return _is_equal_scalar(observed, desired)

    def _covers_map(self, observed: Mapping[str, Any], desired: Mapping[str, Any], owned: FieldSet | None) -> bool:
        """Decide whether a map has all desired fields, and none that is ours and no longer desired.

        A desired None stands for no field. With `zero_is_absent`, an absent field is equal to an empty value or 0.
        """
        desired = {name: value for name, value in desired.items() if value is not None}

        # 1. Is anything there that is ours, and no longer desired? `owned` names the fields of the map that we own. If
        # it is empty, the map is ours as a whole (atomic). But an empty desired map only states that the field exists,
        # so fields that the server adds to it are no difference.
        is_atomic = owned is not None and not owned and bool(desired)
        if is_atomic and observed.keys() - desired.keys() - _SERVER_DEFAULTS:  # fields that the server adds itself
            return False
        owned_by_name = _list_fields(owned or {})
        if any(name in observed and name not in desired for name in owned_by_name):
            return False

        # 2. Is all there that is desired? What we own within each field is decided by the map: in an atomic one the
        # field is ours as a whole, too ({}); in another one, None stands for a field that is not ours.
        for name, value in desired.items():
            if name not in observed:
                if self.zero_is_absent and not value:
                    continue
                return False
            if not self._covers_field(name, observed[name], value, {} if is_atomic else owned_by_name.get(name)):
                return False
        return True

    def _covers_field(self, name: str, observed: Any, desired: Any, owned: FieldSet | None) -> bool:
        """Compare one field; quantities such as 1Gi and 1024Mi are equal by their amounts."""
        if name in _QUANTITY_FIELDS:
            return _is_equal_quantity(observed, desired)
        if name in _QUANTITY_MAPS and isinstance(desired, Mapping) and isinstance(observed, Mapping):
            # Where the amounts are equal, the observed text stands for the desired one.
            equal = {
                key: observed[key] for key, value in desired.items() if _is_equal_quantity(observed.get(key), value)
            }
            desired = {**desired, **equal}
        return self.covers(observed, desired, owned)

    def _covers_list(self, observed: Sequence[Any], desired: Sequence[Any], owned: FieldSet | None) -> bool:
        """Compare a list as the server merges it, which shows in what we own of it.

        * Names that begin with `k:` are items of an associative list, which are found by their keys.
        * Names that begin with `v:` are members of a set: all desired are there, and all of ours are still desired.
        * Else the lists are compared item by item.
        """
        if owned and (items := _list_keyed_items(owned)):
            return self._covers_items(observed, desired, items)
        if owned and (members := [msgspec.json.decode(name[2:]) for name in owned if name.startswith("v:")]):
            return all(item in observed for item in desired) and all(item in desired for item in members)
        # Here `owned` is None or empty, or names no items: each item is owned as the list is.
        if len(observed) != len(desired):
            return False
        return all(self.covers(present, wanted, owned) for present, wanted in zip(observed, desired, strict=True))

    def _covers_items(
        self, observed: Sequence[Any], desired: Sequence[Any], owned: Sequence[tuple[Mapping[str, Any], FieldSet]]
    ) -> bool:
        """Compare an associative list: items match by their keys, in our order; other items may stand between ours.

        `owned` has, for each item that we own, the fields that identify it (such as `containerPort` and `protocol`),
        and the fields that we own in it. All items of one list are identified by the same fields.
        """
        # 1. Is each item that we own still desired?
        # `_identifies` compares two items by the fields `keys`.
        first_identity, _ = owned[0]
        keys = first_identity.keys()
        for identity, _ in owned:
            if not any(_identifies(item, identity, keys) for item in desired):
                return False  # we own an item that is no longer desired

        # 2. Is each desired item there? The search goes on behind the item before, so another order is a difference.
        following = iter(observed)  # `next` leaves it behind the item that was found
        for item in desired:
            counterpart = next((other for other in following if _identifies(item, other, keys)), None)
            owned_of_item = next((fields for identity, fields in owned if _identifies(item, identity, keys)), None)
            if counterpart is None or not self.covers(counterpart, item, owned_of_item):
                return False
        return True


def list_dropped(sent: Any, answer: Any, path: str = "") -> list[str]:
    """Return the paths of the fields that were sent and that the answer to the write lacks.

    An API server leaves out, without a word, what it does not know or has switched off. Not counted are empty values,
    which it leaves out as well, and plain values in a list. An item of a list is compared with the item of its name.
    """
    if isinstance(sent, Mapping) and isinstance(answer, Mapping):
        dropped = []
        for name, value in sent.items():
            if name in answer:
                dropped += list_dropped(value, answer[name], f"{path}.{name}")
            elif _has_content(value):
                dropped.append(f"{path}.{name}")
        return dropped

    if isinstance(sent, list) and isinstance(answer, list):
        return [lost for position, item in enumerate(sent) for lost in _list_dropped_item(item, answer, path, position)]
    return []


def _list_dropped_item(item: Any, answer: Sequence[Any], path: str, position: int) -> list[str]:
    """Return the dropped fields of one item of a list, compared with its counterpart in the answer.

    That is the item of its name; of several, or for an item without a name, the one that lacks the fewest fields. If
    none has its name, all its fields but the name are dropped; without a name and without a candidate, none are.
    """
    if not isinstance(item, Mapping):
        return []
    # Not by position: a policy may add items anywhere. Several mounts of one volume have the same name. If no item has
    # the name, the counterpart is one that has nothing but the name.
    name, candidates = item.get("name"), [other for other in answer if isinstance(other, Mapping)]
    if name is not None:
        candidates = [other for other in candidates if other.get("name") == name] or [{"name": name}]
    where = f"{path}[{position if name is None else name}]"
    return min((list_dropped(item, other, where) for other in candidates), key=len, default=[])


def _has_content(value: Any) -> bool:
    """Return whether a value is more than empty maps, lists, texts, zeros and False."""
    if isinstance(value, Mapping):
        return any(map(_has_content, value.values()))
    return bool(value)


def covers_owned(owned: FieldSet, desired: Any) -> bool:
    """Decide whether all fields of `desired` are still owned, whatever their values: no other writer has taken one.

    Empty values do not count, and lists are looked into only if we own items in them by their keys.
    """
    if not owned:
        return True  # owned as a whole, with all that is within it
    if isinstance(desired, Mapping):  # managedFields write a field as `f:<name>`
        return all(
            f"f:{name}" in owned and covers_owned(owned[f"f:{name}"], value) for name, value in desired.items() if value
        )

    if isinstance(desired, list) and (items := _list_keyed_items(owned)):
        first_identity, _ = items[0]
        keys = first_identity.keys()
        # Each desired item is one of ours by its keys, and its fields are still owned.
        return all(
            any(_identifies(item, identity, keys) and covers_owned(fields, item) for identity, fields in items)
            for item in desired
        )
    return True


def _identifies(item: Mapping[str, Any], other: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Decide whether both have the same keys; a key that `item` leaves out is the server's default."""
    return all(key not in item or item[key] == other.get(key) for key in keys)


def _is_equal_scalar(observed: Any, desired: Any) -> bool:
    """Compare JSON scalars, where `true` is not 1."""
    return bool(observed == desired) and isinstance(observed, bool) == isinstance(desired, bool)


def _is_equal_quantity(observed: Any, desired: Any) -> bool:
    amount = parse_quantity(desired)
    return amount is not None and amount == parse_quantity(observed)


def owned_fields(observed: Obj, field_manager: str, subresource: str = "") -> FieldSet | None:
    """Return the fields that `field_manager` applied to `observed`, or None when it never applied any."""
    for entry in observed["metadata"].get("managedFields", ()):
        writer = (entry.get("manager"), entry.get("operation"), entry.get("subresource", ""))
        if writer == (field_manager, "Apply", subresource):
            fields: FieldSet = entry.get("fieldsV1", {})
            return fields
    return None


def _list_fields(owned: FieldSet) -> dict[str, FieldSet]:
    """Return the fields of a map, by name."""
    return {name[2:]: fields for name, fields in owned.items() if name.startswith("f:")}


def _list_keyed_items(owned: FieldSet) -> list[tuple[Obj, FieldSet]]:
    """Return the items of an associative list: the fields that identify each, and the fields owned of it."""
    return [(_decode_identity(name), fields) for name, fields in owned.items() if name.startswith("k:")]


@functools.lru_cache(maxsize=4096)
def _decode_identity(name: str) -> Obj:
    """Return the fields that identify an item; never change the result, which is kept."""
    identity: Obj = msgspec.json.decode(name[2:])
    return identity


def skip_small_changes(
    wanted: Mapping[str, Any], written: Mapping[str, Any], steps: Mapping[str, int]
) -> dict[str, Any]:
    """Return `wanted`, but with the value that was written last where an integer has changed by less than its step.

    So small changes cause no write. Rounding to steps instead would write a value each time that it moves across the
    border of two steps.

    Args:
        wanted: the fields as they are now.
        written: the fields as they were written last.
        steps: the least change that is written, for each of the fields that are compared.
    """
    kept = {}
    for field, step in steps.items():
        now, before = wanted.get(field), written.get(field)
        if isinstance(now, int) and isinstance(before, int) and abs(now - before) < step:
            kept[field] = before
    return {**wanted, **kept}
