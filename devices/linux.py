"""Host facts on Linux, from /proc, os-release and psutil."""

import platform
import re
from pathlib import Path
from typing import Final

import psutil

from devices.facts import HostFacts

_MODEL_SHARE: Final = 0.75
"""Share of memory that models may take: the rest is for the system, its page cache and the owner."""


def read() -> HostFacts:
    """Probe this machine."""
    memory_bytes = psutil.virtual_memory().total or None
    return HostFacts(
        chip=parse_cpuinfo(read_text(Path("/proc/cpuinfo"))),
        cpu_cores=psutil.cpu_count(logical=False) or psutil.cpu_count(),
        os=parse_os_release(read_text(Path("/etc/os-release"))),
        architecture=platform.machine() or None,
        memory_bytes=memory_bytes,
        model_memory_bytes=int(memory_bytes * _MODEL_SHARE) if memory_bytes else None,
    )


def parse_cpuinfo(text: str) -> str | None:
    """Read the processor's name; many ARM kernels tell none."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def parse_os_release(text: str) -> str | None:
    """Read the distribution's name and version."""
    found = re.search(r"^PRETTY_NAME=(\"?)(.+)\1$", text, re.MULTILINE)
    return found[2] if found else None


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo, in bytes."""
    found = re.findall(r"^([^\s:]+):\s+([0-9]+) kB$", text, re.MULTILINE)
    return {key: int(kib) * 1024 for key, kib in found}


def parse_pressure(text: str) -> dict[str, float]:
    """Read the percentages of the last 10 s of /proc/pressure/memory, by `some` and `full`."""
    found = re.findall(r"^(some|full) avg10=([0-9]+\.[0-9]+) ", text, re.MULTILINE)
    return {kind: float(percent) for kind, percent in found}


def read_text(path: Path) -> str:
    """Read what the kernel says at `path`; nothing where it does not say."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
