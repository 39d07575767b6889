"""The HTTPS server of preflight: one path, which only API servers know, and answers from memory.

A request is answered within the pass of the event loop in which its body is complete. One at another path costs no more
than its head, so a stranger who reaches the port learns nothing and delays nothing.
"""

from collections.abc import Callable
from typing import Final

import structlog

from controller.preflight.admission_review import InvalidReviewError, ReviewedWrite, encode_answer, parse_review
from controller.preflight.preflight_verdict import PreflightAnswer
from gateway.http.limits import ConnectionCaps
from gateway.http.whole_answers import JSON, AnswerServer, AskedQuestion, Route, WholeAnswer, explain
from gateway.http.whole_body import BodyLimits

PATH: Final = "/preflight/"
MOST_BODY_BYTES: Final = 8 << 20
"""A review has an object twice, and the API server takes none of more than 3 MiB."""
MOST_HELD_BYTES: Final = 16 << 20
"""All bodies that are being received: two of the largest, and thousands of usual ones."""
CAPS: Final = ConnectionCaps(total=128, per_peer=64, buffered_bytes=16 << 10)
"""API servers need some; each of a stranger's takes memory of the controller, and gives way to that of another."""

log = structlog.get_logger()


def build_server(knows_path: Callable[[str], bool], judge: Callable[[ReviewedWrite], PreflightAnswer]) -> AnswerServer:
    """Return the routes of the webhook.

    Args:
        knows_path: returns whether a path is that of the webhook.
        judge: returns the answer to a write.
    """

    def check(question: AskedQuestion) -> WholeAnswer | None:
        if not knows_path(question.path):
            return explain(404, "not found")
        question.keep_place()
        return None

    def answer(question: AskedQuestion) -> WholeAnswer:
        try:
            write = parse_review(question.body)
        except InvalidReviewError as error:
            return explain(400, str(error))
        try:
            verdict = judge(write)
        except Exception:  # the boundary of the request: the service is written without preflight
            log.exception("preflight_failed")
            return explain(500, "preflight failed: see the log of the controller")
        return WholeAnswer(200, encode_answer(write.uid, verdict), JSON)

    return AnswerServer({PATH: Route(answer, "POST", BodyLimits(MOST_BODY_BYTES, MOST_HELD_BYTES))}, check=check)
