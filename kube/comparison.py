"""Would applying this object change anything? Decided without asking the server.

Three things are walked together: what we want, what is there, and what the server remembers as ours. Where a field
is ours, its kind is known (associative list, set, atomic), so lists are matched as the server matches them, and a
field that we own and no longer want is found, which a comparison of values alone cannot see.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from kube.ownership import FieldSet, children, is_atomic, keyed_items, set_items

_QUANTITY_MAPS: Final = frozenset({"limits", "requests", "capacity", "overhead"})
_QUANTITY_FIELDS: Final = frozenset({"sizeLimit"})
_SERVER_DEFAULTS: Final = frozenset({"apiVersion", "divisor", "protocol", "expirationSeconds"})
"""What the server adds inside maps and lists that are owned as a whole (fieldRef, endpoint ports, projected tokens)."""
_QUANTITY: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
_POWERS: Final = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How strict to be.

    Attributes:
        zero_is_absent: the server drops empty strings, zeros and the like of built-in kinds, so their absence is as
            good; it keeps them in custom resources.
    """

    zero_is_absent: bool

    def covers(self, observed: Any, desired: Any, owned: FieldSet | None) -> bool:
        """Whether `observed` has all of `desired`, and nothing that is owned and no longer desired.

        Without `owned` nothing counts as no longer desired, and lists are compared by position.
        """
        if isinstance(desired, Mapping):
            return isinstance(observed, Mapping) and self._covers_map(observed, desired, owned)
        if isinstance(desired, list):
            return isinstance(observed, list) and self._covers_list(observed, desired, owned)
        return _equal(observed, desired)

    def _covers_map(self, observed: Mapping[str, Any], desired: Mapping[str, Any], owned: FieldSet | None) -> bool:
        desired = {name: value for name, value in desired.items() if value is not None}
        # An empty map says that it is there, so what the server fills it with is not a difference.
        atomic = owned is not None and is_atomic(owned) and bool(desired)
        if atomic and observed.keys() - desired.keys() - _SERVER_DEFAULTS:
            return False
        parts = children(owned or {})
        if any(name in observed and name not in desired for name in parts):
            return False
        for name, value in desired.items():
            if name not in observed:
                if self.zero_is_absent and not value:
                    continue
                return False
            if not self._covers_field(name, observed[name], value, {} if atomic else parts.get(name)):
                return False
        return True

    def _covers_field(self, name: str, observed: Any, desired: Any, owned: FieldSet | None) -> bool:
        if name in _QUANTITY_FIELDS:
            return _same_quantity(observed, desired)
        if name in _QUANTITY_MAPS and isinstance(desired, Mapping) and isinstance(observed, Mapping):
            amounts = {key: observed[key] for key, value in desired.items() if _same_quantity(observed.get(key), value)}
            desired = {**desired, **amounts}
        return self.covers(observed, desired, owned)

    def _covers_list(self, observed: Sequence[Any], desired: Sequence[Any], owned: FieldSet | None) -> bool:
        if owned and (items := keyed_items(owned)):
            return self._covers_items(observed, desired, items)
        if owned and (members := set_items(owned)):
            return all(item in observed for item in desired) and all(item in desired for item in members)
        return len(observed) == len(desired) and all(
            self.covers(there, wanted, owned) for there, wanted in zip(observed, desired, strict=True)
        )

    def _covers_items(
        self, observed: Sequence[Any], desired: Sequence[Any], owned: Sequence[tuple[Mapping[str, Any], FieldSet]]
    ) -> bool:
        """An associative list: items are found by their keys, in our order; those of others may stand between ours."""
        keys = owned[0][0].keys()
        if not all(any(_identifies(item, identity, keys) for item in desired) for identity, _ in owned):
            return False
        rest = iter(observed)
        for item in desired:
            there = next((other for other in rest if _identifies(item, other, keys)), None)
            fields = next((fields for identity, fields in owned if _identifies(item, identity, keys)), None)
            if there is None or not self.covers(there, item, fields):
                return False
        return True


def _identifies(item: Mapping[str, Any], other: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether `other` is the item that `item` speaks of; a key that it leaves out is the server's default."""
    return all(key not in item or item[key] == other.get(key) for key in keys)


def _equal(observed: Any, desired: Any) -> bool:
    """Equality of JSON scalars, where `true` is not 1."""
    return bool(observed == desired) and isinstance(observed, bool) == isinstance(desired, bool)


def _same_quantity(observed: Any, desired: Any) -> bool:
    amount = _amount(desired)
    return amount is not None and amount == _amount(observed)


def _amount(quantity: Any) -> Decimal | None:
    """The value of a Kubernetes quantity: `500m`, `1Gi`, `2e3`, `4`; None for what is none."""
    match = _QUANTITY.fullmatch(str(quantity))
    if not match:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix.endswith("i"):
        return number * Decimal(1024) ** (1 + "KMGTPE".index(suffix[0]))
    if len(suffix) > 1:
        return number.scaleb(int(suffix[1:]))
    return number.scaleb(_POWERS[suffix])
