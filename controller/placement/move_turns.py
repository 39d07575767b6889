"""The turns of namespaces for the few replacements of slow replicas that go on at once in the cluster."""

from datetime import datetime
from typing import Final

from controller.placement.replacement import PLACE_SECONDS
from kube.resources import ObjectKey

MOST_AT_ONCE: Final = 3
"""Replacements in the cluster at once, of which each namespace has one: a tenant can make its own replicas slow."""
_KEPT_SECONDS: Final = 2 * PLACE_SECONDS
"""Time after which a service that has not asked again waits no more; each asks again after half of it."""


class MoveTurns:
    """The replacements that go on, and the services that wait for theirs.

    When one may begin, it is that of the namespace whose last one is the longest ago, however many services another
    namespace has in turn.
    """

    def __init__(self) -> None:
        self._moving: set[ObjectKey] = set()
        self._waiting: dict[ObjectKey, datetime] = {}
        """With the time at which each has asked last."""
        self._turns: dict[str, int] = {}
        """By namespace the number of its last replacement."""

    def restart(self) -> None:
        """Forget everything: a new leader has read all that goes on before it finds a replica slow."""
        for each in (self._moving, self._waiting, self._turns):
            each.clear()

    def begin(self, key: ObjectKey) -> None:
        """Take a replacement that goes on."""
        self._waiting.pop(key, None)
        if key not in self._moving:
            self._moving.add(key)
            self._turns[key.namespace] = max(self._turns.values(), default=0) + 1

    def end(self, key: ObjectKey) -> None:
        """Take that no replacement of a service goes on, and that it waits for none."""
        self._moving.discard(key)
        self._waiting.pop(key, None)

    def wait(self, key: ObjectKey, now: datetime) -> None:
        """Take a service that waits."""
        self._waiting[key] = now

    def list_ahead(self, key: ObjectKey, now: datetime) -> list[str]:
        """Return whose replacement a service waits for, in words: one of its namespace, or those of others.

        Tenants learn no name of another namespace.
        """
        others = self._moving - {key}
        if same := sorted(str(each) for each in others if each.namespace == key.namespace):
            return same
        turn = self._turns.get(key.namespace, 0)
        served = {each.namespace for each in others}
        first = {
            each.namespace
            for each, asked in self._waiting.items()
            if self._turns.get(each.namespace, 0) < turn and (now - asked).total_seconds() < _KEPT_SECONDS
        }
        is_full = len(served | first) >= MOST_AT_ONCE
        return ["services in other namespaces"] if is_full else []
