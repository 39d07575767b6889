"""Sizes are printed in the unit that fits them."""

import pytest

from crds.size import size_text


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
