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
        chip=parse_cpuinfo(_text("/proc/cpuinfo")),
        cpu_cores=psutil.cpu_count(logical=False) or psutil.cpu_count(),
        os=parse_os_release(_text("/etc/os-release")),
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


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
