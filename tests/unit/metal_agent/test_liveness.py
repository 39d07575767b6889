"""What a look at an engine means: silence is a sign of death only where nothing moves either."""

import pytest

from metal_agent.liveness import (
    HUNG_LOOKS,
    LOOK_SECONDS,
    TOKEN_LOOK_SECONDS,
    Asked,
    Look,
    failures,
    pause_seconds,
    should_ask,
)

SILENT = Asked("no answer within 20 s", silent=True)
REFUSED = Asked("connection refused")


@pytest.mark.parametrize(
    ("asked", "before", "after", "alive"),
    [
        (Asked(), 1.0, 1.0, True),  # it answered, whatever it used
        (SILENT, 1.0, 1.5, True),  # a long prompt
        (SILENT, 1.0, 1.0, False),
        (SILENT, None, 1.0, True),  # the first look: nothing to compare with
        (SILENT, 1.0, None, True),  # the system does not tell: no reason to end anything
        (None, 1.0, 1.5, True),  # not asked, for it works for others
        (None, 1.0, 1.0, False),
        (REFUSED, 1.0, 9.0, False),  # a refusal is an answer, however busy it is
    ],
)
def test_what_a_look_says(asked: Asked | None, before: float | None, after: float | None, alive: bool) -> None:
    assert Look(asked, before, after).alive is alive


def test_only_looks_in_a_row_count() -> None:
    dead, living = Look(SILENT, 1.0, 1.0), Look(SILENT, 1.0, 2.0)
    counts = [0]
    for look in (dead, dead, living, dead, dead, dead):
        counts.append(failures(counts[-1], look))
    assert counts == [0, 1, 2, 0, 1, 2, HUNG_LOOKS]


@pytest.mark.parametrize(
    ("requests", "before", "after", "ask"),
    [
        (0, 1.0, 2.0, True),
        (None, 1.0, 2.0, True),  # no proxy says so
        (3, 1.0, 2.0, False),
        (3, 1.0, 1.0, True),
        (3, None, 1.0, True),
        (3, 1.0, None, True),
    ],
)
def test_who_visibly_works_on_requests_is_not_asked(
    requests: int | None, before: float | None, after: float | None, ask: bool
) -> None:
    assert should_ask(requests, before, after) is ask


def test_a_token_is_asked_seldom_until_there_is_a_doubt() -> None:
    assert pause_seconds("/metrics", 0) == LOOK_SECONDS
    assert pause_seconds(None, 0) == TOKEN_LOOK_SECONDS
    assert pause_seconds(None, 1) == LOOK_SECONDS
