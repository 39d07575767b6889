"""The verdict on a suspect engine: only the agent's own request decides, and it is bounded in time."""

import pytest

from metal_agent.engine_health import (
    BUSY_SECONDS,
    LONG_PROMPT_SECONDS,
    SILENT_SECONDS,
    Suspicion,
    SuspicionReason,
    Verdict,
    is_busy,
    is_start_problem,
    judge_check,
)
from runtimes.probe import ProbeResult

ANSWERED = ProbeResult(ok=True, reason="Generated", message="it generated a token")


def result(reason: str) -> ProbeResult:
    return ProbeResult(ok=False, reason=reason, message="no")


@pytest.mark.parametrize("reason", ["Failing", "Silent", "Slow"])
def test_engine_that_answers_the_agent_is_healthy(reason: SuspicionReason) -> None:
    assert judge_check(Suspicion(reason, "5 of 5"), ANSWERED, BUSY_SECONDS, is_busy=False) == "healthy"


@pytest.mark.parametrize("answer", ["BadAnswer", "Broken", "NotFound", "Unauthorized"])
def test_engine_that_answers_the_agent_with_an_error_is_failing(answer: str) -> None:
    assert judge_check(Suspicion("Silent", "5 of 5"), result(answer), 0, is_busy=True) == "failing"


@pytest.mark.parametrize(
    ("reason", "waited_seconds", "busy", "verdict"),
    [
        ("Failing", SILENT_SECONDS - 1, False, "undecided"),
        ("Failing", SILENT_SECONDS, False, "hung"),
        ("Silent", SILENT_SECONDS, True, "undecided"),  # the request may wait for a long prompt
        ("Silent", BUSY_SECONDS, True, "hung"),
        ("Slow", SILENT_SECONDS, False, "undecided"),
        ("Slow", BUSY_SECONDS, False, "hung"),
        ("Slow", LONG_PROMPT_SECONDS - 1, True, "undecided"),  # one slot, and a prompt that takes half an hour
        ("Slow", LONG_PROMPT_SECONDS - 1, None, "undecided"),
        ("Slow", LONG_PROMPT_SECONDS, True, "hung"),
        ("Silent", SILENT_SECONDS, None, "hung"),
    ],
)
@pytest.mark.parametrize("answer", ["TimedOut", "Loading", "Unreachable"])
def test_silent_engine_hangs_after_a_bounded_time(
    reason: SuspicionReason, waited_seconds: float, busy: bool | None, verdict: Verdict, answer: str
) -> None:
    assert judge_check(Suspicion(reason, "x"), result(answer), waited_seconds, is_busy=busy) == verdict


def test_threads_of_a_hung_engine_that_only_wake_up_are_no_work() -> None:
    assert is_busy(0.002, 20) is False
    assert is_busy(0.05, 20), "a GPU works for it"
    assert is_busy(None, 20) is None, "a model in a daemon"


@pytest.mark.parametrize(
    ("answer", "shown"), [("Loading", False), ("Unreachable", False), ("BadAnswer", True), ("TimedOut", True)]
)
def test_only_more_than_loading_is_shown_while_starting(answer: str, shown: bool) -> None:
    assert is_start_problem(result(answer)) is shown
