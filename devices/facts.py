"""Facts of a host that do not change while it is up; the probes of each system fill them in.

A fact that could not be read is None, never 0: a budget computed from a zero that means "unknown" overcommits a
machine or hides it.
"""

from dataclasses import dataclass

from crds.metalhost import CoreLevel


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that do not change while the host is up."""

    chip: str | None = None
    """For example `Apple M4 Max`."""
    machine: str | None = None
    """The maker's name of the machine, for example `Mac16,9`."""
    cpu_cores: int | None = None
    core_levels: tuple[CoreLevel, ...] = ()
    """The fastest level first, which has 6 of 18 cores on an M5 Max: no good number of threads. Empty if not known."""
    gpu_cores: int | None = None
    os: str | None = None
    """Name and version, for example `macOS 26.1`."""
    architecture: str | None = None
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_second: int | None = None
    working_set_bytes: int | None = None
    """Metal's recommendedMaxWorkingSetSize."""
    wired_limit_bytes: int | None = None
    """The owner's iogpu.wired_limit_mb in bytes; None if the system decides."""
    model_memory_bytes: int | None = None
    """Memory that all models together may take without starving the system, by the system's own rule."""
    boot_id: str | None = None
    booted_at_seconds: int | None = None
    """Start of the system, in seconds since 1970 by the present wall clock."""
