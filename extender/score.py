"""The score of a node for a model: its speed, less its utilization and cost, from 0 to 10."""

import math
from typing import Final, NamedTuple

BEST_SCORE: Final = 10
"""`MaxExtenderPriority` of kube-scheduler, which does not hold an extender to it."""


class ScoreWeights(NamedTuple):
    """The weights of the three parts of a score; only their ratio matters."""

    tps: float = 0.7
    """Weight of the speed, as a share of that of the fastest device class in the cluster."""
    util: float = 0.2
    """Weight of the utilization, which counts against a node."""
    cost: float = 0.1
    """Weight of the cost, as a share of that of the dearest node, which counts against a node."""

    def find_problem(self) -> str | None:
        """Return why these weights make no score, with the way out, or None."""
        if any(not math.isfinite(weight) or weight < 0 for weight in self):
            return f"the weights are {self.tps:g}, {self.util:g} and {self.cost:g}: each must be a number from 0"
        # The sum of finite weights may still be infinite.
        if not 0 < sum(self) < math.inf:
            return "all weights are 0: at least one of tps, util and cost must be more"
        return None


def compute_score(speed_share: float, utilization: float, cost_share: float, weights: ScoreWeights) -> int:
    """Return the score of a node, from 0 (worst) to 10.

    Args:
        speed_share: from 0 (unknown) to 1 (the fastest device class).
        utilization: from 0 (idle, or unknown) to 1.
        cost_share: from 0 (free, or unknown) to 1 (the dearest node).
        weights: valid weights.
    """
    # The weighted sum lies between -largest_deduction and weights.tps; this range is mapped to 0 to 10.
    largest_deduction = weights.util + weights.cost
    raw = weights.tps * speed_share - weights.util * utilization - weights.cost * cost_share
    # Rounded to the nearest number. Not by floor: the sum may be negative by a rounding error.
    return min(BEST_SCORE, int(BEST_SCORE * (raw + largest_deduction) / (weights.tps + largest_deduction) + 0.5))


def neutral_score(weights: ScoreWeights) -> int:
    """Return the score of an unknown node: idle, without cost, and of unknown speed."""
    return compute_score(0.0, 0.0, 0.0, weights)
