"""The pace of the rounds: those that decide nothing rest, and what may let a unit in waits less."""

import pytest

from controller.placement.round_pacer import (
    IDLE_SHARE,
    LONGEST_PAUSE_SECONDS,
    MOST_OWED_SECONDS,
    NO_CREDIT,
    ROOM_CREDIT_SECONDS,
    ROUND_SECONDS,
    UNIT_CREDIT_SECONDS,
    RoundPacer,
)

CREDITS = (NO_CREDIT, UNIT_CREDIT_SECONDS, ROOM_CREDIT_SECONDS)
DAY_SECONDS = 86_400.0


def test_first_round_begins_at_once() -> None:
    assert RoundPacer().find_begin(NO_CREDIT) < 0


@pytest.mark.parametrize("credit_seconds", CREDITS)
def test_rounds_that_decide_follow_each_other(credit_seconds: float) -> None:
    pacer = RoundPacer()
    for number in range(100):
        pacer.note_round(number * 1.0, number + 0.9, has_decided=True)
    assert pacer.find_begin(credit_seconds) == 99 + ROUND_SECONDS


def test_after_a_round_without_a_decision_only_what_may_let_a_unit_in_is_planned_at_once() -> None:
    pacer = RoundPacer()
    pacer.note_round(10.0, 10.0625, has_decided=False)
    begins = [pacer.find_begin(credit_seconds) for credit_seconds in CREDITS]
    assert begins == [10.0625 + 0.0625 * IDLE_SHARE, 10 + ROUND_SECONDS, 10 + ROUND_SECONDS]


def test_units_that_come_all_the_time_leave_credit_for_room() -> None:
    pacer, now, waits = RoundPacer(), 0.0, []
    for _ in range(1000):
        begin = max(now, pacer.find_begin(UNIT_CREDIT_SECONDS))
        now = begin + 0.07
        pacer.note_round(begin, now, has_decided=False)
        waits.append(pacer.find_begin(ROOM_CREDIT_SECONDS) - begin)
    assert max(waits) == pytest.approx(ROUND_SECONDS)


@pytest.mark.parametrize("credit_seconds", CREDITS)
@pytest.mark.parametrize("round_seconds", [0.001, 0.02, 0.07])
def test_rounds_that_decide_nothing_take_a_fiftieth_of_the_time(credit_seconds: float, round_seconds: float) -> None:
    pacer, now, rounds = RoundPacer(), 0.0, 0
    while now < DAY_SECONDS:
        begin = max(now, pacer.find_begin(credit_seconds))
        now, rounds = begin + round_seconds, rounds + 1
        pacer.note_round(begin, now, has_decided=False)
    assert rounds * round_seconds < 1.01 * DAY_SECONDS / IDLE_SHARE


@pytest.mark.parametrize("credit_seconds", CREDITS)
def test_long_rounds_delay_the_next_one_by_no_more_than_the_longest_pause(credit_seconds: float) -> None:
    pacer, now = RoundPacer(), 0.0
    for _ in range(20):
        begin = max(now, pacer.find_begin(credit_seconds))
        assert begin - now <= LONGEST_PAUSE_SECONDS
        now = begin + 3.0
        pacer.note_round(begin, now, has_decided=False)
    pacer.note_round(now, now + 1, has_decided=True)
    assert pacer.find_begin(NO_CREDIT) <= now + 1 + LONGEST_PAUSE_SECONDS


def test_long_rounds_are_made_up_for_after_a_while() -> None:
    pacer, now = RoundPacer(), 0.0
    for _ in range(20):
        pacer.note_round(now, now + 3.0, has_decided=False)
        now += 3.0 + LONGEST_PAUSE_SECONDS
    now += MOST_OWED_SECONDS
    pacer.note_round(now, now + 0.125, has_decided=False)
    assert pacer.find_begin(NO_CREDIT) == now + 0.125 + min(0.125 * IDLE_SHARE, LONGEST_PAUSE_SECONDS)
    assert pacer.find_begin(UNIT_CREDIT_SECONDS) == pytest.approx(now + 0.125 * (1 + IDLE_SHARE) - UNIT_CREDIT_SECONDS)
