"""The preflight webhook of one replica: certificate, port, and the judgement of what API servers ask.

The chart makes the certificate and the path at which API servers ask, and keeps them in a Secret that the pod has as a
volume: all replicas serve what is in it, and what a `helm upgrade` puts there is served without a restart.

A request is answered within the pass of the event loop in which its body is complete. One at another path costs no more
than its head, so a stranger who reaches the port learns nothing and delays nothing.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from controller.http_endpoints import RETRY_SECONDS, BindAddress
from controller.preflight.admission_review import InvalidReviewError, ReviewedWrite, encode_answer, parse_review
from controller.preflight.preflight_verdict import FitFacts, PreflightAnswer, judge_service
from crds.inferenceservice import InferenceService
from gateway.http.limits import ConnectionCaps
from gateway.http.whole_answers import (
    JSON,
    AnswerServer,
    AskedQuestion,
    BodyLimits,
    Route,
    WholeAnswer,
    explain,
    serve_answers,
)
from gateway.proxy.config import Tls
from gateway.proxy.tls import ReloadedCertificate

PATH: Final = "/preflight/"
MOST_BODY_BYTES: Final = 8 << 20
"""A review has an object twice, and the API server takes none of more than 3 MiB."""
MOST_HELD_BYTES: Final = 16 << 20
"""All bodies that are being received: two of the largest, and thousands of usual ones."""
CAPS: Final = ConnectionCaps(total=128, per_peer=64, buffered_bytes=16 << 10)
"""API servers need some; each of a stranger's takes memory of the controller, and gives way to that of another."""
OPTION: Final = "--preflight-bind-address"
CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
PATH_FILE: Final = "path"
"""File with the last segment of the path, by which API servers are told from others that reach the port."""
NOT_UNDERSTOOD: Final = "preflight does not understand this service: controller and kinds are of different versions"

log = structlog.get_logger()


class PreflightWebhook:
    """The webhook, which every replica serves; what it cannot do stops nothing else.

    Args:
        address: the address to listen on.
        folder: the volume of the Secret.
        find_fit: returns the facts about a service; None: the controller has not read the cluster yet.
    """

    def __init__(
        self, address: BindAddress, folder: Path, find_fit: Callable[[InferenceService], FitFacts | None]
    ) -> None:
        self._address, self._folder, self._find_fit = address, folder, find_fit
        self._server = build_server(self.knows_path, self.judge)

    def knows_path(self, path: str) -> bool:
        """Return whether a path is the one at which API servers ask; False while its file is missing.

        Its last segment is in a file, which is read each time because it may be replaced.
        """
        try:
            segment = (self._folder / PATH_FILE).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return False
        return bool(segment) and path == f"{PATH}{segment}"

    async def run(self) -> None:
        """Serve for ever, as soon as there is a certificate and the port is free."""
        address, problem = self._address, ""  # problem: the last one that was logged
        tls = Tls(str(self._folder / CERTIFICATE_FILE), str(self._folder / KEY_FILE))
        while True:
            try:
                # Raises OSError without a certificate.
                certificate = ReloadedCertificate(tls)
                serving = serve_answers(
                    self._server, address.host, address.port, context=certificate.context, caps=CAPS
                )
                async with serving:
                    log.info("preflight_served", address=f"{address.host}:{address.port}")
                    await asyncio.Event().wait()  # for ever
            except OSError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning(
                        "preflight_not_served",
                        address=f"{address.host}:{address.port}",
                        certificate=tls.certificate,
                        error=problem,
                        way_out=f"free the port if it is taken, or set {OPTION} to another address or 0; if there is "
                        "no certificate, `helm upgrade` with preflight.enabled=true makes Secret pomona-preflight "
                        f"again; services are written without preflight until then, and it is tried every "
                        f"{RETRY_SECONDS:.0f} s",
                    )
                await asyncio.sleep(RETRY_SECONDS)

    def judge(self, write: ReviewedWrite) -> PreflightAnswer:
        """Return the answer to a write."""
        if write.service is None or (write.is_update and write.before is None):
            return PreflightAnswer(warning=NOT_UNDERSTOOD)
        return judge_service(write.service, write.before if write.is_update else None, self._find_fit)


def build_server(knows_path: Callable[[str], bool], judge: Callable[[ReviewedWrite], PreflightAnswer]) -> AnswerServer:
    """Return the server of the webhook: it calls `check` on the head of a request, and `answer` on its body.

    Args:
        knows_path: returns whether a path is that of the webhook.
        judge: returns the answer to a write.
    """

    def check(question: AskedQuestion) -> WholeAnswer | None:
        """Refuse a path that `knows_path` does not know, before the body is read. None: go on with the request.

        The connection is kept for further reviews.
        """
        if not knows_path(question.path):
            return explain(404, "not found")
        question.keep_connection()
        return None

    def answer(question: AskedQuestion) -> WholeAnswer:
        """Answer a review by `judge`; 400 if it is none, and 500 if that fails: then the service is written anyway."""
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
