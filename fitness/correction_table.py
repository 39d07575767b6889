"""The corrections of speed estimates by the stored measurements, as each namespace may use them.

A measurement that was made in a namespace of tenants is a claim of theirs, so it corrects estimates of that namespace
alone. One that was made in the namespace of the controller, or that counts for all, corrects all. What was learned for
a namespace is learned again when it is next asked for after a change.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from crds.meta import CONTROLLER_NAMESPACE
from fitness.corrections import Corrections, SpeedRatio, learn_corrections

ALL_NAMESPACES: Final = ""


class MeasuredRatio(NamedTuple):
    """One stored measurement beside the estimate of its time."""

    namespace: str
    """Namespace of the measurement; empty: it counts for all."""
    ratio: SpeedRatio


class CorrectionTable:
    """All that was learned, by namespace."""

    def __init__(self) -> None:
        self._ratios: dict[str, dict[str, tuple[SpeedRatio, ...]]] = {}
        """By the only namespace whose estimates they correct, or `ALL_NAMESPACES`, and there by model hash."""
        self._learned: dict[str, Corrections] = {}
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` with the namespaces whose estimates have changed; `ALL_NAMESPACES`: those of all."""
        self._listeners.append(listener)

    def put(self, model_hash: str, ratios: tuple[MeasuredRatio, ...] = ()) -> None:
        """Replace the measurements of a model; none: they are gone.

        The corrections learned from them are forgotten, and the listeners are called with the changed namespaces.
        """
        # 1. A scope is the only namespace whose estimates a measurement corrects, or `ALL_NAMESPACES`.
        by_scope: dict[str, tuple[SpeedRatio, ...]] = {}
        for namespace, ratio in ratios:
            scope = ALL_NAMESPACES if namespace == CONTROLLER_NAMESPACE else namespace
            by_scope[scope] = (*by_scope.get(scope, ()), ratio)

        # 2. Replace the ratios of the model in each scope where they are others, and forget what was learned from them.
        scopes = self._ratios.keys() | by_scope.keys()
        changed = frozenset(
            scope for scope in scopes if self._ratios.get(scope, {}).get(model_hash, ()) != by_scope.get(scope, ())
        )
        for scope in changed:
            ratios_by_model = {**self._ratios.get(scope, {}), model_hash: by_scope.get(scope, ())}
            self._ratios[scope] = {name: stored for name, stored in ratios_by_model.items() if stored}
            if not self._ratios[scope]:
                del self._ratios[scope]
            self._learned.pop(scope, None)
        if ALL_NAMESPACES in changed:
            # The corrections of each namespace are learned from these, too.
            self._learned.clear()

        # 3. Report the change.
        if changed:
            for listener in self._listeners:
                listener(changed)

    def select(self, namespace: str) -> Corrections:
        """Return the corrections of the estimates of a namespace, learned if needed; "": those that count for all."""
        # Namespaces without measurements of their own share what was learned from those that count for all.
        scope = namespace if namespace in self._ratios else ALL_NAMESPACES
        if scope not in self._learned:
            ratios_of_models = [*self._ratios.get(ALL_NAMESPACES, {}).values()]
            if scope != ALL_NAMESPACES:
                ratios_of_models += self._ratios[scope].values()
            self._learned[scope] = learn_corrections(ratio for ratios in ratios_of_models for ratio in ratios)
        return self._learned[scope]
