"""The score is defined for all weights and facts, and between 0 and 10."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.score import BEST_SCORE, ScoreWeights, compute_score, neutral_score

DEFAULTS = ScoreWeights()
WEIGHTS = st.builds(ScoreWeights, *[st.floats(0, 1000, allow_subnormal=False)] * 3).filter(
    lambda weights: weights.find_problem() is None and sum(weights) > 1e-6
)
SHARES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("facts", "score"),
    [
        ((1.0, 0.0, 0.0), 10),
        ((0.0, 0.0, 0.0), 3),
        ((0.0, 1.0, 1.0), 0),
        ((0.5, 0.0, 0.0), 7),  # 6.5, rounded up
        ((1.0, 1.0, 0.0), 8),
        ((1.0, 0.0, 1.0), 9),
    ],
)
def test_score_has_the_documented_values(facts: tuple[float, float, float], score: int) -> None:
    assert compute_score(*facts, DEFAULTS) == score


def test_unknown_node_gets_the_score_of_an_idle_free_one_without_speed() -> None:
    assert neutral_score(DEFAULTS) == 3
    assert neutral_score(ScoreWeights(1, 0, 0)) == 0


@given(SHARES, SHARES, SHARES, WEIGHTS)
def test_score_is_between_0_and_10(speed: float, util: float, cost: float, weights: ScoreWeights) -> None:
    assert 0 <= compute_score(speed, util, cost, weights) <= BEST_SCORE


@given(SHARES, SHARES, SHARES, SHARES, WEIGHTS)
def test_faster_node_has_no_lower_score(
    one: float, other: float, util: float, cost: float, weights: ScoreWeights
) -> None:
    slow, fast = sorted((one, other))
    assert compute_score(slow, util, cost, weights) <= compute_score(fast, util, cost, weights)


@given(SHARES, SHARES, SHARES, SHARES, WEIGHTS)
def test_busier_and_dearer_node_has_no_higher_score(
    one: float, other: float, speed: float, rest: float, weights: ScoreWeights
) -> None:
    less, more = sorted((one, other))
    assert compute_score(speed, more, rest, weights) <= compute_score(speed, less, rest, weights)
    assert compute_score(speed, rest, more, weights) <= compute_score(speed, rest, less, weights)


@pytest.mark.parametrize(
    "weights", [(-0.1, 1, 1), (math.nan, 1, 1), (math.inf, 1, 1), (0, 0, 0), (1e308, 1e308, 1e308)]
)
def test_weights_without_a_score_are_refused(weights: tuple[float, float, float]) -> None:
    assert ScoreWeights(*weights).find_problem() is not None
    assert DEFAULTS.find_problem() is None
