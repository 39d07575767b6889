"""The budget of retries of one service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.retry_budget import FREE_RETRIES, RETRIES_PER_REQUEST, RetryBudget


def take_all(budget: RetryBudget, now: float) -> int:
    taken = 0
    while budget.try_take(now):
        taken += 1
    return taken


def test_quiet_service_may_repeat_some_requests() -> None:
    assert take_all(RetryBudget(), 1000.0) == FREE_RETRIES


@pytest.mark.parametrize("requests", [100, 1000, 10_000])
def test_retries_are_a_tenth_of_the_requests(requests: int) -> None:
    budget = RetryBudget()
    for _ in range(requests):
        budget.note_request(1000.0)
    assert take_all(budget, 1000.0) == FREE_RETRIES + RETRIES_PER_REQUEST * requests


def test_outage_of_an_hour_does_not_multiply_requests() -> None:
    """Each request fails and would be repeated, 50 a second: a tenth of them is."""
    budget, retries = RetryBudget(), 0
    for number in range(50 * 3600):
        budget.note_request(number / 50)
        retries += budget.try_take(number / 50)
    assert retries / (50 * 3600) == pytest.approx(RETRIES_PER_REQUEST, rel=0.05)


def test_spent_budget_is_there_again_after_some_minutes() -> None:
    budget = RetryBudget()
    take_all(budget, 1000.0)
    assert not budget.try_take(1001.0)
    assert take_all(budget, 1300.0) >= FREE_RETRIES - 1


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=300))
def test_retries_never_exceed_the_budget_of_all_requests(events: list[tuple[float, bool]]) -> None:
    budget, now, requests, retries = RetryBudget(), 0.0, 0, 0
    for seconds, is_request in events:
        now += seconds
        if is_request:
            budget.note_request(now)
            requests += 1
        else:
            retries += budget.try_take(now)
    free = FREE_RETRIES * (1 + now / 60)  # they come back as the minutes pass
    assert retries <= free + RETRIES_PER_REQUEST * requests + 1
