"""How much memory a process takes, as the host feels it: what the ledger is corrected by and a victim is chosen by.

On macOS that is the physical footprint: the resident size leaves out Metal's buffers, so that a server with a model of
19 GB shows some 40 MB. On Linux it is the resident size: weights that are mapped from a file are used for every token,
and whoever evicts those pages makes the engine read them again. Pages that two processes share count for both.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from devices import libsystem

_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def footprint_bytes(pid: int) -> int | None:
    """Measure process `pid` and all that it started; None when there is none, or the system does not tell.

    Blocks for less than a millisecond.
    """
    own = _one(pid)
    return None if own is None else own + sum(_one(child) or 0 for child in descendants(pid))


def descendants(pid: int) -> Iterator[int]:
    """Find the processes that `pid` started, and those that they started."""
    seen = {pid}
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
                yield child


def _one(pid: int) -> int | None:
    if sys.platform == "darwin":
        return libsystem.footprint_bytes(pid)
    try:
        return parse_statm((_PROC / str(pid) / "statm").read_text())
    except OSError:
        return None


def parse_statm(text: str) -> int | None:
    """Read the resident size, in bytes, from /proc/PID/statm; a zombie has none."""
    fields = text.split()
    resident = fields[1] if len(fields) > 1 else ""
    return int(resident) * _PAGE_BYTES or None if resident.isascii() and resident.isdecimal() else None


def _children(pid: int) -> list[int]:
    if sys.platform == "darwin":
        return libsystem.children(pid)
    # Each thread lists what it started itself.
    found = []
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return found
