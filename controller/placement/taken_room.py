"""The resources that pods take, summed up by node: to look at all pods for each event would take too long."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from controller.placement.units import NOTHING, Amounts

K = TypeVar("K", bound=Hashable)


class TakenRoom(Generic[K]):
    """Sums of what pods take by node; a change costs the same however many pods there are."""

    def __init__(self) -> None:
        self._held: dict[K, tuple[str, Amounts]] = {}
        self._sums: dict[str, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def sum_of(self, node: str) -> Amounts:
        """Return what all pods take of a node."""
        return self._sums.get(node, NOTHING)

    def holds(self, key: K) -> bool:
        """Return whether a pod takes room."""
        return key in self._held

    def hold(self, key: K, node: str, amounts: Amounts) -> tuple[str, ...]:
        """Note what a pod takes of a node, instead of what it took before; return the nodes whose sums change."""
        if self._held.get(key) == (node, amounts):
            return ()
        changed_nodes = self.release(key)
        self._held[key] = node, amounts
        sums = self._sums.setdefault(node, {})
        for name, amount in amounts.items():
            sums[name] = sums.get(name, 0) + amount
        return (*changed_nodes, node)

    def release(self, key: K) -> tuple[str, ...]:
        """Note that a pod takes nothing; return the nodes whose sums have changed."""
        held = self._held.pop(key, None)
        if held is None:
            return ()
        node, amounts = held
        sums = self._sums[node]
        for name, amount in amounts.items():
            sums[name] -= amount
            if not sums[name]:
                del sums[name]
        if not sums:
            del self._sums[node]
        return (node,)

    def release_others(self, kept: set[K]) -> tuple[str, ...]:
        """Note that no pods but these take anything; return the nodes whose sums have changed."""
        return tuple(node for key in self._held.keys() - kept for node in self.release(key))
