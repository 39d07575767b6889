"""Quantities as Kubernetes and people write them: 500m, 4Gi, 12GiB, 1.5 GB; one grammar for fields and options."""

import functools
import re
from decimal import Decimal
from typing import Final

from crds.text import shorten_text

_QUANTITY: Final = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?:(?P<suffix>[num]|[eE][+-]?\d{1,3})| ?(?P<unit>[kMGTPE]|[KMGTPE]i)B?| ?B)?",
    re.ASCII,
)
SIZE_FORMS: Final = "a size such as 64Mi, 12GiB or 1.5 GB, or a number of bytes"
"""The forms of a size, for messages."""
_POWERS: Final = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_LONGEST: Final = 64
"""Most characters of a quantity: the time that longer ones take grows with the square of their length."""
_LARGEST: Final = (1 << 63) - 1
"""Largest magnitude of a quantity in Kubernetes, which caps those above it, too."""


def parse_quantity(quantity: object) -> Decimal | None:
    """Return the value of a quantity such as `500m`, `1Gi`, `1.5 GB`, `2e3` or `4`; None for anything else.

    A unit of bytes may end with B, and follow a blank, as in sizes that Pomona prints. A value beyond the largest
    quantity of Kubernetes is capped, and a text of more than 64 characters is none.
    """
    # _LARGEST: the largest quantity of Kubernetes; _LONGEST: most characters of one
    if isinstance(quantity, int):
        quantity = max(-_LARGEST, min(quantity, _LARGEST))
    text = str(quantity)
    return _parse_text(text) if len(text) <= _LONGEST else None


@functools.lru_cache(maxsize=4096)
def _parse_text(text: str) -> Decimal | None:
    """Return the value of a quantity's text, or None; cached, since each report of each node has the same few.

    A suffix is binary (Ki, Mi), an exponent (e3), or decimal (m, k, M).
    """
    match = _QUANTITY.fullmatch(text)
    if not match:
        return None
    number, suffix = Decimal(match["number"]), match["suffix"] or match["unit"] or ""
    # Ki is 1024, Mi its square, and so on; a suffix of several characters that does not end with i is an exponent.
    if suffix.endswith("i"):
        amount = number * Decimal(1024) ** (1 + "KMGTPE".index(suffix[0]))
    elif len(suffix) > 1:
        amount = number.scaleb(int(suffix[1:]))
    else:
        amount = number.scaleb(_POWERS[suffix])
    return max(Decimal(-_LARGEST), min(amount, Decimal(_LARGEST)))


def quantity_bytes(quantity: int | str) -> int:
    """Return the whole bytes of a quantity.

    Raises:
        ValueError: it is none.
    """
    amount = parse_quantity(quantity)
    if amount is None:
        raise ValueError(f"{shorten_text(str(quantity))!r} is not a size: give {SIZE_FORMS}")
    return int(amount)


def write_quantity(quantity: int | str) -> str:
    """Return a valid quantity in the form that Kubernetes reads: without a blank, and without the B of bytes."""
    text = str(quantity).replace(" ", "")
    return text.removesuffix("B")
