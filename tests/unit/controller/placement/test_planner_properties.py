"""The invariants I1 to I9 of the queue hold whatever happens: simulated clusters, each of which follows from a seed.

`make fuzz` tries seeds for as long as it is told, and repeats one.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzz_queue import run_simulation


# The same seeds in each run: others are for `make fuzz`.
@settings(derandomize=True)
@given(st.integers(0, 10**6))
def test_invariants_hold_in_simulated_clusters(seed: int) -> None:
    try:
        run_simulation(seed)
    except AssertionError as err:
        raise AssertionError(f"make fuzz SEED={seed}: {err}") from err
