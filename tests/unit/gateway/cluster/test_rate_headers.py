"""Durations and times in headers about rate limits, as clients read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.rate_headers import format_duration, format_time

UNITS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (120_000, "120ms"),
        (999_001, "1s"),
        (1_500_000, "1.5s"),
        (59_822_000, "59.822s"),
        (60_000_000, "1m0s"),
        (360_000_000, "6m0s"),
        (3_600_000_000, "1h0m0s"),
        (3_661_500_000, "1h1m1.5s"),
    ],
)
def test_duration_is_that_of_go(microseconds: int, text: str) -> None:
    assert format_duration(microseconds) == text


@given(st.integers(0, 10**12))
def test_duration_is_read_back_in_milliseconds(microseconds: int) -> None:
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", format_duration(microseconds))
    assert "".join(number + unit for number, unit in parts) == format_duration(microseconds)
    read = sum(float(number) * UNITS[unit] for number, unit in parts)
    assert 0 <= round(read) - microseconds < 1000


def test_time_is_rounded_up() -> None:
    assert format_time(1_798_761_600.0) == "2027-01-01T00:00:00Z"
    assert format_time(1_798_761_600.2) == "2027-01-01T00:00:01Z"
