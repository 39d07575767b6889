"""Rates in tokens a second as the API has them: decimal numbers as text, since Kubernetes advises against floats."""

from typing import Final

_WHOLE: Final = 100
"""Three digits are enough."""


def format_rate(tokens_per_second: float) -> str:
    """Return a rate as a decimal number of about three digits."""
    if tokens_per_second >= _WHOLE:
        return f"{tokens_per_second:.0f}"
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 1 or not tokens_per_second else f"{tokens_per_second:.3f}"
