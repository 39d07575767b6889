"""How long to wait before the next try: exponential, bounded, and spread so that many do not try at once."""

import random

_JITTER = 0.2


def backoff_seconds(failures: int, *, first: float, most: float) -> float:
    """`first` seconds after one failure, doubling with each, at most `most`; give or take a fifth."""
    # Beyond 32 doublings every bound is reached, and the power would grow for ever.
    wait = min(most, first * 2.0 ** min(failures - 1, 32))
    return wait * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spreads load, guards no secret
