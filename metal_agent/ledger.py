"""Counts the memory that is promised to processes, so that a host is never over-committed: that panics Macs."""

from dataclasses import dataclass, field

from crds.size import size_text


@dataclass(slots=True)
class Ledger:
    """Reservations against a budget in bytes, by uid."""

    budget_bytes: int
    reserved: dict[str, int] = field(default_factory=dict)

    @property
    def available_bytes(self) -> int:
        """What can still be reserved; never below 0, though engines that were adopted may exceed a lowered budget."""
        return max(0, self.budget_bytes - sum(self.reserved.values()))

    def reserve(self, uid: str, memory_bytes: int) -> str:
        """Reserve for `uid` once; answers why not, for a person, or nothing when it is reserved."""
        if uid in self.reserved:
            return ""
        if memory_bytes > self.available_bytes:
            return (
                f"needs {size_text(memory_bytes)}, {size_text(self.available_bytes)} of this host's budget of "
                f"{size_text(self.budget_bytes)} are free; use a smaller context or quantization, or free the host"
            )
        self.reserved[uid] = memory_bytes
        return ""

    def take_over(self, uid: str, memory_bytes: int) -> None:
        """Count an engine that already runs, whatever is free: its memory is in use."""
        self.reserved[uid] = memory_bytes

    def release(self, uid: str) -> None:
        """Give back what `uid` reserved, if anything."""
        self.reserved.pop(uid, None)
