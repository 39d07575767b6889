"""Checks of the facts on which the agent relies, each compared with a second source. Blocks for some seconds."""

import os
import sys
import time
import timeit
from collections.abc import Mapping
from typing import Final

import psutil

from devices import gpu, host, libsystem, limits, macos, metal, pressure, processes, user_input
from devices.facts import HostFacts
from devices.host import HostState
from devices.tools import output_or_empty
from metal_agent.doctor.finding import Finding, check_near, check_same, check_value, size_or_none

_MIB: Final = 2**20
_LEAST_DESCRIPTORS: Final = 4096
_NEAR_SECONDS: Final = 60
_MOST_READ_MS: Final = 10
_LEVEL_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


def check_facts() -> list[Finding]:
    """Check the facts of this host."""
    facts, state = host.read(), host.state()
    findings = [*_list_facts(facts, state), *_check_system(facts), *_check_process()]
    return findings + check_mac(facts, state) if sys.platform == "darwin" else findings


def _list_facts(facts: HostFacts, state: HostState) -> list[Finding]:
    """Return all facts as two findings, for a report: those that the agent needs, and those that it can do without."""
    reading, bandwidth = state.pressure, facts.memory_bandwidth_bytes_per_second
    needed = {
        "system": facts.os,
        "architecture": facts.architecture,
        "memory for models": size_or_none(facts.model_memory_bytes),
        "boot id": facts.boot_id,
        "uptime": None if state.uptime_seconds is None else f"{state.uptime_seconds} s",
        "memory pressure": reading.level,
        "memory available": size_or_none(reading.available_bytes),
    }

    others = {
        "chip": facts.chip,
        "machine": facts.machine,
        # Without the id itself, which is the machine's own.
        "machine id": "known" if host.machine_id() else None,
        "memory bandwidth": None if bandwidth is None else f"{bandwidth / 1e9:.0f} GB/s",
        "processor cores": facts.cpu_cores,
        "cores by level": ", ".join(f"{level.cores} {level.name}" for level in facts.core_levels) or None,
        "swap in use": size_or_none(reading.swap_used_bytes),
        "thermal level": state.thermal,
        "power source": state.power.source,
        "battery": state.power.battery_percent,
        "GPU utilisation": state.gpu.utilization_percent,
        "memory of the GPU in use": size_or_none(state.gpu.used_bytes),
        "limit that was set": size_or_none(facts.wired_limit_bytes),
        "time since the last input": user_input.read_idle_seconds() if sys.platform == "darwin" else None,
    }

    # None in either: the system does not tell.
    return [_list_values("needed facts", needed, is_needed=True), _list_values("other facts", others, is_needed=False)]


def _list_values(name: str, values: Mapping[str, object], *, is_needed: bool) -> Finding:
    """Return one finding with all values; a problem if one that is needed is missing."""
    text = "; ".join(f"{label}: {'not known' if value is None else value}" for label, value in values.items())
    is_missing = is_needed and None in values.values()
    return Finding(name, "problem" if is_missing else "ok", text, "expected: all of them" if is_missing else "")


def _check_system(facts: HostFacts) -> list[Finding]:
    """Check memory and boot time of the system against psutil."""
    memory = size_or_none(psutil.virtual_memory().total)
    boot_difference = None if facts.booted_at_seconds is None else round(facts.booted_at_seconds - psutil.boot_time())
    text = None if boot_difference is None else f"{boot_difference:+d} s"
    holds = boot_difference is not None and abs(boot_difference) < _NEAR_SECONDS
    expected = f"within {_NEAR_SECONDS} s of psutil"
    return [
        check_same("memory in total", size_or_none(facts.memory_bytes), memory, "psutil"),
        check_value("start of the system", text, expected, holds=holds, needed=False),
    ]


def _check_process() -> list[Finding]:
    """Check the start time of this process, its limit of open files, and the cost of a pressure reading.

    The start time, by which the agent knows a process again, must be the same at two looks.
    """
    limits.raise_descriptor_limit()
    descriptors, least = limits.descriptor_limit(), _LEAST_DESCRIPTORS
    read_ms = min(timeit.repeat(pressure.read, timer=time.thread_time, number=1, repeat=10)) * 1000
    expected = f"less than {_MOST_READ_MS} ms of a processor, as it is taken each second"
    own_pid = os.getpid()
    return [
        check_same("start of a process", processes.start_time(own_pid), processes.start_time(own_pid), "a second look"),
        check_value("open files", descriptors, f"{least} or more", holds=descriptors >= least),
        check_value("a read of the pressure", f"{read_ms:.2f} ms", expected, holds=read_ms < _MOST_READ_MS),
    ]


def check_mac(facts: HostFacts, state: HostState) -> list[Finding]:
    """Check the facts that only a Mac has: what the agent reads from the system against what a tool of macOS prints."""
    # `values`, `memory_of_tool`, `swap`, `level` and `displays` come from tools, the rest is what the agent reads.
    registry, metal_facts = gpu.read(), metal.read()
    values = macos.parse_sysctl(output_or_empty("/usr/sbin/sysctl", _LEVEL_SYSCTL, "vm.swapusage"))
    memory, memory_of_tool = libsystem.memory_use(), macos.parse_vm_stat(output_or_empty(*macos.VM_STAT))
    used, used_by_tool = (use.total_bytes if use else None for use in (memory, memory_of_tool))
    swap = macos.parse_swap_used(values.get("vm.swapusage"))
    level = pressure.kernel_level(macos.parse_positive(values.get(_LEVEL_SYSCTL)))
    displays = macos.parse_displays(output_or_empty(*macos.DISPLAYS))

    # Each: the name of the finding, the value of the agent, that of the tool, and the name of the tool.
    return [
        check_same("GPU cores", registry.cores, displays, "system_profiler", needed=False),
        check_same("Metal's device", metal_facts.name, registry.model, "ioreg"),
        _check_working_set(facts, metal_facts.working_set_bytes),
        # It moves by some MiB between the two readings.
        check_near("memory in use by ctypes", used, used_by_tool, "vm_stat", 512 * _MIB),
        check_same("pressure by ctypes", pressure.kernel_level(libsystem.sysctl_int(_LEVEL_SYSCTL)), level, "sysctl"),
        check_near("swap by psutil", state.pressure.swap_used_bytes, swap, "sysctl", 64 * _MIB),
    ]


def _check_working_set(facts: HostFacts, working_set: int | None) -> Finding:
    """Check Metal's working set against the rule that is used if Metal reports nothing.

    The working set is the memory that the GPU may use. A limit that its owner has set is reported exactly; else the
    rule may err by an eighth of the memory: it assumes 74 %, but some Macs have 84 %.
    """
    # The rule depends on the version of macOS, the last word of `facts.os`.
    derived = macos.working_set_bytes(facts.memory_bytes, facts.wired_limit_bytes, (facts.os or "").rpartition(" ")[2])
    # With a tolerance of 1 both must be equal.
    tolerance = 1 if facts.wired_limit_bytes is not None else (facts.memory_bytes or 0) // 8
    finding = check_near("Metal's working set", working_set, derived, "the rule for this macOS", tolerance)
    share = (working_set or 0) / (facts.memory_bytes or 1)
    return finding._replace(found=f"{finding.found}, {share:.1%} of the memory") if working_set else finding
