"""Host facts from recorded outputs; the recordings are ours, in the layout of real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devices import host, linux, macos, processes

FIXTURES = Path(__file__).parent / "fixtures"
GIB = 2**30


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


def test_sysctl_values_are_read_with_either_separator() -> None:
    values = macos.parse_sysctl(recorded("sysctl_m3_max.txt"))
    assert values["machdep.cpu.brand_string"] == "Apple M3 Max"
    assert macos.positive(values["hw.memsize"]) == 96 * GIB
    assert "hw.osenvironment" not in values
    assert macos.parse_sysctl(recorded("sysctl_raised_limit.txt"))["hw.memsize"] == "51539607552"


@pytest.mark.parametrize("text", [None, "", "0", "-1", "many"])
def test_unknown_is_none_and_never_zero(text: str | None) -> None:
    assert macos.positive(text) is None


def test_no_output_at_all_is_unknown() -> None:
    assert macos.parse_sysctl("") == {}
    assert macos.working_set_bytes(None, None, "") is None
    assert linux.parse_cpuinfo("") is None
    assert linux.parse_os_release("") is None


@pytest.mark.parametrize(
    ("memory_gib", "limit_mib", "version", "expected_mib"),
    [
        (16, None, "15.6", 10922),  # as an M1 of 16 GB reports
        (24, None, "14.5", 16384),
        (128, None, "15.1", 98304),
        (16, None, "26.1", 12124),
        (128, None, "26.0.1", 110100),
        (48, 45056, "15.6", 45056),
        (16, 99999, "15.6", 16384),  # a limit above the memory there is
        (64, None, "", 49152),
    ],
)
def test_working_set_by_memory_limit_and_version(
    memory_gib: int, limit_mib: int | None, version: str, expected_mib: int
) -> None:
    found = macos.working_set_bytes(memory_gib * GIB, limit_mib, version)
    assert found is not None
    assert found // 2**20 == expected_mib


def test_processor_names() -> None:
    assert linux.parse_cpuinfo(recorded("cpuinfo_x86.txt")) == "Intel(R) Xeon(R) Processor @ 2.70GHz"
    assert linux.parse_cpuinfo(recorded("cpuinfo_arm.txt")) == "Raspberry Pi 5 Model B Rev 1.0"


@pytest.mark.parametrize(
    "text", ['NAME=Debian\nPRETTY_NAME="Debian GNU/Linux 12"\n', "PRETTY_NAME=Debian GNU/Linux 12\n"]
)
def test_distribution(text: str) -> None:
    assert linux.parse_os_release(text) == "Debian GNU/Linux 12"


def test_this_machine() -> None:
    found = host.read()
    assert found.memory_bytes
    assert found.model_memory_bytes
    assert found.model_memory_bytes < found.memory_bytes
    assert found.cpu_cores


def test_stat_of_a_process_with_a_misleading_name() -> None:
    rest = "S 1 " + " ".join(str(number) for number in range(5, 53))
    assert processes.parse_stat(f"42 (a) Z (b) {rest}") == "22"
    assert processes.parse_stat(f"42 (a) {rest.replace('S', 'Z', 1)}") is None


def test_ps_of_a_process_a_zombie_and_none() -> None:
    text = "  815 Ss   Sat Nov 21 13:16:40 2026\n  816 Z    Sat Nov 21 13:16:41 2026\n"
    assert processes.parse_ps(text, 815) == "Sat Nov 21 13:16:40 2026"
    assert processes.parse_ps(text, 816) is None
    assert processes.parse_ps(text, 81) is None


def test_start_times_tell_processes_apart() -> None:
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert processes.start_time(child.pid) not in {None, processes.start_time(os.getpid())}
        child.kill()
    assert processes.start_time(child.pid) is None
