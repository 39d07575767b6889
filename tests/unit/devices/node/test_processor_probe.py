"""The processor by recorded /proc/cpuinfo and by that of this machine, its memory, and the measured bandwidth."""

import mmap
import os
import time
from pathlib import Path

import psutil
import pytest

from crds.nodefitness import NodeFitnessStatus
from devices.node.memory_bandwidth import measure_memory_bandwidth
from devices.node.processor import parse_processor, read_machine, read_processor

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
    assert (processor.cpu_cores, processor.processor) == (2, "AMD EPYC 9474F 48-Core Processor")
    assert processor.cpu_features == ["avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f"]


def test_arm_states_features_and_no_cores() -> None:
    processor = parse_processor(ARM, "aarch64")
    assert (processor.cpu_cores, processor.processor) == (2, "")
    assert processor.cpu_features == ["asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve"]


def test_unreadable_machine_is_unknown(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert read_machine(absent, absent) == NodeFitnessStatus(architecture=os.uname().machine)


def test_absurd_size_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {2**41} kB\nMemAvailable: 1024 kB\n")
    machine = read_machine(tmp_path, tmp_path)
    assert (machine.memory_bytes, machine.available_bytes) == (None, 1 << 20)


def test_large_processor_is_read_whole(tmp_path: Path) -> None:
    entry = "processor\t: {0}\nphysical id\t: 0\ncore id\t: {0}\nflags\t: " + "avx " * 700 + "\n\n"
    (tmp_path / "cpuinfo").write_text("".join(entry.format(number) for number in range(1024)))
    assert read_processor(tmp_path).cpu_cores == 1024


def test_this_machine_is_read() -> None:
    machine = read_machine(Path("/proc"), Path("/"))
    assert machine.cpu_cores in {psutil.cpu_count(logical=False), psutil.cpu_count()}
    assert machine.architecture == os.uname().machine
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.available_bytes is not None
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.disk_bytes is not None
    assert machine.disk_free_bytes is not None
    assert machine.disk_bytes >= machine.disk_free_bytes > 0


def test_bandwidth_counts_what_one_thread_read_and_wrote_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    seconds = iter((1.0, 1.03, 1.06, 1.09, 1.12))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert measure_memory_bandwidth() == pytest.approx(2 * 2 * (4 << 20) / 0.12, abs=1)


def test_bandwidth_is_unknown_where_there_is_no_memory_for_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert measure_memory_bandwidth() is None


def test_bandwidth_is_measured_in_little_time_and_memory() -> None:
    before, started = psutil.Process().memory_info().rss, time.process_time()
    measure_memory_bandwidth()
    assert time.process_time() - started < 5
    assert psutil.Process().memory_info().rss - before < 64 << 20
