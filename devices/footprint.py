"""Memory that a process takes from the host: it corrects the ledger and decides which process is evicted.

On macOS that is the physical footprint: the resident size leaves out Metal's buffers, so that a server with a model of
19 GB shows some 40 MB. On Linux it is the resident size: weights that are mapped from a file are used for every token,
and evicting those pages makes the engine read them again. Pages that two processes share count for both.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from devices import libsystem

_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Footprint(NamedTuple):
    """Memory of a process and all its descendants."""

    bytes: int
    unavailable_bytes: int
    """Bytes that cannot be reclaimed: on Linux without the pages of files, which can be read again."""


def footprint_bytes(pid: int) -> int | None:
    """Measure process `pid` and its descendants; None when it does not run or cannot be measured.

    Blocks for less than a millisecond.
    """
    measured = footprint(pid)
    return measured.bytes if measured else None


def footprint(pid: int) -> Footprint | None:
    """Measure the memory of process `pid` and its descendants; None if it does not run or cannot be measured.

    The part of it that cannot be reclaimed is measured, too. Descendants that end meanwhile are left out.
    """
    own = _measure_process(pid)
    if own is None:
        return None
    family = [own, *(measured for child in descendants(pid) if (measured := _measure_process(child)))]
    return Footprint(sum(member.bytes for member in family), sum(member.unavailable_bytes for member in family))


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of process `pid` and its descendants so far; None when it does not run.

    The time of a child that has ended is its parent's. Blocks for less than a millisecond.
    """
    own = _read_cpu_seconds(pid)
    return None if own is None else own + sum(_read_cpu_seconds(child) or 0.0 for child in descendants(pid))


def _read_cpu_seconds(pid: int) -> float | None:
    """Return the processor time of one process and of its children that have ended; None if it does not run."""
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return float(times.user + times.system + times.children_user + times.children_system)


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of the process `pid`, each once."""
    yielded = {pid}
    waiting = [pid]
    # `waiting`: processes whose children are still to be listed; `yielded` guards against a process id that comes
    # twice.
    while waiting:
        for child in _list_children(waiting.pop()):
            if child not in yielded:
                yielded.add(child)
                waiting.append(child)
                yield child


def _measure_process(pid: int) -> Footprint | None:
    """Measure one process without its descendants; None if it does not run."""
    if sys.platform == "darwin":
        measured = libsystem.footprint_bytes(pid)
        # The footprint of macOS counts no pages of files, so that nothing of it can be reclaimed.
        return None if measured is None else Footprint(bytes=measured, unavailable_bytes=measured)
    try:
        return parse_statm((_PROC / str(pid) / "statm").read_text())
    except OSError:
        return None


def parse_statm(text: str) -> Footprint | None:
    """Read the resident size, and its share without pages of files, from /proc/PID/statm; None for a zombie."""
    # Its fields are numbers of pages: size, resident, shared, and others. A zombie has 0 resident pages.
    _, _, rest = text.partition(" ")
    resident, _, rest = rest.partition(" ")
    shared = rest.partition(" ")[0].strip()
    if not all(number.isascii() and number.isdecimal() for number in (resident, shared)) or not int(resident):
        return None
    return Footprint(int(resident) * _PAGE_BYTES, max(0, int(resident) - int(shared)) * _PAGE_BYTES)


def _list_children(pid: int) -> list[int]:
    """Return the child processes of `pid`, of all its threads."""
    if sys.platform == "darwin":
        return libsystem.children(pid)
    # Each thread lists only the processes that it started.
    children = []
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return children
