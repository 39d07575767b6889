"""The ledger of memory reserved for processes, so that a host is never over-committed: that panics Macs.

An engine counts with the larger of its reservation and its measured use. Other programs may use the memory of the host
that is not in the budget; only their use beyond that counts. Only free memory is reserved. If use grows afterwards,
less is left for the next process, and the pressure watchdog relieves the host.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from crds.size import divide_up, size_text
from devices.facts import HostFacts

_GIB: Final = 2**30
_METAL_MARGIN_BYTES: Final = _GIB
"""Left below Metal's limit for Metal's allocations beside an engine's buffers; at the limit commands fail."""
_SYSTEM_BYTES: Final = 4 * _GIB
_SYSTEM_SHARE: Final = 0.08
_SMALL_SYSTEM_SHARE: Final = 0.25
"""Left to the system and the owner's programs: 4 GiB or 8 %, but no more than a quarter of a small host."""
_STEP_BYTES: Final = _GIB // 4
"""The use of other programs is updated in steps of this size, since it always moves a little."""
_GROWTH_BYTES: Final = _GIB // 16
"""An engine that exceeds its reservation is counted in steps of this size, since each is a write to the API."""


def budget_bytes(facts: HostFacts, owner_bytes: int | None) -> int | None:
    """Return the memory that all models may use; None if this host's memory is unknown and the owner sets no budget.

    That is the owner's budget `owner_bytes`, or else the memory for models as far as the system does not need it: it
    gets 8 % of all memory, at least 4 GiB, or a quarter of a small host. Neither exceeds Metal's limit, the memory that
    the GPU of a Mac may use, which only `iogpu.wired_limit_mb` changes.
    """
    metal_limit = None if facts.working_set_bytes is None else max(0, facts.working_set_bytes - _METAL_MARGIN_BYTES)

    if owner_bytes is not None:
        return owner_bytes if metal_limit is None else min(owner_bytes, metal_limit)
    if facts.model_memory_bytes is None:
        return None

    limits = [facts.model_memory_bytes if metal_limit is None else metal_limit]
    if facts.memory_bytes is not None:
        # 4 GiB, or a quarter of a small host; then 8 % of all memory if that is more.
        least_system_bytes = min(_SYSTEM_BYTES, facts.memory_bytes * _SMALL_SYSTEM_SHARE)
        system_bytes = max(least_system_bytes, facts.memory_bytes * _SYSTEM_SHARE)
        limits.append(int(facts.memory_bytes - system_bytes))

    return min(limits)


class Ledger(msgspec.Struct):
    """Reservations against a budget in bytes, by uid."""

    budget_bytes: int
    reserved: dict[str, int] = {}
    others_bytes: int = 0
    """Use of other programs beyond the share that the budget leaves them."""
    memory_bytes: int | None = None
    """Memory of the host; if unknown, the use of other programs is not counted."""
    freed: Callable[[], None] = lambda: None
    """Called when more memory is available than before."""

    @property
    def available_bytes(self) -> int:
        """Memory that can still be reserved; never below 0, even if measured use exceeds the budget."""
        return self.available_without(0)

    def available_without(self, released_bytes: int) -> int:
        """Return the memory that could be reserved if `released_bytes` of the reservations were released."""
        reserved = sum(self.reserved.values()) - released_bytes
        return max(0, self.budget_bytes - self.others_bytes - reserved)

    def reserve(self, uid: str, memory_bytes: int) -> str:
        """Reserve memory for `uid` once; returns a message if it does not fit, else an empty string."""
        if uid in self.reserved:
            return ""  # it has its memory already
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
        """Reserve memory for an engine that already runs, even if less is available: the memory is in use."""
        self.reserved[uid] = memory_bytes

    def observe(self, uid: str, used_bytes: int) -> None:
        """Raise the reservation of `uid`, if it has one, to its measured use if that is more, in whole steps."""
        reserved_bytes = self.reserved.get(uid)
        if reserved_bytes is not None and used_bytes > reserved_bytes:
            self.reserved[uid] = divide_up(used_bytes, _GROWTH_BYTES) * _GROWTH_BYTES

    def observe_others(self, excess_bytes: int) -> None:
        """Note how much memory other programs use beyond the share that the budget leaves them.

        It always moves a little, so a change counts only from 256 MiB on, or if the excess is gone. If it has fallen,
        more can be reserved: `freed` is called.
        """
        before_bytes = self.others_bytes  # as noted last
        if excess_bytes == 0 or abs(excess_bytes - before_bytes) >= _STEP_BYTES:
            self.others_bytes = excess_bytes
        if self.others_bytes < before_bytes:
            self.freed()

    def change_budget(self, new_bytes: int) -> None:
        """Apply another budget; reservations stay, even if they exceed it. `freed` is called if it is larger."""
        before_bytes, self.budget_bytes = self.budget_bytes, new_bytes
        if new_bytes > before_bytes:
            self.freed()

    def release(self, uid: str) -> None:
        """Release the reservation of `uid`, if it has one."""
        if self.reserved.pop(uid, None) is not None:
            self.freed()


def excess_bytes(
    *, memory_bytes: int, available_bytes: int, own_bytes: int, budget_bytes: int, loaded_bytes: int = 0
) -> int:
    """Return the memory that other programs use beyond the share that the budget leaves them.

    Args:
        memory_bytes: memory of the host.
        available_bytes: memory that the system could hand out now.
        own_bytes: memory in use by our engines.
        budget_bytes: memory that all models may use.
        loaded_bytes: models that the owner has loaded in daemons, which the system may count as available.
    """
    others_bytes = max(memory_bytes - available_bytes - own_bytes, loaded_bytes)
    others_share_bytes = max(0, memory_bytes - budget_bytes)
    return max(0, others_bytes - others_share_bytes)
