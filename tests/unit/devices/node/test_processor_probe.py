"""The processor by recorded /proc/cpuinfo and by that of this machine, its memory, and the measured bandwidth."""

import os
import time
from pathlib import Path

import psutil

from devices.node.memory_bandwidth import measure_memory_bandwidth
from devices.node.processor import parse_processor, read_file_system, read_memory, read_processor

# Two threads of one core and one of another, as kernels on x86 list them.
THREADS = """\
processor\t: 0
model name\t: AMD EPYC 9474F 48-Core Processor
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx avx2 avx512f avx512_vnni avx512_bf16 nopl

processor\t: 1
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx

processor\t: 2
physical id\t: 1
core id\t\t: 0
"""
# A Graviton 3 as its users print it.
ARM = """\
processor\t: 0
Features\t: fp asimd evtstrm aes pmull asimdhp asimddp sve i8mm bf16 rng
CPU implementer\t: 0x41

processor\t: 1
Features\t: fp asimd
"""


def test_threads_of_a_core_count_once() -> None:
    processor = parse_processor(THREADS, "x86_64")
    assert (processor.cores, processor.model) == (2, "AMD EPYC 9474F 48-Core Processor")
    assert processor.features == ("avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f")


def test_arm_states_features_and_no_cores() -> None:
    processor = parse_processor(ARM, "aarch64")
    assert (processor.cores, processor.model) == (2, "")
    assert processor.features == ("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve")


def test_unreadable_processor_is_unknown(tmp_path: Path) -> None:
    assert read_processor(tmp_path / "absent")[:3] == ("", None, ())
    assert read_memory(tmp_path / "absent") == (None, None)
    assert read_file_system(tmp_path / "absent") == (None, None)


def test_absurd_size_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {2**41} kB\nMemAvailable: 1024 kB\n")
    assert read_memory(tmp_path) == (None, 1 << 20)


def test_large_processor_is_read_whole(tmp_path: Path) -> None:
    entry = "processor\t: {0}\nphysical id\t: 0\ncore id\t: {0}\nflags\t: " + "avx " * 700 + "\n\n"
    (tmp_path / "cpuinfo").write_text("".join(entry.format(number) for number in range(1024)))
    assert read_processor(tmp_path).cores == 1024


def test_this_machine_is_read() -> None:
    processor, memory = read_processor(Path("/proc")), read_memory(Path("/proc"))
    assert processor.cores == psutil.cpu_count(logical=False) or processor.cores == psutil.cpu_count()
    assert processor.architecture == os.uname().machine
    assert memory.memory_bytes == psutil.virtual_memory().total
    assert memory.available_bytes is not None
    assert 0 < memory.available_bytes <= memory.memory_bytes
    disk = read_file_system(Path("/"))
    assert disk.size_bytes is not None
    assert disk.free_bytes is not None
    assert disk.size_bytes >= disk.free_bytes > 0


def test_bandwidth_is_measured_in_little_time_and_memory() -> None:
    before, started = psutil.Process().memory_info().rss, time.process_time()
    bandwidth = measure_memory_bandwidth()
    assert bandwidth is not None
    assert 10**8 < bandwidth < 1 << 50
    assert time.process_time() - started < 5
    assert psutil.Process().memory_info().rss - before < 64 << 20
