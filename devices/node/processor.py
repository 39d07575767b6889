"""The processor, memory and disk of a node, by /proc of the machine, not by what the agent's container may use."""

import contextlib
import functools
import os
import platform
import re
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from crds.nodefitness import NodeFitnessStatus
from devices.linux import parse_cpuinfo
from devices.node.checked_values import check_bytes, clean_text
from devices.proc import parse_meminfo, read_limited

_FEATURES: Final = {
    *("sse4_2", "f16c", "fma", "avx", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme"),
}
"""Instructions that llama.cpp and vLLM choose their code by; kernels name them so on x86 and on ARM."""
_MOST_CORES: Final = 1 << 16


@functools.lru_cache(maxsize=4)
def read_processor(proc: Path) -> NodeFitnessStatus:
    """Return the facts of the processor; read once, since the kernel asks every core for its clock to answer this."""
    return parse_processor(read_limited(proc / "cpuinfo"), platform.machine())


def parse_processor(text: str, architecture: str) -> NodeFitnessStatus:
    """Return the facts of the processor from the text of /proc/cpuinfo, which has an entry for each hyper-thread.

    Threads with the same package and core are one core; where these are not stated, each thread counts as a core.
    """
    flags_line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # that of the first processor
    flags = set(flags_line[1].split()) if flags_line else set()

    # Count the cores: the pairs of package and core.
    threads = len(re.findall(r"^processor\s*:\s*[0-9]+\s*$", text, re.MULTILINE))
    packages = re.findall(r"^physical id\s*:\s*([0-9]+)\s*$", text, re.MULTILINE)
    core_ids = re.findall(r"^core id\s*:\s*([0-9]+)\s*$", text, re.MULTILINE)
    # Both lines are in each entry, or in none; ARM kernels and some hypervisors have none.
    states_cores = len(packages) == len(core_ids) == threads
    cores = len(set(zip(packages, core_ids, strict=True))) if states_cores else threads

    # _FEATURES: the instructions by which engines choose their code
    return NodeFitnessStatus(
        processor=clean_text(parse_cpuinfo(text) or ""),
        cpu_cores=min(cores, _MOST_CORES) or None,
        cpu_features=sorted(flags & _FEATURES),
        architecture=clean_text(architecture),
    )


def read_machine(proc: Path, folder: Path) -> NodeFitnessStatus:
    """Return the facts of processor and memory, and of the file system in which `folder` is."""
    memory = parse_meminfo(read_limited(proc / "meminfo"))
    disk_bytes = disk_free_bytes = None
    with contextlib.suppress(OSError):
        stats = os.statvfs(folder)
        disk_bytes, disk_free_bytes = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    return replace(
        read_processor(proc),
        memory_bytes=check_bytes(memory.get("MemTotal")) or None,
        available_bytes=check_bytes(memory.get("MemAvailable")),
        # A file system on the network may state more than any disk has.
        disk_bytes=check_bytes(disk_bytes) or None,
        disk_free_bytes=check_bytes(disk_free_bytes),
    )
