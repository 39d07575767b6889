"""The invariants I1 to I9 of the queue hold whatever happens: simulated clusters, each of which follows from a seed.

`make fuzz` tries seeds for as long as it is told, and repeats one.
"""

import pytest

from tests.support.fuzz_queue import run_simulation

SEEDS = 105


@pytest.mark.parametrize("first", range(0, SEEDS, 15))
def test_invariants_hold_in_simulated_clusters(first: int) -> None:
    for seed in range(first, first + 15):
        try:
            run_simulation(seed)
        except AssertionError as err:
            raise AssertionError(f"make fuzz SEED={seed}: {err}") from err
