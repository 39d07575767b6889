"""The corrections of speed estimates by the stored measurements, as each namespace may use them.

A measurement that was made in a namespace of tenants is a claim of theirs, so it corrects estimates of that namespace
alone. One that was made in the namespace of the controller, or that counts for all, corrects all. What was learned for
a namespace is learned again when it is next asked for after a change. A change is reported for the vendor and the
engine that were measured: the estimates of others stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from crds.meta import CONTROLLER_NAMESPACE
from fitness.corrections import Corrections, SpeedRatio, learn_corrections

ALL_NAMESPACES: Final = ""
"""The scope of measurements that correct the estimates of every namespace; any other scope is one namespace."""


class MeasuredRatio(NamedTuple):
    """One stored measurement beside the estimate of its time."""

    namespace: str
    """Namespace of the measurement; empty: it counts for all."""
    ratio: SpeedRatio


class CorrectionGroup(NamedTuple):
    """Estimates that the same measurements correct."""

    namespace: str
    """The only namespace whose estimates these are; `ALL_NAMESPACES`: those of all."""
    vendor: str
    runtime: str


class CorrectionTable:
    """All that was learned, by namespace."""

    def __init__(self) -> None:
        self._groups_by_model: dict[str, Mapping[CorrectionGroup, tuple[SpeedRatio, ...]]] = {}
        """Measured beside estimated speeds by model hash, and there by the group that they correct."""
        self._ratios_by_scope: dict[str, dict[tuple[str, CorrectionGroup], tuple[SpeedRatio, ...]]] = {}
        """The same by scope (one namespace, or `ALL_NAMESPACES`), and there by model hash and group."""
        self._corrections_by_scope: dict[str, Corrections] = {}
        """The corrections learned from these ratios; a missing entry is learned when it is next asked for."""
        # Called with the changed groups after each change.
        self._listeners: list[Callable[[frozenset[CorrectionGroup]], None]] = []

    def subscribe(self, listener: Callable[[frozenset[CorrectionGroup]], None]) -> None:
        """Call `listener` with the groups of estimates that have changed."""
        self._listeners.append(listener)

    def put(self, model_hash: str, ratios: tuple[MeasuredRatio, ...] = ()) -> None:
        """Replace the measurements of a model; without `ratios`, remove them.

        Each of `ratios` is a pair: the namespace of the measurement, and the measured beside the estimated speed.

        1. Sort the ratios by group: those of no namespace or the controller's correct all namespaces, as only
           administrators state or measure them; those of another namespace correct only that one.
        2. Store them in each scope where they differ, and forget the corrections learned from the former ones.
        3. Call the listeners with the changed groups, if there are any.
        """
        # 1. Sort by group. Its scope is a namespace, or ALL_NAMESPACES, which is the empty one.
        groups: dict[CorrectionGroup, tuple[SpeedRatio, ...]] = {}
        for namespace, ratio in ratios:
            scope = ALL_NAMESPACES if namespace == CONTROLLER_NAMESPACE else namespace
            group = CorrectionGroup(scope, ratio.vendor, ratio.runtime)
            groups[group] = (*groups.get(group, ()), ratio)

        # 2. Store what differs; models and scopes without ratios have no entry. No other model is looked at.
        former = self._groups_by_model.pop(model_hash, {})
        if groups:
            self._groups_by_model[model_hash] = groups
        changed = frozenset(group for group in former.keys() | groups.keys() if former.get(group) != groups.get(group))
        for group in changed:
            stored = self._ratios_by_scope.setdefault(group.namespace, {})
            if group in groups:
                stored[model_hash, group] = groups[group]
            else:
                del stored[model_hash, group]
            if not stored:
                del self._ratios_by_scope[group.namespace]
            self._corrections_by_scope.pop(group.namespace, None)
            if group.namespace == ALL_NAMESPACES:
                # The corrections of each namespace are learned from these, too.
                self._corrections_by_scope.clear()

        # 3. Report the change.
        if changed:
            for listener in self._listeners:
                listener(changed)

    def select(self, namespace: str) -> Corrections:
        """Return the corrections for estimates in a namespace; with `ALL_NAMESPACES`, only those that count for all.

        They follow from the measurements that count for all and those of the namespace itself. They are learned at the
        first call after a change, and kept.
        """
        # Namespaces without measurements of their own share one entry.
        scope = namespace if namespace in self._ratios_by_scope else ALL_NAMESPACES
        if scope not in self._corrections_by_scope:
            ratios_of_groups = [*self._ratios_by_scope.get(ALL_NAMESPACES, {}).values()]
            if scope != ALL_NAMESPACES:
                ratios_of_groups += self._ratios_by_scope[scope].values()
            all_ratios = (ratio for ratios in ratios_of_groups for ratio in ratios)
            self._corrections_by_scope[scope] = learn_corrections(all_ratios)
        return self._corrections_by_scope[scope]
