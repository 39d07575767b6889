"""Memory pressure: macOS's levels, the derived level of Linux, and None where the system states nothing."""

import struct
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices import libsystem, pressure, proc
from devices.pressure import PressureLevel, PressureReading

GIB = 2**30
PAGE_BYTES = 16384
MAC_MINI_32G = {
    "wired": 134298,
    "active": 585195,
    "inactive": 410479,
    "purgeable": 23079,
    "file_backed": 538942,
    "anonymous": 640314,
    "compressor": 96636,
}
"""Pages of a Mac mini with 32 GiB under ordinary use, as its vm_stat printed them (public report of May 2026)."""


def vm_statistics(**pages: int) -> bytes:
    """Return a vm_statistics64 as <mach/vm_statistics.h> lays it out; a number that is not given is 7."""
    names = ("free", "active", "inactive", "wired")
    more = ("compressor", "throttled", "file_backed", "anonymous")
    return struct.pack(
        "=4I9Q2I4Q4IQ",
        *(pages.get(name, 7) for name in names),
        *[7] * 9,
        pages.get("purgeable", 7),
        7,
        *[7] * 4,
        *(pages.get(name, 7) for name in more),
        7,
    )


def test_memory_in_use_of_a_recorded_mac() -> None:
    use = libsystem.parse_memory_use(vm_statistics(**MAC_MINI_32G), PAGE_BYTES)
    assert use is not None
    # Wired, compressor and anonymous pages without the purgeable ones; no page of a file.
    assert use.total_bytes == (134298 + 96636 + 640314 - 23079) * PAGE_BYTES
    available = pressure.available_bytes(32 * GIB, use)
    assert available is not None
    assert available / GIB == pytest.approx(19.06, abs=0.01)


@pytest.mark.parametrize("statistics", [b"", vm_statistics(wired=1)[:-1], vm_statistics(wired=0)])
def test_cut_statistics_are_unknown(statistics: bytes) -> None:
    assert libsystem.parse_memory_use(statistics, PAGE_BYTES) is None
    assert pressure.available_bytes(32 * GIB, None) is None


@given(st.binary(min_size=152, max_size=160))
def test_available_memory_is_never_negative(statistics: bytes) -> None:
    use = libsystem.parse_memory_use(statistics, PAGE_BYTES)
    available = pressure.available_bytes(32 * GIB, use)
    assert available is None or 0 <= available <= 32 * GIB


@pytest.mark.parametrize(
    ("number", "level"),
    [(1, "normal"), (2, "warn"), (4, "critical"), (0, None), (3, None), (8, None), (-1, None), (None, None)],
)
def test_levels_of_macos(number: int | None, level: PressureLevel | None) -> None:
    assert pressure.kernel_level(number) == level


@pytest.mark.parametrize(
    ("some", "full", "available", "memory", "level"),
    [
        (0.0, 0.0, 60 * GIB, 64 * GIB, "normal"),
        (9.9, 9.9, 60 * GIB, 64 * GIB, "normal"),
        (10.0, 1.0, 60 * GIB, 64 * GIB, "warn"),
        (30.0, 10.0, 60 * GIB, 64 * GIB, "critical"),
        (0.0, 0.0, 3 * GIB // 2, 16 * GIB, "warn"),
        (0.0, 0.0, 3 * GIB // 4, 16 * GIB, "critical"),
        # 5 % of a large host is enough memory.
        (0.0, 0.0, 6 * GIB, 256 * GIB, "normal"),
        (0.0, 0.0, 3 * GIB, 256 * GIB, "warn"),
        (0.0, 0.0, 1 * GIB, 256 * GIB, "critical"),
        # A kernel without one of the two facts.
        (None, None, 60 * GIB, 64 * GIB, "normal"),
        (None, None, 1 * GIB, 64 * GIB, "critical"),
        (0.0, None, None, None, "normal"),
        (0.0, 12.5, None, 64 * GIB, "critical"),
        (None, None, None, 64 * GIB, None),
        (None, None, 60 * GIB, None, None),
    ],
)
def test_levels_of_linux(
    some: float | None, full: float | None, available: int | None, memory: int | None, level: PressureLevel | None
) -> None:
    assert pressure.derived_level(some, full, available, memory) == level


@given(st.text())
def test_garbage_is_no_pressure_and_no_memory(text: str) -> None:
    assert proc.parse_pressure(text) == {}
    assert proc.parse_meminfo(text) == {}


def kernel(folder: Path, waiting: str | None, memory: str | None) -> Path:
    (folder / "pressure").mkdir()
    if waiting is not None:
        (folder / "pressure" / "memory").write_text(waiting)
    if memory is not None:
        (folder / "meminfo").write_text(memory)
    return folder


def test_pressure_of_a_linux_host_that_waits_for_memory(tmp_path: Path) -> None:
    waiting = "some avg10=42.17 avg60=20.02 avg300=5.61 total=9182\nfull avg10=3.05 avg60=1.10 avg300=0.24 total=440\n"
    memory = (
        "MemTotal:       65843172 kB\nMemFree:          812340 kB\nMemAvailable:   30408704 kB\n"
        "SwapTotal:       8388604 kB\nSwapFree:        6291456 kB\nHugePages_Total:       0\n"
    )
    reading = pressure._read_linux(kernel(tmp_path, waiting, memory))
    assert reading == PressureReading("warn", 2097148 * 1024, 30408704 * 1024)


@pytest.mark.parametrize("said", [None, "", "MemTotal:\nSwapTotal: some kB\n"])
def test_missing_kernel_files_are_unknown_and_not_zero(tmp_path: Path, said: str | None) -> None:
    assert pressure._read_linux(kernel(tmp_path, said, said)) == PressureReading(None, None, None)


def test_host_without_swap_uses_zero_bytes_of_swap(tmp_path: Path) -> None:
    memory = "MemTotal: 65843172 kB\nMemAvailable: 30408704 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    assert pressure._read_linux(kernel(tmp_path, None, memory)) == PressureReading("normal", 0, 30408704 * 1024)


def test_pressure_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsystem, "sysctl_int", {"kern.memorystatus_vm_pressure_level": 2}.get)
    monkeypatch.setattr(libsystem, "memory_use", lambda: libsystem.MemoryUse(3 * PAGE_BYTES, 0, 2 * PAGE_BYTES, 0))
    reading = pressure._read_macos()
    assert reading.level == "warn"
    assert reading.available_bytes == psutil.virtual_memory().total - 5 * PAGE_BYTES
    assert reading.swap_used_bytes is not None


def test_a_mac_without_values_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("host_statistics64 failed")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(psutil, "swap_memory", refuse)
    monkeypatch.setattr(libsystem, "sysctl_int", lambda _: None)
    monkeypatch.setattr(libsystem, "memory_use", lambda: None)
    assert pressure._read_macos() == PressureReading(None, None, None)


def test_pressure_of_this_machine() -> None:
    reading = pressure.read()
    assert reading.level in {"normal", "warn", "critical"}
    assert reading.available_bytes
    assert reading.swap_used_bytes is not None
    assert sys.platform == "darwin" or reading.available_bytes % 1024 == 0
