"""Formats in which devices compute, by architecture; an unknown one is unknown, not false."""

import pytest

from devices.node.number_formats import find_number_formats


@pytest.mark.parametrize(
    ("vendor", "architecture", "formats"),
    [
        ("nvidia", "sm_70", (False, False)),
        ("nvidia", "sm_75", (True, False)),
        ("nvidia", "sm_86", (True, False)),
        ("nvidia", "sm_89", (True, True)),
        ("nvidia", "sm_90", (False, True)),
        ("nvidia", "sm_120", (False, True)),
        ("nvidia", "", (None, None)),
        ("amd", "gfx90a", (False, False)),
        ("amd", "gfx942", (False, True)),
        ("amd", "gfx950", (False, True)),
        ("amd", "gfx1100", (True, False)),
        ("amd", "gfx1201", (True, True)),
        ("amd", "gfx1300", (None, None)),
        ("amd", "?", (None, None)),
        ("intel-gaudi", "gaudi", (None, False)),
        ("intel-gaudi", "gaudi3", (None, True)),
        ("intel-gaudi", "gaudi9", (None, None)),
        ("intel", "", (None, None)),
    ],
)
def test_formats_follow_from_the_architecture(
    vendor: str, architecture: str, formats: tuple[bool | None, bool | None]
) -> None:
    assert find_number_formats(vendor, architecture) == formats
