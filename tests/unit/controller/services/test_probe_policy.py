"""The answer and the trouble that follow from a probe, and the time of the next one."""

import uuid

import msgspec
import pytest

from controller.services.endpoints import Endpoint
from controller.services.probe_policy import (
    DOUBT_SECONDS,
    LAST_RETRY_SECONDS,
    REPEAT_SECONDS,
    SILENT_SECONDS,
    Answer,
    Probe,
    judge_probe,
    seconds_to_repeat,
    update_trouble,
)
from runtimes.probe import ProbeResult

FIRST = Endpoint("10.0.0.1", 8080)
FINE = ProbeResult(ok=True, reason="Generated", message="http://10.0.0.1:8080 generated a token")
OTHER = ProbeResult(ok=True, reason="Generated", message="http://10.0.0.2:8080 generated a token")
ERROR = ProbeResult(ok=False, reason="BadAnswer", message="http://10.0.0.1:8080 answered 500: Compute error; restart")
SILENCE = ProbeResult(ok=False, reason="TimedOut", message="no answer from http://10.0.0.1:8080")
UNREAD = ProbeResult(ok=False, reason="TokenNotRead", message="503")


def with_text(result: ProbeResult, text: str) -> ProbeResult:
    return msgspec.structs.replace(result, message=f"{result.message}{text}")


SILENT = Answer(with_text(FINE, f"; {SILENCE.message}: it is busy, or it hangs and must be restarted"), has_note=True)
BESIDE = Probe(with_text(OTHER, f"; {ERROR.message}"), failed=FIRST)
ONE_FAILED = Answer(BESIDE.result, has_note=True)
QUOTING = with_text(FINE, " and said: a; b")
"""An answer without a note, in whose message an engine is quoted."""


@pytest.mark.parametrize(
    ("probe", "last", "seconds", "expected"),
    [
        (Probe(ERROR), Answer(FINE), 0.0, None),
        (Probe(ERROR), Answer(FINE), DOUBT_SECONDS, Answer(ERROR)),
        (Probe(ERROR), None, 0.0, None),
        (Probe(SILENCE), Answer(FINE), SILENT_SECONDS - 1, None),
        (Probe(SILENCE), Answer(FINE), SILENT_SECONDS, SILENT),
        (Probe(SILENCE), SILENT, 2 * SILENT_SECONDS, None),
        (Probe(SILENCE), ONE_FAILED, SILENT_SECONDS, None),
        (Probe(SILENCE), None, SILENT_SECONDS, None),
        (Probe(SILENCE), Answer(ERROR), SILENT_SECONDS, None),
        (Probe(UNREAD), Answer(FINE), 2 * SILENT_SECONDS, None),
        (Probe(OTHER), Answer(FINE), 0.0, None),
        (BESIDE, Answer(FINE), 0.0, ONE_FAILED),
        (Probe(FINE), ONE_FAILED, 0.0, Answer(FINE)),
        (Probe(FINE), SILENT, 0.0, Answer(FINE)),
        (Probe(FINE), Answer(ERROR), 0.0, Answer(FINE)),
    ],
)
def test_service_that_has_answered_is_believed(
    probe: Probe, last: Answer | None, seconds: float, expected: Answer | None
) -> None:
    assert judge_probe(probe, last, seconds, has_answered=True) == expected


@pytest.mark.parametrize("result", [FINE, ERROR, SILENCE, UNREAD], ids=lambda result: result.reason)
def test_service_that_has_never_answered_is_as_its_probe_says(result: ProbeResult) -> None:
    assert judge_probe(Probe(result), None, 0.0, has_answered=False) == Answer(result)


def test_note_is_not_read_out_of_a_message() -> None:
    said_otherwise = Probe(with_text(OTHER, " and said: c; d"))
    assert judge_probe(said_otherwise, Answer(QUOTING), 0.0, has_answered=True) is None, "that is no news"
    noted = judge_probe(Probe(SILENCE), Answer(QUOTING), SILENT_SECONDS, has_answered=True)
    assert noted == Answer(with_text(QUOTING, SILENT.result.message.removeprefix(FINE.message)), has_note=True)


def test_errors_and_silence_are_timed_apart() -> None:
    silent = update_trouble(None, Probe(SILENCE), 100.0)
    assert silent is not None
    assert silent.failing_seconds("TimedOut", 400.0) == 300.0
    both = update_trouble(silent, Probe(ERROR), 400.0)
    assert both is not None
    assert (both.failing_seconds("BadAnswer", 405.0), both.failing_seconds("TimedOut", 405.0)) == (5.0, 305.0)
    later = update_trouble(both, Probe(UNREAD), 410.0)
    assert later is not None
    assert (later.failing_seconds("BadAnswer", 410.0), later.failing_seconds("TokenNotRead", 410.0)) == (10.0, 310.0)
    still = update_trouble(later, Probe(ERROR), 415.0)
    assert still is not None
    assert (still.failing_seconds("BadAnswer", 416.0), still.failing_seconds("TimedOut", 416.0)) == (16.0, 316.0)
    assert update_trouble(still, Probe(FINE), 420.0) is None


def test_endpoint_that_failed_beside_another_is_trouble_but_no_failure_of_the_service() -> None:
    trouble = update_trouble(update_trouble(None, Probe(ERROR), 100.0), BESIDE, 110.0)
    assert trouble is not None
    assert (trouble.failed, trouble.failures, trouble.failing_seconds("BadAnswer", 200.0)) == (FIRST, 2, 0.0)
    failed_at_all = update_trouble(trouble, Probe(ERROR), 120.0)
    assert failed_at_all is not None
    assert (failed_at_all.failed, failed_at_all.failing_seconds("BadAnswer", 121.0)) == (None, 1.0)


def test_pause_grows_with_each_failure() -> None:
    trouble, pauses = None, []
    for now in range(8):
        trouble = update_trouble(trouble, Probe(ERROR), now)
        assert trouble is not None
        pauses.append(trouble.retry_seconds)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LAST_RETRY_SECONDS, LAST_RETRY_SECONDS]


def test_repeated_questions_are_spread() -> None:
    now, uids = 12_345.0, [str(uuid.uuid5(uuid.NAMESPACE_URL, str(number))) for number in range(1000)]
    pauses = [seconds_to_repeat(uid, now) for uid in uids]
    a_tenth = REPEAT_SECONDS / 10
    counts = [sum(a_tenth * part <= pause < a_tenth * (part + 1) for pause in pauses) for part in range(10)]
    assert sum(counts) == 1000
    assert all(70 <= count <= 130 for count in counts), counts
    again = seconds_to_repeat(uids[1], now + pauses[1] + 1.0)
    assert again == pytest.approx(REPEAT_SECONDS - 1.0)
