import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitness.memory import OVERHEAD_BYTES, serving_bytes


def test_counts_weights_and_the_whole_context_of_each_slot() -> None:
    needed = serving_bytes(weights_bytes=5_000, kv_bytes_per_token=10, context_length=4096, parallel=3)
    assert needed == 5_000 + 10 * 4096 * 3 + OVERHEAD_BYTES


@pytest.mark.parametrize(("weights", "kv"), [(None, 10), (5_000, None), (None, None)])
def test_what_is_not_known_is_not_guessed(weights: int | None, kv: int | None) -> None:
    assert serving_bytes(weights_bytes=weights, kv_bytes_per_token=kv, context_length=4096, parallel=1) is None


@given(st.integers(0, 2**50), st.integers(0, 2**20), st.integers(128, 2**21), st.integers(1, 64))
def test_more_context_never_takes_less(weights: int, kv: int, context: int, parallel: int) -> None:
    less = serving_bytes(weights_bytes=weights, kv_bytes_per_token=kv, context_length=context, parallel=parallel)
    more = serving_bytes(weights_bytes=weights, kv_bytes_per_token=kv, context_length=context, parallel=parallel + 1)
    assert less is not None
    assert more is not None
    assert more >= less > weights
