"""The process of the density API: its watches, its API, and its health and metrics beside it."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from console.access_reviews import AccessReviews
from console.api_routes import DensityContext
from console.api_server import CAPS, build_api
from console.density_metrics import CONTENT_TYPE, build_process_registry, render_metrics
from console.density_prices import DensityPrices
from console.density_service import DensityService
from controller.placement.cluster_view import ClusterView
from devices.vendors import VENDORS, Vendors
from gateway.http.whole_answers import AnswerServer, AskedQuestion, Route, WholeAnswer, serve_answers
from kube.client import Client

log = structlog.get_logger()

DEFAULT_ADDRESS: Final = ("127.0.0.1", 8090)
CERTIFICATE_SECONDS: Final = 60.0
"""Pause between two readings of the certificate, which may be renewed."""


class TlsFiles(NamedTuple):
    """The certificate of the API, in PEM form."""

    certificate: Path
    key: Path


class ConsoleOptions(NamedTuple):
    """The options of the density API."""

    address: tuple[str, int] = DEFAULT_ADDRESS
    metrics_address: tuple[str, int] | None = None
    """Address and port of health and metrics; None: none."""
    vendors: Vendors = VENDORS
    prices: DensityPrices = DensityPrices()
    tls: TlsFiles | None = None


async def run(client: Client, options: ConsoleOptions) -> None:
    """Serve the density API, and its health and metrics, until cancelled.

    Requests are answered with 503 until the cluster was read once.

    Raises:
        OSError: a port cannot be opened, or the certificate cannot be read.
    """
    # The view follows the cluster; the service computes answers by it.
    view = ClusterView(options.vendors)
    service = DensityService(view)
    context = DensityContext(service, options.prices)
    async with contextlib.AsyncExitStack() as servers:  # at its end, the servers stop
        # 1. Serve the API, with TLS if there is a certificate.
        tls = None
        if options.tls is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(options.tls.certificate, options.tls.key)
        api = build_api(context, AccessReviews(client))
        _, port = await servers.enter_async_context(serve_answers(api, *options.address, context=tls, caps=CAPS))

        # 2. Serve health and metrics, if they have an address of their own.
        if options.metrics_address is not None:
            await servers.enter_async_context(serve_answers(build_health(service), *options.metrics_address))
        log.info("density_api_listening", address=options.address[0], port=port)

        # 3. Work for ever.
        async with asyncio.TaskGroup() as tasks:
            if tls is not None and options.tls is not None:
                tasks.create_task(_renew_certificate(tls, options.tls))
            tasks.create_task(service.prepare())
            await view.follow(client)  # for ever: it keeps the view equal to the cluster


def build_health(service: DensityService) -> AnswerServer:
    """Return the server of health and metrics, which asks for no token.

    Its paths are /metrics, /healthz (200 as long as the process answers) and /readyz (200 once the cluster was read).
    """
    process = build_process_registry()  # the metrics of this process

    async def answer_metrics(_: AskedQuestion) -> WholeAnswer:
        """Answer with the metrics of this process and of all nodes, which are computed in a thread."""
        body = await service.compute(lambda snapshot, table: render_metrics(process, snapshot, table))
        return WholeAnswer(200, body, CONTENT_TYPE.encode())

    def answer_readyz(_: AskedQuestion) -> WholeAnswer:
        """Answer 200 once the cluster was read, 503 before that."""
        if not service.view.is_complete:
            return WholeAnswer(503, b"the cluster is still being read\n")
        return WholeAnswer(200, b"ok\n")

    return AnswerServer(
        {
            "/metrics": Route(answer_metrics),
            "/healthz": Route(lambda _: WholeAnswer(200, b"ok\n")),
            "/readyz": Route(answer_readyz),
        }
    )


async def _renew_certificate(tls: ssl.SSLContext, files: TlsFiles) -> None:
    """Read the certificate again for ever: connections that follow have the new one."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            tls.load_cert_chain(files.certificate, files.key)
        except OSError as error:
            log.warning("certificate_not_read", certificate=str(files.certificate), error=str(error))
