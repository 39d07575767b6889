"""Compare every fact of the host with the same fact from a second source. Blocks for some seconds on macOS."""

import os
import sys
import time
from typing import Final

import psutil

from crds.size import size_text
from devices import gpu, host, libsystem, limits, macos, metal, pressure, processes, user_input
from devices.facts import HostFacts
from devices.host import HostState
from devices.tools import output_or_empty
from metal_agent.selftest.line import Line, check_known, check_same

_MIB: Final = 2**20
_LEAST_DESCRIPTORS: Final = 4096
_LEVEL_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


def check_facts() -> list[Line]:
    """Check the facts of this host."""
    facts, state = host.read(), host.state()
    found = _check_system(facts) + _check_state(facts, state) + _check_process()
    return found + check_mac(facts, state) if sys.platform == "darwin" else found


def _check_system(facts: HostFacts) -> list[Line]:
    booted = None if facts.booted_at_seconds is None else facts.booted_at_seconds - psutil.boot_time()
    return [
        check_known("system", facts.os, "a name and a version", needed=True),
        check_known("architecture", facts.architecture, "arm64 on a Mac", needed=True),
        check_known("chip", facts.chip, "the name of the processor"),
        check_known("machine", facts.machine, "the name of the machine"),
        check_same("processor cores", facts.cpu_cores, psutil.cpu_count(logical=False) or psutil.cpu_count(), "psutil"),
        check_same("memory", _size(facts.memory_bytes), _size(psutil.virtual_memory().total), "psutil", needed=True),
        check_known("memory for models", _size(facts.model_memory_bytes), "less than the memory", needed=True),
        # Without the id itself, which is the machine's own.
        check_known("machine id", "known" if host.machine_id() else None, "tells this machine from its copies"),
        check_known("boot id", facts.boot_id, "a text that changes with each start", needed=True),
        check_known(
            "start of the system",
            None if booted is None else f"{booted:+.0f} s",
            "within 60 s of psutil",
            holds=booted is not None and abs(booted) < 60,  # noqa: PLR2004 - s
        ),
    ]


def _check_state(facts: HostFacts, state: HostState) -> list[Line]:
    reading = state.pressure
    return [
        check_known("memory pressure", reading.level, "normal, warn or critical", needed=True),
        check_known("swap in use", _size(reading.swap_used_bytes), "0 B or more"),
        check_known(
            "memory available",
            _size(reading.available_bytes),
            f"at most {_size(facts.memory_bytes)}",
            holds=0 < (reading.available_bytes or 0) <= (facts.memory_bytes or 0),
        ),
        check_known("thermal level", state.thermal, "nominal, unless the host is hot"),
        check_known("power source", state.power.source, "ac, battery or ups"),
        check_known("battery", state.power.battery_percent, "a charge in percent, where there is a battery"),
        check_known("uptime", state.uptime_seconds, "seconds since the start, sleep included", needed=True),
    ]


def _check_process() -> list[Line]:
    started = processes.start_time(os.getpid())
    limits.raise_descriptor_limit()
    descriptors = limits.descriptor_limit()
    milliseconds = min(_measure_pressure_read_ms() for _ in range(10))
    return [
        check_known(
            "start of a process",
            started,
            "the same each time it is asked",
            holds=started == processes.start_time(os.getpid()),
            needed=True,
        ),
        check_known(
            "open files",
            descriptors,
            f"{_LEAST_DESCRIPTORS} or more may be open",
            holds=descriptors >= _LEAST_DESCRIPTORS,
        ),
        check_known(
            "a read of the pressure",
            f"{milliseconds:.2f} ms",
            "less than 5 ms, as it is taken each second",
            holds=milliseconds < 5,  # noqa: PLR2004 - ms
        ),
    ]


def _measure_pressure_read_ms() -> float:
    began = time.perf_counter()
    pressure.read()
    return (time.perf_counter() - began) * 1000


def check_mac(facts: HostFacts, state: HostState) -> list[Line]:
    """Check the facts that only a Mac has."""
    levels = sum(level.cores for level in facts.core_levels)
    bandwidth = facts.memory_bandwidth_bytes_per_second
    gigabytes = None if bandwidth is None else f"{bandwidth / 1e9:.0f} GB/s"
    return [
        check_same("cores by level", levels or None, facts.cpu_cores, "hw.physicalcpu"),
        check_known(
            "names of levels", ", ".join(level.name for level in facts.core_levels) or None, "the fastest first"
        ),
        check_same(
            "GPU cores", gpu.read().cores, macos.parse_displays(output_or_empty(*macos.DISPLAYS)), "system_profiler"
        ),
        check_known("memory bandwidth", gigabytes, "that of a chip in devices/chips.py"),
        check_known(
            "time since the last input", user_input.read_idle_seconds(), "seconds, fewer after a key was pressed"
        ),
        *_check_metal(facts),
        *_check_mac_memory(facts, state),
    ]


def _check_metal(facts: HostFacts) -> list[Line]:
    said = metal.read()
    derived = macos.working_set_bytes(facts.memory_bytes, facts.wired_limit_bytes, (facts.os or "").rpartition(" ")[2])
    share = (said.working_set_bytes or 0) / (facts.memory_bytes or 1)
    exact = facts.wired_limit_bytes is not None
    return [
        check_same("Metal's device", said.name, gpu.read().model, "ioreg", needed=True),
        check_known(
            "Metal's working set",
            _size(said.working_set_bytes),
            f"{_size(derived)}, by the rule that is used if Metal reports nothing",
            # A limit that was set is reported exactly; else the rule may err: it assumes 74 %, but some Macs have 84 %.
            holds=said.working_set_bytes == derived
            if exact
            else abs((derived or 0) - (said.working_set_bytes or 0)) < (facts.memory_bytes or 0) / 8,
            needed=True,
        ),
        check_known("its share of the memory", f"{share:.1%}" if share else None, "66 % to 85 %, or what was set"),
        check_known("limit that was set", _size(facts.wired_limit_bytes), "iogpu.wired_limit_mb, if the owner set it"),
    ]


def _check_mac_memory(facts: HostFacts, state: HostState) -> list[Line]:
    values = macos.parse_sysctl(output_or_empty("/usr/sbin/sysctl", _LEVEL_SYSCTL, "vm.swapusage"))
    said = pressure.kernel_level(macos.positive(values.get(_LEVEL_SYSCTL)))
    swap, swap_said = state.pressure.swap_used_bytes, macos.parse_swap_used(values.get("vm.swapusage"))
    used = state.gpu.used_bytes
    memory, memory_said = libsystem.memory_use(), macos.parse_vm_stat(output_or_empty(*macos.VM_STAT))
    return [
        check_known(
            "memory in use by ctypes",
            _size(memory and memory.total_bytes),
            f"about {_size(memory_said and memory_said.total_bytes)} from vm_stat",
            # It moves by some MiB between the two.
            holds=memory is not None
            and memory_said is not None
            and abs(memory.total_bytes - memory_said.total_bytes) < 512 * _MIB,
            needed=True,
        ),
        check_same(
            "pressure by ctypes",
            pressure.kernel_level(libsystem.sysctl_int(_LEVEL_SYSCTL)),
            said,
            "sysctl",
            needed=True,
        ),
        check_known(
            "swap by psutil",
            _size(swap),
            f"about {_size(swap_said)} from sysctl",
            holds=swap is not None and swap_said is not None and abs(swap - swap_said) < 64 * _MIB,
        ),
        check_known(
            "memory of the GPU in use",
            _size(used),
            f"at most {_size(facts.memory_bytes)}",
            holds=used is not None and used <= (facts.memory_bytes or 0),
        ),
        check_known("GPU utilisation", state.gpu.utilization_percent, "0 to 100"),
    ]


def _size(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else size_text(size_bytes)
