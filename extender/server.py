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
    AnswerServer,
    AskedQuestion,
    BodyLimits,
    PacedRendering,
    Route,
    WholeAnswer,
    is_loopback,
    serve_answers,
)

LOCAL_BODIES: Final = BodyLimits(96 << 20, 192 << 20)
"""5,000 whole Nodes of 12.5 KB are 60 MiB; names alone are 150 KB."""
FOREIGN_BODIES: Final = BodyLimits(8 << 20, 12 << 20)
"""On an address that strangers reach."""
VERBS: Final[dict[str, Verb]] = {"/filter": "filter", "/prioritize": "prioritize", "/score": "prioritize"}
"""`/score` is the path of FlexInfer's scheduler."""
_TIMES: Final = ConnectionTimes(idle_seconds=3600.0, request_seconds=60.0)
"""A scheduler keeps its connections for 90 seconds without a request; to close one earlier could fail a request."""


def list_probe_routes(metrics: ExtenderMetrics, is_ready: Callable[[], bool]) -> dict[str, Route]:
    """Return the routes of the kubelet's probes and of the metrics, by path.

    Args:
        metrics: the metrics of this process.
        is_ready: returns True once all lists are in.
    """
    rendering = PacedRendering(metrics.render)  # at most once a second if it is asked often

    def answer_readyz(_: AskedQuestion) -> WholeAnswer:
        """Answer 200 once all lists are in, 503 before that."""
        if not is_ready():
            return WholeAnswer(503, b"the lists of nodes and models are not complete yet\n")
        return WholeAnswer(200, b"ok\n")

    return {
        "/healthz": Route(lambda _: WholeAnswer(200, b"ok\n")),
        "/readyz": Route(answer_readyz),
        "/metrics": Route(lambda _: WholeAnswer(200, rendering.read(), CONTENT_TYPE)),
    }


def list_verb_routes(answers: Answers, bodies: BodyLimits) -> dict[str, Route]:
    """Return the routes of the scheduler's verbs, filter and prioritize, by path; `bodies` limits what they send."""

    # A function of its own, so that each route keeps its own verb.
    def build_route(verb: Verb) -> Route:
        """Return a route whose requests are answered as this verb."""
        return Route(lambda question: answers.answer(verb, question.body), "POST", bodies)

    return {path: build_route(verb) for path, verb in VERBS.items()}


def listen_to_scheduler(
    answers: Answers, probe_routes: dict[str, Route], address: str, port: int
) -> AbstractAsyncContextManager[tuple[str, int]]:
    """Serve the port of the scheduler while the block runs; returns the address. Raises OSError.

    Args:
        answers: answers the scheduler's verbs, filter and prioritize.
        probe_routes: the routes of health and metrics.
        address: an address of this machine; empty: all of them.
        port: the port; 0: a free one.
    """
    # On loopback only programs of the same pod or machine call: larger bodies and more connections are allowed.
    is_local = is_loopback(address)
    server = AnswerServer(probe_routes | list_verb_routes(answers, LOCAL_BODIES if is_local else FOREIGN_BODIES))
    caps = connection_caps(descriptor_limit()) if is_local else CAPS
    # `_TIMES` keeps idle connections longer than a scheduler does.
    return serve_answers(server, address, port, caps=caps, times=_TIMES)
