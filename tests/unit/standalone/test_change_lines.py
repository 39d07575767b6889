"""A line is printed for a change, and for the progress of a download only when it is due."""

import pytest
from msgspec import structs

from standalone.change_lines import is_news
from standalone.service_rows import ServiceRow

PENDING = ServiceRow(service="a", phase="Pending", replicas=1, ready_replicas=0)
IDLE = ServiceRow(service="a", phase="Idle")
DOWNLOADING = ServiceRow(service="a", phase="Downloading", bytes=1, total_bytes=9)
STARTING = ServiceRow(service="a", phase="Starting", seconds_left=9.0, replicas=1, ready_replicas=0)


@pytest.mark.parametrize(
    ("last", "row", "is_due", "is_printed"),
    [
        (None, PENDING, True, False),
        (IDLE, PENDING, True, False),
        (None, structs.replace(PENDING, message="another engine is loading"), True, True),
        (None, IDLE, False, True),
        (IDLE, IDLE, True, False),
        (IDLE, STARTING, False, True),
        (STARTING, structs.replace(STARTING, seconds_left=3.0), True, False),
        (STARTING, structs.replace(STARTING, message="it answers 503"), False, True),
        (IDLE, DOWNLOADING, False, True),
        (DOWNLOADING, structs.replace(DOWNLOADING, bytes=5), False, False),
        (DOWNLOADING, structs.replace(DOWNLOADING, bytes=5), True, True),
        (DOWNLOADING, DOWNLOADING, True, False),
        (DOWNLOADING, IDLE, False, True),
    ],
)
def test_line_says_something_new(last: ServiceRow | None, row: ServiceRow, *, is_due: bool, is_printed: bool) -> None:
    assert is_news(last, row, is_due=is_due) == is_printed
