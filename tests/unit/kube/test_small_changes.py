"""Values that change all the time are written by steps."""

import pytest

from kube.comparison import skip_small_changes

GIB = 2**30


@pytest.mark.parametrize(
    ("before", "now", "written"),
    [
        (5 * GIB, 5 * GIB + 900, 5 * GIB),
        (5 * GIB, 6 * GIB - 1, 5 * GIB),
        (5 * GIB, 6 * GIB, 6 * GIB),
        (5 * GIB, 4 * GIB, 4 * GIB),
        (None, 900, 900),
        (5 * GIB, None, None),
    ],
)
def test_fields_that_change_all_the_time_are_written_by_steps(
    before: int | None, now: int | None, written: int | None
) -> None:
    wanted = {"chip": "Apple M5"} | ({} if now is None else {"usedBytes": now})
    observed = {} if before is None else {"usedBytes": before}
    expected = {"chip": "Apple M5"} | ({} if written is None else {"usedBytes": written})
    assert skip_small_changes(wanted, observed, {"usedBytes": GIB}) == expected
