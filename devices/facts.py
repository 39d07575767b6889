"""What a host is: the facts that the probes of each system fill in.

A fact that could not be found out is None, never 0: a budget computed from a zero that means "unknown" overcommits a
machine or hides it.
"""

from dataclasses import dataclass
from typing import NamedTuple


class CoreLevel(NamedTuple):
    """The processor cores of one performance level."""

    name: str
    """As the system calls it, for example `Performance`."""
    cores: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that do not change while the host is up."""

    chip: str | None = None
    """For example `Apple M4 Max`."""
    machine: str | None = None
    """The maker's name of the machine, for example `Mac16,9`."""
    cpu_cores: int | None = None
    core_levels: tuple[CoreLevel, ...] = ()
    """The fastest first; empty where not known. The first is no count of useful threads: an M5 Max has 6 of 18."""
    gpu_cores: int | None = None
    os: str | None = None
    """Name and version, for example `macOS 26.1`."""
    architecture: str | None = None
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_second: int | None = None
    working_set_bytes: int | None = None
    """What Metal tells that models may use."""
    wired_limit_bytes: int | None = None
    """What the owner set it to by iogpu.wired_limit_mb; None where the system decides."""
    model_memory_bytes: int | None = None
    """What models may take in all without starving the system, by the system's own rule."""
    boot_id: str | None = None
    booted_at_seconds: int | None = None
    """When the system was started, in seconds since 1970 by the clock as it is now."""
