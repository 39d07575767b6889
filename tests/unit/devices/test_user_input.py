"""The time since the last input of a Mac. Its fixture was typed after the format of the tool, not captured."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.user_input import parse_hid_idle, read_idle_seconds
from tests.unit.devices.recordings import recorded, stand_in

TYPED = recorded("ioreg_hid_typed.txt")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (TYPED, 123.456789012),
        (TYPED.replace("123456789012", "0"), 0.0),
        (TYPED + TYPED.replace("123456789012", "5000000000"), 5.0),
        ('    | |   "HIDIdleTime" = 1000000000\n', 1.0),
        (TYPED.replace('"HIDIdleTime" = 123456789012\n', ""), None),
        (TYPED.replace("123456789012", "18446744073709551616000"), None),
        (TYPED.replace("123456789012", "-1"), None),
        ("", None),
    ],
)
def test_idle_time_of_a_mac(text: str, seconds: float | None) -> None:
    assert parse_hid_idle(text) == seconds


@given(st.text())
def test_any_other_output_is_unknown_or_a_time(text: str) -> None:
    seconds = parse_hid_idle(text)
    assert seconds is None or seconds >= 0


def test_missing_tool_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    stand_in(monkeypatch, {"ioreg": TYPED})
    assert read_idle_seconds() == 123.456789012
    stand_in(monkeypatch, {})
    assert read_idle_seconds() is None


def test_other_systems_report_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert read_idle_seconds() is None
