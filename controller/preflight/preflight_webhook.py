"""The preflight webhook of one replica: certificate, port, and the judgement of what API servers ask."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from controller.http_endpoints import RETRY_SECONDS, BindAddress
from controller.pod_settings import PodSettings
from controller.preflight.admission_review import ReviewedWrite
from controller.preflight.certificate_keeper import CertificateKeeper
from controller.preflight.fit_facts import find_fit_facts
from controller.preflight.preflight_verdict import FitFacts, PreflightAnswer, judge_service
from controller.preflight.webhook_server import PreflightServer, listen
from controller.reconcile.plan import Leading, Snapshot
from controller.services.class_speeds import SpeedAssessor
from crds.inferenceservice import InferenceService
from kube.client import Client
from kube.store import Store

OPTION: Final = "--preflight-bind-address"
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
        is_ready: Callable[[], bool],
    ) -> None:
        self._address, self._store, self._settings = address, store, settings
        self._make_assessor, self._has_unknown_devices, self._is_ready = make_assessor, has_unknown_devices, is_ready
        self._certificates = CertificateKeeper()
        self._server = PreflightServer(self._certificates.knows_path, self.judge)

    async def run(self, client: Client) -> None:
        """Serve for ever, as soon as there is a certificate and the port is free."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._certificates.follow(client))
            tasks.create_task(self._serve())

    async def renew(self, leading: Leading) -> None:
        """Keep the certificate valid and trusted, for ever, while this replica leads."""
        await self._certificates.renew(leading)

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

    async def _serve(self) -> None:
        await self._certificates.loaded.wait()
        address, problem = self._address, ""
        while True:
            try:
                async with listen(self._server, address.host, address.port, self._certificates.context) as port:
                    log.info("preflight_served", address=f"{address.host}:{port}")
                    await asyncio.Event().wait()
            except OSError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning(
                        "port_not_served",
                        option=OPTION,
                        address=f"{address.host}:{address.port}",
                        error=problem,
                        way_out=f"free the port, or set {OPTION} to another address or 0; services are written without "
                        f"preflight until then; it is tried every {RETRY_SECONDS:.0f} s",
                    )
                await asyncio.sleep(RETRY_SECONDS)
