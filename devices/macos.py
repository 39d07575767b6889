"""Host facts on macOS, from sysctl, sw_vers, the kernel's registry and Metal.

When a tool is missing, fails, hangs or is cut off, its facts are None. Only whole lines count: the last number of a cut
output would be wrong.
"""

import json
import platform
import re
from typing import Final

from crds.metalhost import CoreLevel
from devices import chips, gpu, libsystem, metal
from devices.facts import HostFacts
from devices.libsystem import MemoryUse
from devices.tools import output_or_empty

_GIB: Final = 2**30
_MOST_LEVELS: Final = 4
_WIRED_LIMIT_KEYS: Final = ("iogpu.wired_limit_mb", "debug.iogpu.wired_limit")
"""The second is the name in macOS 13."""
SYSCTL: Final = (
    # -i: an older macOS does not have every key, and one unknown key must not hide the others.
    *("/usr/sbin/sysctl", "-i", "hw.memsize", "hw.physicalcpu", "hw.model", "machdep.cpu.brand_string"),
    *("hw.nperflevels", *(f"hw.perflevel{n}.{fact}" for n in range(_MOST_LEVELS) for fact in ("name", "physicalcpu"))),
    *_WIRED_LIMIT_KEYS,
)
VERSION: Final = ("/usr/bin/sw_vers", "-productVersion")
VM_STAT: Final = ("/usr/bin/vm_stat",)
DISPLAYS: Final = ("/usr/sbin/system_profiler", "SPDisplaysDataType", "-json")


def read() -> HostFacts:
    """Read the facts of this Mac, by its tools and by Metal; a fact that could not be read is None.

    The memory for models is Metal's working set, the most that the GPU may use; it is estimated if Metal does not
    answer. It follows the limit of wired memory if the owner has set one.
    """
    values = parse_sysctl(output_or_empty(*SYSCTL))
    version = output_or_empty(*VERSION).strip()

    memory_bytes = parse_positive(values.get("hw.memsize"))
    limit_bytes = wired_limit_bytes(values)
    working_set = metal.read().working_set_bytes or None
    gpu_cores = gpu.read().cores or parse_displays(output_or_empty(*DISPLAYS))

    chip = values.get("machdep.cpu.brand_string")
    return HostFacts(
        chip=chip,
        machine=values.get("hw.model"),
        cpu_cores=parse_positive(values.get("hw.physicalcpu")),
        core_levels=core_levels(values),
        gpu_cores=gpu_cores,
        os=f"macOS {version}" if version else None,
        architecture=platform.machine() or None,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_second=chips.bandwidth_bytes_per_second(chip, gpu_cores),
        working_set_bytes=working_set,
        wired_limit_bytes=limit_bytes,
        model_memory_bytes=working_set or working_set_bytes(memory_bytes, limit_bytes, version),
    )


def parse_sysctl(text: str) -> dict[str, str]:
    """Read `sysctl KEY...` output, `key: value` or `key = value` a line; keys without a value are left out."""
    values = {}
    # A line without an end is incomplete, such as the last one of a tool that was killed, and is left out.
    for line in text.splitlines(keepends=True):
        key, separator, value = line.partition(": " if ": " in line else " = ")
        if separator and value.strip() and line.endswith("\n"):
            values[key.strip()] = value.strip()
    return values


def parse_positive(text: str | None) -> int | None:
    """Read a number; None when it is absent, not a number, or 0, which these keys use for "not set"."""
    if text is None or not (text.isascii() and text.isdecimal()) or len(text) > 20:  # noqa: PLR2004 - digits of 64 bits
        return None
    return int(text) or None


def core_levels(values: dict[str, str]) -> tuple[CoreLevel, ...]:
    """Return the cores by performance level, the fastest first; empty unless all levels are known."""
    levels = []
    for level in range(min(parse_positive(values.get("hw.nperflevels")) or 0, _MOST_LEVELS)):
        cores = parse_positive(values.get(f"hw.perflevel{level}.physicalcpu"))
        if cores is None:
            return ()
        levels.append(CoreLevel(name=values.get(f"hw.perflevel{level}.name", f"Level {level}"), cores=cores))
    return tuple(levels)


def wired_limit_bytes(values: dict[str, str]) -> int | None:
    """Return the limit that the owner set; None for 0, with which the system decides."""
    limits = [parse_positive(values.get(key)) for key in _WIRED_LIMIT_KEYS]
    return next((limit * 2**20 for limit in limits if limit is not None), None)


def read_wired_limit_bytes() -> int | None:
    """Read the limit that the owner set at present, without a tool; None for 0, with which the system decides."""
    limits = [libsystem.sysctl_int(key) for key in _WIRED_LIMIT_KEYS]
    return next((limit * 2**20 for limit in limits if limit), None)


def parse_displays(text: str) -> int | None:
    """Read the GPU's cores from `system_profiler SPDisplaysDataType -json`, where the number is a string."""
    try:
        adapters = json.loads(text)["SPDisplaysDataType"]
        core_counts = [parse_positive(adapter.get("sppci_cores")) for adapter in adapters]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((cores for cores in core_counts if cores is not None), None)


def working_set_bytes(memory_bytes: int | None, limit_bytes: int | None, version: str) -> int | None:
    """Estimate Metal's recommendedMaxWorkingSetSize if Metal does not answer; None when the memory is not known.

    A limit that the owner set is used as it is, up to the size of the memory. Otherwise the shares are those that Macs
    report: before macOS 26 two thirds up to 36 GiB and three quarters above; since then 74 % (16 GB) and 84 % (128 GB).
    Between these two sizes the lower share is assumed.
    """
    if memory_bytes is None:
        return None
    if limit_bytes is not None:
        return min(limit_bytes, memory_bytes)
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) >= 26:  # noqa: PLR2004 - macOS 26, see above
        share = 0.84 if memory_bytes >= 128 * _GIB else 0.74
    else:
        share = 0.75 if memory_bytes > 36 * _GIB else 2 / 3
    return int(memory_bytes * share)


def parse_swap_used(text: str | None) -> int | None:
    """Read the bytes in use from the value of vm.swapusage, which is in MiB with two decimals."""
    match = re.search(r"(?:^|\s)used = ([0-9]{1,12}\.[0-9]{2})M(?:\s|$)", text or "")
    return round(float(match[1]) * 2**20) if match else None


def parse_vm_stat(text: str) -> MemoryUse | None:
    """Read the memory in use from `vm_stat`, whose counts are pages of the size in its first line."""
    page = re.search(r"page size of ([0-9]{1,8}) bytes", text)
    counts = dict(re.findall(r'^"?([^":\n]+)"?: +([0-9]{1,20})\.$', text, re.MULTILINE))
    names = ("Pages wired down", "Pages occupied by compressor", "Anonymous pages", "Pages purgeable")
    if page is None or any(name not in counts for name in names):
        return None
    return MemoryUse(*(int(counts[name]) * int(page[1]) for name in names))  # the names are in the order of its fields
