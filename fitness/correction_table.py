"""The corrections of speed estimates by the stored measurements, as each namespace may use them.

A measurement that was made in a namespace of tenants is a claim of theirs, so it corrects estimates of that namespace
alone. One that was made in the namespace of the controller, or that counts for all, corrects all. A change touches one
vendor and engine of one namespace, and what was learned of these is learned again when it is next asked for.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from crds.meta import CONTROLLER_NAMESPACE
from fitness.corrections import NO_CORRECTIONS, Correction, Corrections, SpeedRatio, learn_corrections


class CorrectionGroup(NamedTuple):
    """Measurements that are learned from together."""

    namespace: str
    """The only namespace whose estimates they correct; empty: they correct all."""
    vendor: str
    runtime: str


class MeasuredRatio(NamedTuple):
    """One stored measurement beside the estimate of its time."""

    namespace: str
    """Namespace of the measurement; empty: it counts for all."""
    ratio: SpeedRatio


class CorrectionTable:
    """All that was learned, by namespace, vendor and engine."""

    def __init__(self) -> None:
        self._models: dict[str, Mapping[CorrectionGroup, tuple[SpeedRatio, ...]]] = {}
        """Measurements of each model hash."""
        self._ratios: dict[CorrectionGroup, dict[str, tuple[SpeedRatio, ...]]] = {}
        """The same by group, and there by model hash."""
        self._learned: dict[tuple[str, str], dict[str, Corrections]] = {}
        """By vendor and engine, and there by namespace."""
        self._listeners: list[Callable[[frozenset[CorrectionGroup]], None]] = []

    def subscribe(self, listener: Callable[[frozenset[CorrectionGroup]], None]) -> None:
        """Call `listener` with the groups of which a measurement has changed."""
        self._listeners.append(listener)

    def put(self, model_hash: str, ratios: tuple[MeasuredRatio, ...] = ()) -> None:
        """Take the measurements of a model as they are now; none: they are gone."""
        found: dict[CorrectionGroup, tuple[SpeedRatio, ...]] = {}
        for namespace, ratio in ratios:
            scope = "" if namespace == CONTROLLER_NAMESPACE else namespace
            group = CorrectionGroup(scope, ratio.vendor, ratio.runtime)
            found[group] = (*found.get(group, ()), ratio)
        known = self._models.pop(model_hash, {})
        if found:
            self._models[model_hash] = found
        changed = frozenset(each for each in known.keys() | found.keys() if known.get(each) != found.get(each))
        for group in changed:
            self._change_group(group, model_hash, found.get(group))
        if changed:
            for listener in self._listeners:
                listener(changed)

    def _change_group(self, group: CorrectionGroup, model_hash: str, ratios: tuple[SpeedRatio, ...] | None) -> None:
        members = self._ratios.setdefault(group, {})
        members.pop(model_hash, None)
        if ratios:
            members[model_hash] = ratios
        if not members:
            del self._ratios[group]
        learned = self._learned.get((group.vendor, group.runtime), {})
        if group.namespace:
            learned.pop(group.namespace, None)
        else:
            learned.clear()

    def find(self, namespace: str, vendor: str, device_class: str, runtime: str) -> Correction:
        """Return the correction of estimates of a namespace on a device class."""
        own = self._ratios.get(CorrectionGroup(namespace, vendor, runtime)) if namespace else None
        shared = self._ratios.get(CorrectionGroup("", vendor, runtime), {})
        if not own and not shared:
            return NO_CORRECTIONS.find(vendor, device_class, runtime)
        # All namespaces without own measurements have what was learned from the shared ones.
        learned, scope = self._learned.setdefault((vendor, runtime), {}), namespace if own else ""
        if scope not in learned:
            members = (*shared.values(), *(own or {}).values())
            learned[scope] = learn_corrections(ratio for ratios in members for ratio in ratios)
        return learned[scope].find(vendor, device_class, runtime)


class ScopedCorrections(NamedTuple):
    """The corrections that count in one namespace."""

    table: CorrectionTable
    namespace: str
    """Empty: those that count for all."""

    def find(self, vendor: str, device_class: str, runtime: str) -> Correction:
        """Return the correction of a device class, as `Corrections` does."""
        return self.table.find(self.namespace, vendor, device_class, runtime)
