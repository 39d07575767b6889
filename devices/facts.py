"""What hardware a host is: the facts that the probes of each system fill in.

A fact that could not be found out is None, never 0: a budget computed from a zero that means "unknown" overcommits a
machine or hides it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that do not change while the host is up."""

    chip: str | None = None
    """For example `Apple M4 Max`."""
    cpu_cores: int | None = None
    os: str | None = None
    """Name and version, for example `macOS 26.1`."""
    architecture: str | None = None
    memory_bytes: int | None = None
    model_memory_bytes: int | None = None
    """What models may take in all without starving the system, by the system's own rule."""
