"""The preflight webhook of one replica: certificate, port, and the judgement of what API servers ask.

The chart makes the certificate and the path at which API servers ask, and keeps them in a Secret that the pod has as a
volume: all replicas serve what is in it, and what a `helm upgrade` puts there is served without a restart.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from controller.http_endpoints import RETRY_SECONDS, BindAddress
from controller.pod_settings import PodSettings
from controller.preflight.admission_review import ReviewedWrite
from controller.preflight.fit_facts import find_fit_facts
from controller.preflight.preflight_verdict import FitFacts, PreflightAnswer, judge_service
from controller.preflight.webhook_server import CAPS, PATH, build_server
from controller.reconcile.plan import Snapshot
from controller.services.class_speeds import SpeedAssessor
from crds.inferenceservice import InferenceService
from gateway.http.whole_answers import serve_answers
from gateway.proxy.config import Tls
from gateway.proxy.tls import ReloadedCertificate
from kube.store import Store

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
        store: the watch cache.
        settings: options of the controller.
        make_assessor: returns a new source of speeds, which is used once.
        has_unknown_devices: returns whether nobody says of some devices of an accelerator what they are.
        folder: the volume of the Secret.
        is_ready: returns whether the watch cache is complete.
    """

    def __init__(
        self,
        address: BindAddress,
        store: Store,
        settings: PodSettings,
        make_assessor: Callable[[], SpeedAssessor],
        has_unknown_devices: Callable[[str], bool],
        *,
        folder: Path,
        is_ready: Callable[[], bool],
    ) -> None:
        self._address, self._folder, self._store, self._settings = address, folder, store, settings
        self._make_assessor, self._has_unknown_devices, self._is_ready = make_assessor, has_unknown_devices, is_ready
        self._server = build_server(self.knows_path, self.judge)

    def knows_path(self, path: str) -> bool:
        """Return whether a path is the one at which API servers ask."""
        try:
            segment = (self._folder / PATH_FILE).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return False
        return bool(segment) and path == f"{PATH}{segment}"

    async def run(self) -> None:
        """Serve for ever, as soon as there is a certificate and the port is free."""
        address, problem = self._address, ""
        tls = Tls(str(self._folder / CERTIFICATE_FILE), str(self._folder / KEY_FILE))
        while True:
            try:
                certificate = ReloadedCertificate(tls)
                serving = serve_answers(
                    self._server, address.host, address.port, context=certificate.context, caps=CAPS
                )
                async with serving:
                    log.info("preflight_served", address=f"{address.host}:{address.port}")
                    await asyncio.Event().wait()
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

    def _find_fit(self, service: InferenceService) -> FitFacts | None:
        if not self._is_ready():
            return None
        snapshot = Snapshot(self._store, datetime.now(UTC))
        find_speeds = self._make_assessor().assess
        return find_fit_facts(snapshot, service, self._settings, find_speeds, self._has_unknown_devices)
