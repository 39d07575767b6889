"""Counts the memory that is promised to processes, so that a host is never over-committed: that panics Macs.

What counts is the larger of what was promised and what is seen in use, and what other programs take beyond the share
that the budget leaves them. Nothing is promised that is not free at that moment; what changes afterwards (others grow,
an engine takes more than was promised) leaves less for the next, and is for the pressure watchdog to relieve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from crds.size import size_text
from devices.facts import HostFacts

_GIB: Final = 2**30
_METAL_MARGIN_BYTES: Final = _GIB
"""Left below Metal's limit for what it allocates beside an engine's buffers; at the limit itself commands fail."""
_SYSTEM_BYTES: Final = 4 * _GIB
_SYSTEM_SHARE: Final = 0.08
_SMALL_SYSTEM_SHARE: Final = 0.25
"""Left to the system and the owner's programs: 4 GiB or 8 %, but of a small host no more than a quarter."""
_STEP_BYTES: Final = _GIB // 4
"""By how much the use of others has to move until it counts anew: every program breathes."""
_GROWTH_BYTES: Final = _GIB // 16
"""An engine that grows beyond its promise is counted in such steps: each is a write to the API."""


def budget_bytes(facts: HostFacts, owner_bytes: int | None) -> int | None:
    """Decide what models may use in all; None when the memory of this host is not known and the owner says nothing.

    `owner_bytes` is the owner's word. It may not exceed what Metal allows, which only `iogpu.wired_limit_mb` moves.
    """
    metal = None if facts.working_set_bytes is None else max(0, facts.working_set_bytes - _METAL_MARGIN_BYTES)
    if owner_bytes is not None:
        return owner_bytes if metal is None else min(owner_bytes, metal)
    limits = [] if metal is None else [metal]
    if facts.model_memory_bytes is not None and metal is None:
        limits.append(facts.model_memory_bytes)
    if facts.memory_bytes is not None:
        system = max(min(_SYSTEM_BYTES, facts.memory_bytes * _SMALL_SYSTEM_SHARE), facts.memory_bytes * _SYSTEM_SHARE)
        limits.append(int(facts.memory_bytes - system))
    return min(limits) if facts.model_memory_bytes is not None and limits else None


@dataclass(slots=True)
class Ledger:
    """Reservations against a budget in bytes, by uid."""

    budget_bytes: int
    reserved: dict[str, int] = field(default_factory=dict)
    others_bytes: int = 0
    """What other programs use beyond the share that the budget leaves them."""
    memory_bytes: int | None = None
    """Of the host; where it is not known, nothing is said of what others use."""
    freed: Callable[[], None] = lambda: None
    """Told when more is free than before."""

    @property
    def available_bytes(self) -> int:
        """What can still be reserved; never below 0, though what is seen in use may exceed the budget."""
        return max(0, self.budget_bytes - self.others_bytes - sum(self.reserved.values()))

    def reserve(self, uid: str, memory_bytes: int) -> str:
        """Reserve for `uid` once; answers why not, for a person, or nothing when it is reserved."""
        if uid in self.reserved:
            return ""
        available = self.available_bytes
        if memory_bytes > available:
            others = f", {size_text(self.others_bytes)} of it in use by other programs" if self.others_bytes else ""
            return (
                f"it needs {size_text(memory_bytes)}, {size_text(memory_bytes - available)} more than the "
                f"{size_text(available)} that are free of this host's budget of {size_text(self.budget_bytes)}{others}"
            )
        self.reserved[uid] = memory_bytes
        return ""

    def take_over(self, uid: str, memory_bytes: int) -> None:
        """Count an engine that already runs, whatever is free: its memory is in use."""
        self.reserved[uid] = memory_bytes

    def observe(self, uid: str, used_bytes: int) -> None:
        """Count what an engine is seen to use, in whole steps, where it is more than what was promised to it."""
        if used_bytes > self.reserved.get(uid, used_bytes):
            self.reserved[uid] = -(-used_bytes // _GROWTH_BYTES) * _GROWTH_BYTES

    def observe_others(self, excess_bytes: int) -> None:
        """Count what other programs use beyond their share, where it has moved."""
        before = self.others_bytes
        if abs(excess_bytes - before) >= _STEP_BYTES or not excess_bytes:
            self.others_bytes = excess_bytes
        if self.others_bytes < before:
            self.freed()

    def release(self, uid: str) -> None:
        """Give back what `uid` reserved, if anything."""
        if self.reserved.pop(uid, None) is not None:
            self.freed()


def excess_bytes(
    *, memory_bytes: int, available_bytes: int, own_bytes: int, budget_bytes: int, loaded_bytes: int = 0
) -> int:
    """Return what other programs use beyond the share that the budget leaves them.

    Args:
        memory_bytes: of the host.
        available_bytes: what the system could give away now.
        own_bytes: what of the rest is our engines'.
        budget_bytes: what models may use in all.
        loaded_bytes: what others have loaded for certain, though the system may hold it for available.
    """
    others = max(memory_bytes - available_bytes - own_bytes, loaded_bytes)
    return max(0, others - max(0, memory_bytes - budget_bytes))
