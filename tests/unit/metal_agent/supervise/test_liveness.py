"""The rule of liveness checks: a silent engine hangs only if it uses no processor time either."""

import pytest

from metal_agent.supervise.engine_checks import (
    CHECK_SECONDS,
    HUNG_CHECKS,
    TOKEN_CHECK_SECONDS,
    LivenessAnswer,
    LivenessCheck,
    count_failures,
    pause_seconds,
    should_probe,
)

SILENT = LivenessAnswer("no answer within 20 s", silent=True)
REFUSED = LivenessAnswer("connection refused")


@pytest.mark.parametrize(
    ("asked", "before", "after", "alive"),
    [
        (LivenessAnswer(), 1.0, 1.0, True),  # an answer is enough
        (SILENT, 1.0, 1.5, True),  # a long prompt
        (SILENT, 1.0, 1.0, False),
        (SILENT, None, 1.0, True),  # the first check has nothing to compare with
        (SILENT, 1.0, None, True),  # unknown to the system: no reason to end the engine
        (None, 1.0, 1.5, True),  # not probed, since it works on requests
        (None, 1.0, 1.0, False),
        (REFUSED, 1.0, 9.0, False),  # a refusal is an answer, even from a busy engine
    ],
)
def test_engine_is_alive_if_it_answers_or_uses_the_processor(
    asked: LivenessAnswer | None, before: float | None, after: float | None, alive: bool
) -> None:
    assert LivenessCheck(asked, before, after).alive is alive


def test_only_failed_checks_in_a_row_count() -> None:
    dead, living = LivenessCheck(SILENT, 1.0, 1.0), LivenessCheck(SILENT, 1.0, 2.0)
    counts = [0]
    for look in (dead, dead, living, dead, dead, dead):
        counts.append(count_failures(counts[-1], look))
    assert counts == [0, 1, 2, 0, 1, 2, HUNG_CHECKS]


@pytest.mark.parametrize(
    ("requests", "before", "after", "ask"),
    [
        (0, 1.0, 2.0, True),
        (None, 1.0, 2.0, True),  # no count from the proxy
        (3, 1.0, 2.0, False),
        (3, 1.0, 1.0, True),
        (3, None, 1.0, True),
        (3, 1.0, None, True),
    ],
)
def test_engine_that_works_on_requests_is_not_probed(
    requests: int | None, before: float | None, after: float | None, ask: bool
) -> None:
    assert should_probe(requests, before, after) is ask


def test_token_is_requested_rarely_until_a_check_fails() -> None:
    assert pause_seconds("/metrics", 0) == CHECK_SECONDS
    assert pause_seconds(None, 0) == TOKEN_CHECK_SECONDS
    assert pause_seconds(None, 1) == CHECK_SECONDS
