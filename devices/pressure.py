"""Memory pressure of the host, which decides when models are held back and evicted.

macOS has its own level, with hysteresis, which accounts for memory that can be compressed; shares of memory are no
measure there (a healthy Mac has hardly any free memory, and swap in use means nothing). Linux has no level, so it is
derived from two signals: the time that tasks wait for memory (PSI), which is the harm itself, and the available memory,
which falls earlier.
"""

import sys
from pathlib import Path
from typing import Final, Literal, NamedTuple

import psutil

from devices import libsystem, proc

PressureLevel = Literal["normal", "warn", "critical"]

_KERNEL_LEVELS: Final[dict[int, PressureLevel]] = {1: "normal", 2: "warn", 4: "critical"}
"""Values of kern.memorystatus_vm_pressure_level; any other value, including 0, is no level."""

_WAITING_PERCENT: Final = 10.0
"""Share of the last 10 s in which some task (warn), or every one (critical), waited for memory.

Waiting is 0 on a healthy host, and a tenth of a second lost each second slows every stream noticeably. systemd-oomd
kills at 60 % for 30 s, which is too late to drain first.
"""
_WARN_SHARE: Final = 0.10
_CRITICAL_SHARE: Final = 0.05
"""Shares of the host's memory that are still available; at these earlyoom, by default, sends SIGTERM and SIGKILL."""
_WARN_BYTES: Final = 4 * 2**30
_CRITICAL_BYTES: Final = 2 * 2**30
"""With this much available memory a large host is not short of memory, regardless of the share."""


class PressureReading(NamedTuple):
    """Pressure, swap and available memory at one time; a fact that could not be read is None."""

    level: PressureLevel | None = None
    swap_used_bytes: int | None = None
    available_bytes: int | None = None


def read() -> PressureReading:
    """Read the pressure now. Blocks for less than a millisecond, and starts no process."""
    return _read_macos() if sys.platform == "darwin" else _read_linux()


def kernel_level(number: int | None) -> PressureLevel | None:
    """Return the level for a value of macOS's kern.memorystatus_vm_pressure_level."""
    return None if number is None else _KERNEL_LEVELS.get(number)


def derived_level(
    some_percent: float | None, full_percent: float | None, available_bytes: int | None, memory_bytes: int | None
) -> PressureLevel | None:
    """Derive Linux's level: the worse of the levels by waiting and by available memory; None if neither is known.

    Args:
        some_percent: share of the last 10 s in which some task waited for memory (PSI); None: unknown.
        full_percent: the share in which all tasks waited at once; None: unknown.
        available_bytes: memory that programs could still get; None: unknown.
        memory_bytes: all memory of the host; None: unknown.
    """
    if some_percent is None and full_percent is None and (available_bytes is None or memory_bytes is None):
        return None

    # A share that is unknown counts as 0, and unknown memory as enough.
    waiting_all, waiting_some = full_percent or 0, some_percent or 0
    is_critical = is_short = False
    if available_bytes is not None and memory_bytes is not None:
        # A share of the memory, but no more than some GiB: a large host is not short with those left.
        is_critical = available_bytes < min(memory_bytes * _CRITICAL_SHARE, _CRITICAL_BYTES)
        is_short = available_bytes < min(memory_bytes * _WARN_SHARE, _WARN_BYTES)

    # The worse level of both.
    if is_critical or waiting_all >= _WAITING_PERCENT:
        return "critical"
    return "warn" if is_short or waiting_some >= _WAITING_PERCENT else "normal"


def available_bytes(memory_bytes: int | None, use: libsystem.MemoryUse | None) -> int | None:
    """Return the memory of a Mac that is not in use; None if one of the two is unknown.

    Files in the page cache do not count as use, active or not: the system drops them before it takes memory from a
    program. What psutil calls available leaves out the active ones, such as weights that were read a moment ago.
    """
    return None if memory_bytes is None or use is None else max(0, memory_bytes - use.total_bytes)


def _read_macos() -> PressureReading:
    """Read the pressure of a Mac: the level is the kernel's own."""
    try:
        memory: int | None = psutil.virtual_memory().total or None
    except (OSError, RuntimeError):
        memory = None
    try:
        swap_used = psutil.swap_memory().used
    except (OSError, RuntimeError):
        swap_used = None
    return PressureReading(
        level=kernel_level(libsystem.sysctl_int("kern.memorystatus_vm_pressure_level")),
        swap_used_bytes=swap_used,
        available_bytes=available_bytes(memory, libsystem.memory_use()),
    )


def _read_linux(folder: Path = Path("/proc")) -> PressureReading:
    """Read the pressure of a Linux host: from the times that tasks wait for memory (PSI), and from /proc/meminfo."""
    waiting = proc.parse_pressure(proc.read_limited(folder / "pressure" / "memory"))
    memory = proc.parse_meminfo(proc.read_limited(folder / "meminfo"))
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    swap, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    return PressureReading(
        level=derived_level(waiting.get("some"), waiting.get("full"), available, total),
        swap_used_bytes=None if swap is None or swap_free is None else swap - swap_free,
        available_bytes=available,
    )
