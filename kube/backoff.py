"""The pause before the next try, which doubles with each failure up to a bound.

Every retry of Pomona computes its pause here; only the numbers differ. The jitter keeps many clients that lost one
server from coming back at once.
"""

import random
from typing import Final, NamedTuple


class Jitter(NamedTuple):
    """A random factor is drawn between these two."""

    least: float
    most: float


AROUND: Final = Jitter(0.8, 1.2)
"""A fifth more or less."""
BELOW: Final = Jitter(0.5, 1.0)
"""At most the bound, at least half of it."""
EXACT: Final = Jitter(1.0, 1.0)
"""The same pause each time it is computed: for a decision that is repeated until the pause is over."""

_MOST_DOUBLINGS: Final = 32
"""Every bound is reached by then; without this limit the power would overflow after a thousand failures."""


def backoff_seconds(failures: int, *, first: float, most: float, jitter: Jitter = AROUND) -> float:
    """Return the pause after `failures` in a row: `first` after one, doubled with each further one, at most `most`."""
    pause = min(most, first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
    return pause * random.uniform(*jitter)  # noqa: S311 - spreads load, guards no secret
