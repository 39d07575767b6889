"""Values of a status that change all the time and are written by steps, so that they cost the API server little."""

from collections.abc import Mapping
from typing import Any


def skip_small_changes(
    wanted: Mapping[str, Any], written: Mapping[str, Any], steps: Mapping[str, int]
) -> dict[str, Any]:
    """Return `wanted` with the written value of each field that has changed by less than its step.

    A value that moves around the border of two steps is not written each time, as it would be if it were rounded.
    """
    kept = {}
    for field, step in steps.items():
        now, before = wanted.get(field), written.get(field)
        if isinstance(now, int) and isinstance(before, int) and abs(now - before) < step:
            kept[field] = before
    return {**wanted, **kept}
