"""Memory pressure: macOS's levels, the derived level of Linux, and None where the system states nothing."""

import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices import libsystem, pressure, proc
from devices.pressure import PressureLevel, PressureReading

GIB = 2**30


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
    found = pressure._linux(kernel(tmp_path, waiting, memory))
    assert found == PressureReading("warn", 2097148 * 1024, 30408704 * 1024)


@pytest.mark.parametrize("said", [None, "", "MemTotal:\nSwapTotal: some kB\n"])
def test_missing_kernel_files_are_unknown_and_not_zero(tmp_path: Path, said: str | None) -> None:
    assert pressure._linux(kernel(tmp_path, said, said)) == PressureReading(None, None, None)


def test_host_without_swap_uses_zero_bytes_of_swap(tmp_path: Path) -> None:
    memory = "MemTotal: 65843172 kB\nMemAvailable: 30408704 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    assert pressure._linux(kernel(tmp_path, None, memory)) == PressureReading("normal", 0, 30408704 * 1024)


def test_pressure_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsystem, "sysctl_int", {"kern.memorystatus_vm_pressure_level": 2}.get)
    found = pressure._macos()
    assert found.level == "warn"
    assert found.available_bytes
    assert found.swap_used_bytes is not None


def test_a_mac_without_values_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("host_statistics64 failed")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(psutil, "swap_memory", refuse)
    monkeypatch.setattr(libsystem, "sysctl_int", lambda _: None)
    assert pressure._macos() == PressureReading(None, None, None)


def test_pressure_of_this_machine() -> None:
    found = pressure.read()
    assert found.level in {"normal", "warn", "critical"}
    assert found.available_bytes
    assert found.swap_used_bytes is not None
    assert sys.platform == "darwin" or found.available_bytes % 1024 == 0
