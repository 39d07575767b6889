"""Numbers and texts of tools: what is missing, absurd or no number is unknown."""

import pytest

from devices.node import checked_values
from devices.node.checked_values import clean_text

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "number"),
    [("81559", 81_559), (" 81559 MiB ", 81_559), ("53.0", 53), ("-3", -3), ("[N/A]", None), ("", None), ("0x10", None)],
)
def test_number_is_read_with_or_without_its_unit(text: str, number: int | None) -> None:
    assert checked_values.parse_number(text) == number


@pytest.mark.parametrize(("text", "percent"), [("0", 0), ("100 %", 100), ("101", None), ("-1", None), ("ERR!", None)])
def test_utilization_is_a_percentage(text: str, percent: int | None) -> None:
    assert checked_values.parse_percent(text) == percent


@pytest.mark.parametrize(("text", "celsius"), [("41", 41), ("-50", -50), ("-51", None), ("200", 200), ("201", None)])
def test_temperature_is_one_that_a_device_can_have(text: str, celsius: int | None) -> None:
    assert checked_values.parse_celsius(text) == celsius
    assert checked_values.parse_celsius(f"{text}000", parts=1000) == celsius


@pytest.mark.parametrize(
    ("text", "size_bytes", "rest_bytes"),
    [
        ("16", 16 * MIB, 16 * MIB),
        ("0", None, 0),
        ("-1", None, None),
        (str(2**30), 2**50, 2**50),
        (str(2**30 + 1), None, None),
    ],
)
def test_size_is_not_0_and_a_rest_may_be(text: str, size_bytes: int | None, rest_bytes: int | None) -> None:
    assert checked_values.parse_size_bytes(text, MIB) == size_bytes
    assert checked_values.parse_rest_bytes(text, MIB) == rest_bytes


def test_free_memory_is_never_negative() -> None:
    assert checked_values.subtract_used(8, 9) == 0
    assert checked_values.subtract_used(8, 3) == 5
    assert checked_values.subtract_used(None, 3) is checked_values.subtract_used(8, None) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("  NVIDIA  H100\n", "NVIDIA H100"),
        ("a\x1b[31m\x00b", "a [31m b"),
        ("[N/A]", ""),
        ("ERR!", ""),
        ("x" * 999, "x" * 256),
    ],
)
def test_text_is_printable_and_short(text: str, shown: str) -> None:
    assert clean_text(text) == shown
