"""The process of the density API: its watches, its API, and its health and metrics beside it."""

import asyncio
import contextlib
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
from gateway.proxy.config import Tls
from gateway.proxy.tls import ReloadedCertificate
from kube.client import Client

log = structlog.get_logger()

DEFAULT_ADDRESS: Final = ("127.0.0.1", 8090)


class ConsoleOptions(NamedTuple):
    """The options of the density API."""

    address: tuple[str, int] = DEFAULT_ADDRESS
    metrics_address: tuple[str, int] | None = None
    """Address and port of health and metrics; None: none."""
    vendors: Vendors = VENDORS
    prices: DensityPrices = DensityPrices()
    tls: Tls | None = None
    """The certificate of the API; None: plain HTTP."""


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
        tls = ReloadedCertificate(options.tls).context if options.tls is not None else None
        api = build_api(context, AccessReviews(client))
        _, port = await servers.enter_async_context(serve_answers(api, *options.address, context=tls, caps=CAPS))

        # 2. Serve health and metrics, if they have an address of their own.
        if options.metrics_address is not None:
            await servers.enter_async_context(serve_answers(build_health(service), *options.metrics_address))
        log.info("density_api_listening", address=options.address[0], port=port)

        # 3. Work for ever.
        async with asyncio.TaskGroup() as tasks:
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
