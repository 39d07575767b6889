"""Times in messages are whole seconds that are never negative, and text of others moves no cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.text import countdown_text, escape_controls


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.2, "1 s"),
        (59, "59 s"),
        (59.1, "1:00"),
        (252, "4:12"),
        (3599.5, "1:00:00"),
        (3852, "1:04:12"),
        (86399, "23:59:59"),
        (1e9, "a day or more"),
        (float("inf"), "a day or more"),
    ],
)
def test_countdown_is_in_whole_seconds(seconds: float, text: str) -> None:
    assert countdown_text(seconds) == text


@given(st.text())
def test_text_of_others_moves_no_cursor(text: str) -> None:
    shown = escape_controls(text)
    assert not {character for character in shown if ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0} - {
        "\n",
        "\t",
    }
    assert escape_controls(shown) == shown
