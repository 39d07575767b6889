"""Rates in tokens a second as the API has them: decimal numbers as text, since Kubernetes advises against floats."""

import math
from typing import Annotated, Final

from msgspec import Meta

Rate = Annotated[str, Meta(max_length=16, pattern=r"^([0-9]+(\.[0-9]+)?)?$")]
"""Tokens per second; empty if they are unknown."""
MOST_REPORTED: Final = 100_000.0
"""Tokens per second that are believed of one process of a host: more than any generates, or reads of a prompt."""
_LEAST_CHANGE: Final = 0.1
_WHOLE: Final = 100
"""Three digits are enough."""


def format_rate(tokens_per_second: float) -> str:
    """Return a rate as a decimal number of about three digits."""
    # From 100 on, three digits stand before the decimal point.
    if tokens_per_second >= _WHOLE:
        return f"{tokens_per_second:.0f}"
    has_one_decimal = tokens_per_second >= 1 or tokens_per_second == 0
    return f"{tokens_per_second:.1f}" if has_one_decimal else f"{tokens_per_second:.3f}"


def read_rate(text: str) -> float | None:
    """Return the tokens per second of a text that nobody has checked; None: it is no positive number."""
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def is_notable_change(shown: float, measured: float) -> bool:
    """Return whether the measured number differs by more than a tenth from the shown number."""
    return abs(measured - shown) > _LEAST_CHANGE * max(shown, measured)
