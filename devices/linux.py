"""Host facts on Linux, from /proc, /sys, os-release and psutil. Linux states no memory bandwidth."""

import platform
import re
from pathlib import Path
from typing import Final

import psutil

from devices.facts import HostFacts
from devices.proc import read_limited

_MODEL_SHARE: Final = 0.75
"""Share of memory that models may take: the rest is for the system, its page cache and the owner."""


def read() -> HostFacts:
    """Read the facts of this machine."""
    memory_bytes = psutil.virtual_memory().total or None
    return HostFacts(
        chip=parse_cpuinfo(read_limited(Path("/proc/cpuinfo"))),
        machine=parse_machine(
            read_limited(Path("/sys/class/dmi/id/product_name")) or read_limited(Path("/proc/device-tree/model"))
        ),
        cpu_cores=psutil.cpu_count(logical=False) or psutil.cpu_count(),
        os=parse_os_release(read_limited(Path("/etc/os-release"))),
        architecture=platform.machine() or None,
        memory_bytes=memory_bytes,
        # _MODEL_SHARE: the part of the memory that models may take; the rest is for the system and the owner
        model_memory_bytes=int(memory_bytes * _MODEL_SHARE) if memory_bytes else None,
    )


def parse_cpuinfo(text: str) -> str | None:
    """Read the processor's name; many ARM kernels state none."""
    match = re.search(r"^(?:model name|Model)\s*:\s*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def parse_machine(text: str) -> str | None:
    """Read the name of the machine, which a device tree ends with a NUL."""
    return "".join(character for character in text if character.isprintable()).strip() or None


def parse_os_release(text: str) -> str | None:
    """Read the distribution's name and version."""
    match = re.search(r"^PRETTY_NAME=(\"?)(.+)\1$", text, re.MULTILINE)
    return match[2] if match else None
