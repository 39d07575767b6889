"""Compares every host fact with what a second source tells of the same. Blocks for some seconds on macOS."""

import os
import sys
import time
from typing import Final

import psutil

from crds.size import size_text
from devices import gpu, host, libsystem, limits, macos, metal, pressure, processes
from devices.facts import HostFacts
from devices.host import HostState
from devices.tools import told
from metal_agent.selftest.line import Line, known, same

_MIB: Final = 2**20
_LEAST_DESCRIPTORS: Final = 4096
_LEVEL_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


def lines() -> list[Line]:
    """Look at this machine."""
    facts, state = host.read(), host.state()
    found = _system(facts) + _changing(facts, state) + _process()
    return found + mac(facts, state) if sys.platform == "darwin" else found


def _system(facts: HostFacts) -> list[Line]:
    booted = None if facts.booted_at_seconds is None else facts.booted_at_seconds - psutil.boot_time()
    return [
        known("system", facts.os, "a name and a version", needed=True),
        known("architecture", facts.architecture, "arm64 on a Mac", needed=True),
        known("chip", facts.chip, "the name of the processor"),
        known("machine", facts.machine, "the name of the machine"),
        same("processor cores", facts.cpu_cores, psutil.cpu_count(logical=False) or psutil.cpu_count(), "psutil"),
        same("memory", _size(facts.memory_bytes), _size(psutil.virtual_memory().total), "psutil", needed=True),
        known("memory for models", _size(facts.model_memory_bytes), "less than the memory", needed=True),
        known("boot id", facts.boot_id, "a text that changes with each start", needed=True),
        known(
            "start of the system",
            None if booted is None else f"{booted:+.0f} s",
            "within 60 s of what psutil tells",
            holds=booted is not None and abs(booted) < 60,  # noqa: PLR2004 - s
        ),
    ]


def _changing(facts: HostFacts, state: HostState) -> list[Line]:
    reading = state.pressure
    return [
        known("memory pressure", reading.level, "normal, warn or critical", needed=True),
        known("swap in use", _size(reading.swap_used_bytes), "0 B or more"),
        known(
            "memory available",
            _size(reading.available_bytes),
            f"at most {_size(facts.memory_bytes)}",
            holds=0 < (reading.available_bytes or 0) <= (facts.memory_bytes or 0),
        ),
        known("thermal level", state.thermal, "nominal, unless the host is hot"),
        known("power source", state.power.source, "ac, battery or ups"),
        known("battery", state.power.battery_percent, "a charge in percent, where there is a battery"),
        known("uptime", state.uptime_seconds, "seconds since the start, sleep included", needed=True),
    ]


def _process() -> list[Line]:
    started = processes.start_time(os.getpid())
    limits.raise_descriptors()
    descriptors = limits.descriptors()
    milliseconds = min(_milliseconds_of_a_look() for _ in range(10))
    return [
        known(
            "start of a process",
            started,
            "the same each time it is asked",
            holds=started == processes.start_time(os.getpid()),
            needed=True,
        ),
        known(
            "open files",
            descriptors,
            f"{_LEAST_DESCRIPTORS} or more may be open",
            holds=descriptors >= _LEAST_DESCRIPTORS,
        ),
        known(
            "a look at the pressure",
            f"{milliseconds:.2f} ms",
            "less than 5 ms, as it is taken each second",
            holds=milliseconds < 5,  # noqa: PLR2004 - ms
        ),
    ]


def _milliseconds_of_a_look() -> float:
    began = time.perf_counter()
    pressure.read()
    return (time.perf_counter() - began) * 1000


def mac(facts: HostFacts, state: HostState) -> list[Line]:
    """Compare what only a Mac has."""
    levels = sum(level.cores for level in facts.core_levels)
    bandwidth = facts.memory_bandwidth_bytes_per_second
    gigabytes = None if bandwidth is None else f"{bandwidth / 1e9:.0f} GB/s"
    return [
        same("cores by level", levels or None, facts.cpu_cores, "hw.physicalcpu"),
        known("names of levels", ", ".join(level.name for level in facts.core_levels) or None, "the fastest first"),
        same("GPU cores", gpu.read().cores, macos.parse_displays(told(*macos.DISPLAYS)), "system_profiler"),
        known("memory bandwidth", gigabytes, "that of a chip in devices/chips.py"),
        *_metal(facts),
        *_mac_memory(facts, state),
    ]


def _metal(facts: HostFacts) -> list[Line]:
    said = metal.read()
    derived = macos.working_set_bytes(facts.memory_bytes, facts.wired_limit_bytes, (facts.os or "").rpartition(" ")[2])
    share = (said.working_set_bytes or 0) / (facts.memory_bytes or 1)
    exact = facts.wired_limit_bytes is not None
    return [
        same("Metal's device", said.name, gpu.read().model, "ioreg", needed=True),
        known(
            "Metal's working set",
            _size(said.working_set_bytes),
            f"{_size(derived)}, by the rule that serves where Metal does not tell",
            # A limit that was set is told as it is; else the rule may err: it takes 74 % where some have 84.
            holds=said.working_set_bytes == derived
            if exact
            else abs((derived or 0) - (said.working_set_bytes or 0)) < (facts.memory_bytes or 0) / 8,
            needed=True,
        ),
        known("its share of the memory", f"{share:.1%}" if share else None, "66 % to 85 %, or what was set"),
        known("limit that was set", _size(facts.wired_limit_bytes), "iogpu.wired_limit_mb, if the owner set it"),
    ]


def _mac_memory(facts: HostFacts, state: HostState) -> list[Line]:
    values = macos.parse_sysctl(told("/usr/sbin/sysctl", _LEVEL_SYSCTL, "vm.swapusage"))
    said = pressure.kernel_level(macos.positive(values.get(_LEVEL_SYSCTL)))
    swap, swap_said = state.pressure.swap_used_bytes, macos.parse_swap_used(values.get("vm.swapusage"))
    used = state.gpu.used_bytes
    return [
        same(
            "pressure by ctypes",
            pressure.kernel_level(libsystem.sysctl_int(_LEVEL_SYSCTL)),
            said,
            "sysctl",
            needed=True,
        ),
        known(
            "swap by psutil",
            _size(swap),
            f"about {_size(swap_said)} from sysctl",
            holds=swap is not None and swap_said is not None and abs(swap - swap_said) < 64 * _MIB,
        ),
        known(
            "memory of the GPU in use",
            _size(used),
            f"at most {_size(facts.memory_bytes)}",
            holds=used is not None and used <= (facts.memory_bytes or 0),
        ),
        known("GPU utilisation", state.gpu.utilization_percent, "0 to 100"),
    ]


def _size(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else size_text(size_bytes)
