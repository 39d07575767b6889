"""The facts about a service in words, without characters that move a cursor."""

from typing import Any

import pytest

from crds.text import escape_controls
from standalone.row_text import describe_detail, describe_requests
from standalone.service_rows import ServiceRow
from tests.support.api_objects import GIB

COUNTS: dict[str, Any] = {"requests": 1234, "failed_requests": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (ServiceRow(service="a", phase="Idle"), ""),
        (ServiceRow(service="a", phase="Idle", message="it needs 9 GiB"), "it needs 9 GiB"),
        (ServiceRow(service="a", phase="Waiting"), "waiting for memory that other models use"),
        (
            ServiceRow(
                service="a",
                phase="Fetching",
                bytes=GIB,
                total_bytes=4 * GIB,
                bytes_per_second=32.0 * 2**20,
                seconds_left=96.0,
            ),
            "1.0 GiB of 4.0 GiB, 25 %, 32.0 MiB/s, 1:36 left",
        ),
        (ServiceRow(service="a", phase="Downloading", bytes=GIB), "1.0 GiB"),
        (ServiceRow(service="a", phase="Fetching"), ""),
        (ServiceRow(service="a", phase="Starting"), "loading"),
        (ServiceRow(service="a", phase="Starting", seconds_left=11.2), "loading, about 12 s left"),
        (
            ServiceRow(service="a", phase="Starting", seconds_left=0.0, memory_bytes=GIB, reserved_bytes=4 * GIB),
            "loading, longer than usual, 1.0 GiB of about 4.0 GiB",
        ),
        (ServiceRow(service="a", phase="Starting", message="it answers 503"), "it answers 503"),
        (ServiceRow(service="a", phase="Starting", note="the last edit is bad"), "loading; the last edit is bad"),
        (ServiceRow(service="a", phase="Ready", replicas=1, ready_replicas=1), ""),
        (
            ServiceRow(service="a", phase="Degraded", message="crashed", replicas=2, ready_replicas=1),
            "1 of 2 replicas are ready; crashed",
        ),
        (
            ServiceRow(service="a", phase="Ready", idle_limit_seconds=300, unload_seconds=251.5, **COUNTS),
            "unloads in 4:12",
        ),
        (
            ServiceRow(service="a", phase="Ready", idle_limit_seconds=300, **COUNTS | {"running": 1}),
            "unloads 5:00 after its last request",
        ),
        (
            ServiceRow(service="a", phase="Ready", **COUNTS | {"failed_requests": 2}),
            "2 of 1,234 requests failed",
        ),
    ],
)
def test_detail_is_in_words(row: ServiceRow, detail: str) -> None:
    assert describe_detail(row) == detail


def test_message_of_an_engine_moves_no_cursor_and_is_one_line() -> None:
    row = ServiceRow(service="a", phase="Failed", message="bad\nhead\x1b[2J\x1b]52;c;Y3Vy\x07\x9b1A")
    assert describe_detail(row) == r"bad head\x1b[2J\x1b]52;c;Y3Vy\x07\x9b1A"
    assert escape_controls(describe_detail(row)) == describe_detail(row)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, ""),
        (COUNTS, "1,234"),
        (COUNTS | {"running": 2}, "1,234 (2 running)"),
        (COUNTS | {"waiting": 3}, "1,234 (3 waiting)"),
        (COUNTS | {"running": 2, "waiting": 3}, "1,234 (2 running, 3 waiting)"),
    ],
)
def test_requests_that_run_and_wait_are_counted(counts: dict[str, Any], text: str) -> None:
    assert describe_requests(ServiceRow(service="a", phase="Ready", **counts)) == text
