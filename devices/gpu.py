"""The GPU of a Mac, read from the kernel's registry, which alone counts all processes' GPU memory without root."""

import re
from typing import Final, NamedTuple

from devices.tools import output_or_empty

COMMAND: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
_MOST_BYTES: Final = 2**50
"""The driver's counters are unsigned and have been seen to wrap below 0: no Mac has a petabyte."""


class Gpu(NamedTuple):
    """Facts of a Mac's GPU; a fact that could not be read is None."""

    model: str | None = None
    cores: int | None = None
    utilization_percent: int | None = None
    """Over the last second or so."""
    used_bytes: int | None = None
    """Memory of the GPU's buffers in use, of all processes together."""


def read() -> Gpu:
    """Read the GPU now; on other systems all facts are None. Blocks for some 20 ms."""
    return parse(output_or_empty(*COMMAND))


def parse(text: str) -> Gpu:
    """Parse the output of ioreg: one property a line; an incomplete line is ignored.

    Memory and utilization are in the property PerformanceStatistics, a dictionary in one line. Only this line is
    searched, for whole keys: other properties have the same keys, and "In use system memory (driver)" is another value.
    """
    # The pattern ends with the newline, without which the line is incomplete.
    statistics = re.search(r'^[\s|]*"PerformanceStatistics" = \{(.*)\}\n', text, re.MULTILINE)
    values = dict(re.findall(r'"([^"]+)"=([0-9]+)(?=,|$)', statistics[1] if statistics else ""))
    used = _parse_number(values.get("In use system memory"))
    utilization = _parse_number(values.get("Device Utilization %"))
    # Counters of the driver may wrap below 0: a value above `_MOST_BYTES` or 100 % is unknown.
    return Gpu(
        model=_find_property(text, r'"model" = "([^"]+)"'),
        cores=_parse_number(_find_property(text, r'"gpu-core-count" = ([0-9]+)')) or None,
        utilization_percent=utilization if utilization is not None and utilization <= 100 else None,  # noqa: PLR2004 - %
        used_bytes=used if used is not None and used < _MOST_BYTES else None,
    )


def _find_property(text: str, pattern: str) -> str | None:
    """Return the group of a pattern that is a whole line of the output, or None."""
    match = re.search(rf"^[\s|]*{pattern}\n", text, re.MULTILINE)
    return match[1] if match else None


def _parse_number(text: str | None) -> int | None:
    """Return the number; None if there is none, or one of more than 64 bits."""
    # The longest number of 64 bits has 20 digits.
    return int(text) if text is not None and len(text) <= 20 else None  # noqa: PLR2004 - digits
