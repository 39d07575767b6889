"""Facts of this machine and of Linux: names, memory, boot id, and start times of processes."""

import os
import subprocess
import sys
import time

import pytest

from devices import host, linux, processes
from tests.unit.devices.recordings import recorded


def test_processor_name_is_read() -> None:
    assert linux.parse_cpuinfo(recorded("cpuinfo_x86.txt")) == "Intel(R) Xeon(R) Processor @ 2.70GHz"
    assert linux.parse_cpuinfo(recorded("cpuinfo_arm.txt")) == "Raspberry Pi 5 Model B Rev 1.0"


@pytest.mark.parametrize(
    "text", ['NAME=Debian\nPRETTY_NAME="Debian GNU/Linux 12"\n', "PRETTY_NAME=Debian GNU/Linux 12\n"]
)
def test_distribution_is_read(text: str) -> None:
    assert linux.parse_os_release(text) == "Debian GNU/Linux 12"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PowerEdge R760\n", "PowerEdge R760"),
        ("Raspberry Pi 5 Model B Rev 1.0\0", "Raspberry Pi 5 Model B Rev 1.0"),
        ("", None),
    ],
)
def test_machine_is_read(text: str, expected: str | None) -> None:
    assert linux.parse_machine(text) == expected


def test_facts_that_linux_lacks_are_none() -> None:
    assert linux.parse_cpuinfo("") is None
    assert linux.parse_os_release("") is None


def test_facts_of_this_machine() -> None:
    host_facts = host.read()
    assert host_facts.boot_id
    assert host_facts.booted_at_seconds
    assert host_facts.booted_at_seconds < time.time()
    assert host_facts.memory_bytes
    assert host_facts.model_memory_bytes
    assert host_facts.model_memory_bytes < host_facts.memory_bytes
    assert host_facts.cpu_cores


def test_state_of_this_machine() -> None:
    state = host.state()
    assert state.pressure.available_bytes
    assert state.uptime_seconds
    assert host.state().uptime_seconds in {state.uptime_seconds, state.uptime_seconds + 1}


def test_stat_of_a_process_with_a_misleading_name() -> None:
    rest = "S 1 " + " ".join(str(number) for number in range(5, 53))
    assert processes.parse_stat(f"42 (a) Z (b) {rest}") == "22"
    assert processes.parse_stat(f"42 (a) {rest.replace('S', 'Z', 1)}") is None


def test_start_times_distinguish_processes() -> None:
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert processes.start_time(child.pid) not in {None, processes.start_time(os.getpid())}
        child.kill()
    assert processes.start_time(child.pid) is None
