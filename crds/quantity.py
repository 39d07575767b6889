"""Kubernetes quantities, such as 500m or 4Gi, as numbers."""

import re
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?", re.ASCII)
_POWERS: Final = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse_quantity(quantity: object) -> Decimal | None:
    """Return the value of a Kubernetes quantity such as `500m`, `1Gi`, `2e3` or `4`; None for anything else."""
    match = _QUANTITY.fullmatch(str(quantity))
    if not match:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix.endswith("i"):
        return number * Decimal(1024) ** (1 + "KMGTPE".index(suffix[0]))
    if len(suffix) > 1:
        return number.scaleb(int(suffix[1:]))
    return number.scaleb(_POWERS[suffix])


def quantity_bytes(quantity: int | str) -> int:
    """Return the whole bytes of a quantity.

    Raises:
        ValueError: it is none.
    """
    amount = parse_quantity(quantity)
    if amount is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m or 4Gi")
    return int(amount)
