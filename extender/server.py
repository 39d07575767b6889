"""The HTTP server of the extender: the verbs of the scheduler, its health and its metrics.

Requests are answered within the pass of the event loop in which their body is complete: the scheduler waits for each,
and an answer reads what is in memory only.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from devices.limits import descriptor_limit
from extender.answers import Answers
from extender.extender_metrics import CONTENT_TYPE, ExtenderMetrics, Verb
from gateway.http.limits import ConnectionTimes, connection_caps
from gateway.http.whole_answers import (
    CAPS,
    JSON,
    TEXT,
    AnswerServer,
    AskedQuestion,
    PacedRendering,
    Route,
    WholeAnswer,
    is_loopback,
    serve_answers,
)
from gateway.http.whole_body import BodyLimits

LOCAL_BODIES: Final = BodyLimits(96 << 20, 192 << 20)
"""5,000 whole Nodes of 12.5 KB are 60 MiB; names alone are 150 KB."""
FOREIGN_BODIES: Final = BodyLimits(8 << 20, 12 << 20)
"""On an address that strangers reach."""
VERBS: Final[dict[str, Verb]] = {"/filter": "filter", "/prioritize": "prioritize", "/score": "prioritize"}
"""`/score` is the path of FlexInfer's scheduler."""
_TIMES: Final = ConnectionTimes(idle_seconds=3600.0, request_seconds=60.0)
"""A scheduler keeps its connections for 90 seconds without a request; to close one earlier could fail a request."""
_OK, _UNAVAILABLE = 200, 503


class ExtenderServer:
    """The routes of the extender.

    Args:
        answers: the answers of the verbs.
        metrics: the metrics of this process.
        is_ready: True once all lists are in.
    """

    def __init__(self, answers: Answers, metrics: ExtenderMetrics, is_ready: Callable[[], bool]) -> None:
        self.answers = answers
        self._rendering = PacedRendering(metrics.render)
        self._is_ready = is_ready

    def build_reads(self) -> AnswerServer:
        """Return the server of health and metrics, and nothing else."""
        return AnswerServer(self._list_reads())

    def build(self, bodies: BodyLimits) -> AnswerServer:
        """Return the server of the scheduler's port."""
        verbs = {path: Route(self._make_answer(verb), "POST", bodies) for path, verb in VERBS.items()}
        return AnswerServer({**self._list_reads(), **verbs})

    def _list_reads(self) -> dict[str, Route]:
        return {
            "/healthz": Route(lambda _: WholeAnswer(_OK, b"ok\n")),
            "/readyz": Route(self._answer_readyz),
            "/metrics": Route(lambda _: WholeAnswer(_OK, self._rendering.read(), CONTENT_TYPE)),
        }

    def _answer_readyz(self, _: AskedQuestion) -> WholeAnswer:
        if not self._is_ready():
            return WholeAnswer(_UNAVAILABLE, b"the lists of nodes and models are not complete yet\n")
        return WholeAnswer(_OK, b"ok\n")

    def _make_answer(self, verb: Verb) -> Callable[[AskedQuestion], WholeAnswer]:
        def answer(question: AskedQuestion) -> WholeAnswer:
            status, body = self.answers.answer(verb, question.body)
            return WholeAnswer(status, body, JSON if status == _OK else TEXT)

        return answer


def listen_to_scheduler(
    server: ExtenderServer, address: str, port: int
) -> AbstractAsyncContextManager[tuple[str, int]]:
    """Serve the port of the scheduler while the block runs; returns the address. Raises OSError.

    Args:
        server: the routes.
        address: an address of this machine; empty: all of them.
        port: the port; 0: a free one.
    """
    if is_loopback(address):
        caps = connection_caps(descriptor_limit())
        return serve_answers(server.build(LOCAL_BODIES), address, port, caps=caps, times=_TIMES)
    return serve_answers(server.build(FOREIGN_BODIES), address, port, caps=CAPS, times=_TIMES)
