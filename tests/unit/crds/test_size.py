"""Sizes are printed in the unit that fits them."""

import pytest

from crds.size import GIB, share_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (448352, "437.8 KiB"),
        (25 * 2**29, "12.5 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_size_is_printed_in_its_unit(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("part_bytes", "total_bytes", "text"),
    [
        (GIB, 4 * GIB, "1.0 GiB of 4.0 GiB, 25 %"),
        (4 * GIB - 1, 4 * GIB, "4.0 GiB of 4.0 GiB, 99 %"),
        (GIB, None, "1.0 GiB"),
        (0, 0, "0 B"),
    ],
)
def test_share_is_rounded_down_and_needs_a_total(part_bytes: int, total_bytes: int | None, text: str) -> None:
    assert share_text(part_bytes, total_bytes) == text
