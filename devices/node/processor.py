"""The processor of a node and its memory, by /proc of the machine, not by what the agent's container may use."""

import functools
import os
import platform
import re
from pathlib import Path
from typing import Final, NamedTuple

from devices.linux import parse_cpuinfo
from devices.node.checked_values import check_bytes, clean_text
from devices.node.kernel_files import read_limited
from devices.proc import parse_meminfo

_FEATURES: Final = {
    *("sse4_2", "f16c", "fma", "avx", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme"),
}
"""Instructions that llama.cpp and vLLM choose their code by; kernels name them so on x86 and on ARM."""
_MOST_CORES: Final = 1 << 16


class Processor(NamedTuple):
    """Facts of the processor that do not change while the machine is up."""

    model: str = ""
    cores: int | None = None
    """Cores of the machine; hyper-threads are not counted."""
    features: tuple[str, ...] = ()
    architecture: str = ""


class MachineMemory(NamedTuple):
    """The memory of the machine."""

    memory_bytes: int | None
    available_bytes: int | None


class FileSystem(NamedTuple):
    """A file system of the machine."""

    size_bytes: int | None = None
    free_bytes: int | None = None


@functools.lru_cache(maxsize=4)
def read_processor(proc: Path) -> Processor:
    """Return the processor; read once, since the kernel asks every core for its clock to answer this."""
    return parse_processor(read_limited(proc / "cpuinfo"), platform.machine())


def parse_processor(text: str, architecture: str) -> Processor:
    """Read /proc/cpuinfo."""
    flags: set[str] = set()
    for words in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)[:1]:
        flags.update(words.split())
    threads = len(re.findall(r"^processor\s*:\s*[0-9]+\s*$", text, re.MULTILINE))
    packages = re.findall(r"^physical id\s*:\s*([0-9]+)\s*$", text, re.MULTILINE)
    numbers = re.findall(r"^core id\s*:\s*([0-9]+)\s*$", text, re.MULTILINE)
    # Both lines are in each entry, or in none; ARM kernels and some hypervisors have none.
    cores = len(set(zip(packages, numbers, strict=True))) if len(packages) == len(numbers) == threads else threads
    return Processor(
        model=clean_text(parse_cpuinfo(text) or ""),
        cores=min(cores, _MOST_CORES) or None,
        features=tuple(sorted(flags & _FEATURES)),
        architecture=clean_text(architecture),
    )


def read_memory(proc: Path) -> MachineMemory:
    """Return the memory of the machine and its available part."""
    facts = parse_meminfo(read_limited(proc / "meminfo"))
    return MachineMemory(check_bytes(facts.get("MemTotal")) or None, check_bytes(facts.get("MemAvailable")))


def read_file_system(folder: Path) -> FileSystem:
    """Return the file system in which `folder` is; both values are None if it cannot be read."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return FileSystem()
    # A file system on the network may state more than any disk has.
    return FileSystem(
        check_bytes(stats.f_blocks * stats.f_frsize) or None, check_bytes(stats.f_bavail * stats.f_frsize)
    )
