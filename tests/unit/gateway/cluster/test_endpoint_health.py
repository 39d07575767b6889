"""The ejection of an endpoint that accepts no connection, and its return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.endpoint_health import LONGEST_EJECTION_SECONDS, EndpointHealth


def test_one_refused_connection_ejects_for_two_seconds() -> None:
    health = EndpointHealth()
    assert health.ejected_until <= 100.0
    health.note_unreachable(100.0)
    assert health.ejected_until == 102.0


def test_ejection_doubles_up_to_half_a_minute_while_each_trial_fails() -> None:
    health, now, lengths = EndpointHealth(), 100.0, []
    for _ in range(6):
        health.begin_attempt(now)
        health.note_unreachable(now)
        lengths.append(health.ejected_until - now)
        now = health.ejected_until
    assert lengths == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_success_ends_the_ejection_and_its_length() -> None:
    health = EndpointHealth()
    health.note_unreachable(100.0)
    health.note_unreachable(102.0)
    health.note_success()
    assert health.ejected_until <= 102.0
    health.note_unreachable(103.0)
    assert health.ejected_until == 105.0


def test_requests_that_fail_together_eject_once() -> None:
    health = EndpointHealth()
    for now in (100.0, 100.1, 101.9):
        health.note_unreachable(now)
    assert health.ejected_until == 102.0


def test_others_pass_the_endpoint_over_until_the_trial_has_an_outcome() -> None:
    health = EndpointHealth()
    health.note_unreachable(100.0)
    health.begin_attempt(103.0)
    assert health.ejected_until == 105.0  # the time of the next trial, if this one has no outcome
    health.note_unreachable(103.2)
    assert health.ejected_until == pytest.approx(107.2)


def test_request_to_an_endpoint_that_works_changes_nothing() -> None:
    health = EndpointHealth()
    health.begin_attempt(100.0)
    assert health.ejected_until <= 100.0


@given(st.lists(st.tuples(st.sampled_from(["attempt", "success", "failure"]), st.floats(0.0, 40.0)), max_size=40))
def test_endpoint_may_always_be_tried_again_in_half_a_minute(events: list[tuple[str, float]]) -> None:
    health, now = EndpointHealth(), 100.0
    for event, seconds in events:
        now += seconds
        match event:
            case "attempt":
                health.begin_attempt(now)
            case "success":
                health.note_success()
                assert health.ejected_until <= now
            case _:
                health.note_unreachable(now)
                assert health.ejected_until > now
        assert health.ejected_until <= now + LONGEST_EJECTION_SECONDS
