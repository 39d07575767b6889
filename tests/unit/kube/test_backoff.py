"""The pause between tries: it starts at `first`, never shrinks, stays below its bound and within its jitter."""

from hypothesis import given
from hypothesis import strategies as st

from kube.backoff import AROUND, BELOW, EXACT, Jitter, backoff_seconds

FIRSTS = st.floats(min_value=0.01, max_value=60.0)
RATIOS = st.floats(min_value=1.0, max_value=10_000.0)


@given(first=FIRSTS, ratio=RATIOS, failures=st.integers(min_value=1, max_value=100_000))
def test_pause_doubles_up_to_its_bound(first: float, ratio: float, failures: int) -> None:
    most = first * ratio
    pause = backoff_seconds(failures, first=first, most=most, jitter=EXACT)
    following = backoff_seconds(failures + 1, first=first, most=most, jitter=EXACT)
    assert first <= pause <= most
    assert following == min(most, 2 * pause)


@given(first=FIRSTS, ratio=RATIOS)
def test_pause_starts_with_the_first_and_reaches_its_bound(first: float, ratio: float) -> None:
    most = first * ratio
    assert backoff_seconds(1, first=first, most=most, jitter=EXACT) == first
    assert backoff_seconds(100_000, first=first, most=most, jitter=EXACT) == most


@given(
    first=FIRSTS,
    ratio=RATIOS,
    failures=st.integers(min_value=1, max_value=2000),
    jitter=st.sampled_from([AROUND, BELOW, EXACT]),
)
def test_jitter_scales_the_exact_pause(first: float, ratio: float, failures: int, jitter: Jitter) -> None:
    exact = backoff_seconds(failures, first=first, most=first * ratio, jitter=EXACT)
    pause = backoff_seconds(failures, first=first, most=first * ratio, jitter=jitter)
    assert exact * jitter.least <= pause <= exact * jitter.most


def test_two_clients_pause_for_different_times() -> None:
    assert len({backoff_seconds(3, first=1.0, most=60.0) for _ in range(20)}) > 1
