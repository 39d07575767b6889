"""Host facts on macOS, from sysctl and sw_vers.

Nothing of Metal is imported here: a framework loaded into the agent would make fork and spawn unsafe. The share of
memory that Metal lets models use is thus derived as Metal derives it; see `working_set_bytes`.
"""

import platform
from typing import Final

from devices.facts import HostFacts
from devices.tools import output

_GIB: Final = 2**30
_KEYS: Final = ("hw.memsize", "hw.physicalcpu", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")


def read() -> HostFacts:
    """Probe this machine."""
    # -i: an older macOS does not know every key, and one unknown key must not hide the others.
    values = parse_sysctl(_told("/usr/sbin/sysctl", "-i", *_KEYS))
    version = _told("/usr/bin/sw_vers", "-productVersion")
    memory_bytes = positive(values.get("hw.memsize"))
    limit_mib = positive(values.get("iogpu.wired_limit_mb"))
    return HostFacts(
        chip=values.get("machdep.cpu.brand_string"),
        cpu_cores=positive(values.get("hw.physicalcpu")),
        os=f"macOS {version}" if version else None,
        architecture=platform.machine() or None,
        memory_bytes=memory_bytes,
        model_memory_bytes=working_set_bytes(memory_bytes, limit_mib, version),
    )


def parse_sysctl(text: str) -> dict[str, str]:
    """Read `sysctl KEY...` output, `key: value` or `key = value` a line; keys without a value are left out."""
    values = {}
    for line in text.splitlines():
        key, separator, value = line.partition(": " if ": " in line else " = ")
        if separator and value.strip():
            values[key.strip()] = value.strip()
    return values


def positive(text: str | None) -> int | None:
    """Read a number; None when it is absent, not a number, or 0, which these keys use for "not set"."""
    return int(text) or None if text is not None and text.isdecimal() else None


def working_set_bytes(memory_bytes: int | None, wired_limit_mib: int | None, version: str) -> int | None:
    """Metal's recommendedMaxWorkingSetSize, in bytes; None when the memory is unknown.

    A limit that the owner raised with `sysctl iogpu.wired_limit_mb` counts as it is, up to the memory there is.
    Otherwise by what Macs report: two thirds up to 36 GiB and three quarters above, before macOS 26; 74 % (16 GB)
    and 84 % (128 GB) since. Between these two the lower is assumed.
    """
    if memory_bytes is None:
        return None
    if wired_limit_mib is not None:
        return min(wired_limit_mib * 2**20, memory_bytes)
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) >= 26:  # noqa: PLR2004 - macOS 26, see above
        share = 0.84 if memory_bytes >= 128 * _GIB else 0.74
    else:
        share = 0.75 if memory_bytes > 36 * _GIB else 2 / 3
    return int(memory_bytes * share)


def _told(*argv: str) -> str:
    """What a tool prints; nothing is known of what it does not tell."""
    try:
        return output(*argv)
    except OSError:
        return ""
