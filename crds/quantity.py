"""Kubernetes quantities, such as 500m or 4Gi, as numbers."""

import re
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)
_FACTORS: Final = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGT", 1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGT", 1)},
}


def quantity_bytes(quantity: int | str) -> int:
    """Return the bytes of a quantity of the form that `crds.meta.Quantity` allows.

    Raises:
        ValueError: it has another form.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m or 4Gi")
    return int(Decimal(match[1]) * _FACTORS[match[2] or ""])
