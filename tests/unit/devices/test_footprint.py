"""The footprint of a process and its descendants, on Linux and with macOS's library."""

import ctypes
import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from devices import footprint, libsystem, processes
from devices.footprint import footprint_bytes

MIB = 2**20
HOLD = r"""
import os, sys
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
os.write(1, b"held\n")
sys.stdin.read()
"""


def test_footprint_includes_descendants() -> None:
    # A shell that waits for two processes of 64 MiB each.
    script = '"$0" -c "$1" 67108864 <&3 & "$0" -c "$1" 67108864 <&3 & wait'
    with subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; {script}", sys.executable, HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as family:
        assert family.stdout
        assert [family.stdout.readline() for _ in range(2)] == ["held\n"] * 2
        size = footprint_bytes(family.pid)
        assert size is not None
        assert 128 * MIB < size < 256 * MIB
        family.communicate()
    assert footprint_bytes(family.pid) is None


def test_a_zombie_has_no_memory() -> None:
    with subprocess.Popen(["true"]) as process:
        wait_for_zombie(process.pid)
        assert footprint_bytes(process.pid) is None


def wait_for_zombie(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("text", ["", "12", "12 many 3", "12 0 3"])
def test_missing_facts_of_the_kernel_are_none(text: str) -> None:
    assert footprint.parse_statm(text) is None


def rusage(footprint_bytes: int, ended: int = 0) -> bytes:
    """Return a rusage_info_v4 with this footprint and time of its end, in which every other number is different."""
    numbers = [1000 + index for index in range(35)]
    numbers[7], numbers[9] = footprint_bytes, ended
    return bytes(16) + b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)


def test_footprint_of_macos() -> None:
    assert libsystem.parse_footprint(rusage(19 * 2**30)) == 19 * 2**30
    assert libsystem.parse_footprint(rusage(0)) is None


def test_start_of_a_process_of_macos() -> None:
    assert libsystem.parse_start(rusage(MIB)) == 1008
    assert libsystem.parse_start(rusage(MIB, ended=7)) is None, "a zombie"


class Library:
    """A stand-in for macOS's library, with one process and its two children."""

    def sysctlbyname(self, name: bytes, buffer: Any, size: Any, new: object, new_size: object) -> int:
        assert (new, buffer._length_) == (None, size._obj.value), new_size
        if name == b"kern.bootsessionuuid":
            buffer.value = b"0E1B5B0A-6C5A-4A5E-9D2C-000000000001"
            return 0
        if name != b"kern.memorystatus_vm_pressure_level":
            return -1
        buffer.raw = (4).to_bytes(4, sys.byteorder)
        return 0

    def proc_pid_rusage(self, pid: Any, flavor: Any, buffer: Any) -> int:
        if pid.value not in {42, 43, 44} or flavor.value != 4:
            ctypes.set_errno(errno.EPERM if pid.value == 1 else errno.ESRCH)
            return -1
        buffer.raw = rusage(pid.value * MIB)
        return 0

    def gethostuuid(self, buffer: Any, wait: Any) -> int:
        assert [*wait] == [0, 0]
        buffer.raw = bytes(range(16))
        return 0

    def proc_listpids(self, kind: Any, parent: Any, buffer: Any, size: Any) -> int:
        assert (kind.value, size.value) == (6, len(buffer) * 4)
        if parent.value != 42:
            return 0
        buffer[0], buffer[1] = 43, 44
        return 8


def test_results_of_the_library_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsystem, "_library", Library)
    assert libsystem.sysctl_int("kern.memorystatus_vm_pressure_level") == 4
    assert libsystem.sysctl_int("kern.no_such_thing") is None
    assert libsystem.host_uuid() == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert libsystem.children(42) == [43, 44]
    assert libsystem.children(43) == []
    assert libsystem.footprint_bytes(1) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert footprint_bytes(42) == (42 + 43 + 44) * MIB
    assert footprint_bytes(1) is None


def test_start_time_of_macos_is_in_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsystem, "_library", Library)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.start_time(42) == "abstime 1008"
    assert processes.start_time(41) is None
    assert processes.start_time(1) == "of another user"
    processes.boot_id.cache_clear()
    try:
        assert processes.boot_id() == "0E1B5B0A-6C5A-4A5E-9D2C-000000000001"
    finally:
        processes.boot_id.cache_clear()


def test_unreadable_start_time_is_an_error_and_not_an_absent_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsystem, "_library", Library)
    with pytest.raises(PermissionError):
        libsystem.start_abstime(1)
