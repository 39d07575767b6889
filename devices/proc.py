"""Parsers of Linux's /proc files, in which every line may be missing."""

import re
from pathlib import Path
from typing import Final

_MOST_BYTES: Final = 4 << 20
"""/proc/cpuinfo has some 3 KB for each thread of the processor."""


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo, in bytes."""
    pairs = re.findall(r"^([^\s:]+):\s+([0-9]+) kB$", text, re.MULTILINE)
    return {key: int(kib) * 1024 for key, kib in pairs}


def parse_pressure(text: str) -> dict[str, float]:
    """Read the percentages of the last 10 s of /proc/pressure/memory, by `some` and `full`."""
    pairs = re.findall(r"^(some|full) avg10=([0-9]+\.[0-9]+) ", text, re.MULTILINE)
    return {kind: float(percent) for kind, percent in pairs}


def read_limited(path: Path) -> str:
    """Return the text of a file, at most 4 MiB of it, without white space around it; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
