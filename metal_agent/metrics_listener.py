"""The listener at which Prometheus reads the metrics of an agent.

They are served on loopback unless the owner gives another address, since names of models are private. A port that is in
use does not stop the agent.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from gateway.http.whole_answers import AnswerServer, AskedQuestion, Route, WholeAnswer, serve_answers

log = structlog.get_logger()


async def serve_metrics(place: tuple[str, int], text: Callable[[], Awaitable[bytes]]) -> None:
    """Answer GET /metrics at `place`, an address and a port, until cancelled; return if it cannot listen there.

    On loopback, web pages in browsers of this machine get none of it.
    """

    async def answer(_: AskedQuestion) -> WholeAnswer:
        """Answer with all metrics."""
        from prometheus_client import CONTENT_TYPE_LATEST  # noqa: PLC0415 - only for who reads them

        return WholeAnswer(200, await text(), CONTENT_TYPE_LATEST.encode())

    try:
        async with serve_answers(AnswerServer({"/metrics": Route(answer)}), *place):
            log.info("metrics_served", address=place[0], port=place[1])
            await asyncio.Event().wait()  # never set: until cancelled
    except OSError as error:
        log.warning("metrics_not_served", error=str(error), hint="give --metrics-address another address and port")
