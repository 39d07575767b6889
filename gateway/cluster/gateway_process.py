"""The process of the gateway: its watches, its listener, its health and metrics, and its orderly end."""

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from devices import limits
from gateway.cluster.cluster_feed import ClusterFeed
from gateway.cluster.limiter import Limiter
from gateway.cluster.usage import USAGE_PATH, render_usage
from gateway.event_log import log
from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionTimes, connection_caps
from gateway.http.listener import HttpListener
from gateway.http.upstream_pool import UpstreamPool
from gateway.http.whole_answers import AnswerServer, AskedQuestion, PacedRendering, Route, WholeAnswer, serve_answers
from gateway.proxy.config import Tls
from gateway.proxy.control import restore_stop_signals, set_up_process
from gateway.proxy.handler import handle_requests
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.metrics import CONTENT_TYPE, list_series, render_in_turns
from gateway.proxy.request_body import BodyBudget
from gateway.proxy.tls import ReloadedCertificate
from kube.client import Client

WITHDRAW_SECONDS: Final = 5.0
"""Time from the stop signal to the end of listening: until then, load balancers send more requests."""


class GatewayOptions(NamedTuple):
    """The options of the gateway."""

    address: tuple[str, int]
    metrics_address: tuple[str, int] | None = None
    """Address and port of health and metrics; None: none."""
    tls: Tls | None = None
    """The certificate; None: plain HTTP."""
    trust: ssl.SSLContext | None = None
    """Verifies the certificates of hosts; None: the system's authorities do."""
    drain_seconds: float = 600.0
    """Time that running requests have after the stop signal."""
    redis_url: str | None = None
    """Redis or Valkey in which all replicas count limits together; None: each replica has its share of them."""


async def run(client: Client, options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then let the running requests end; a second signal ends at once.

    1. Listen, and follow the cluster; before it was read once, the gateway is not ready, and knows no key.
    2. At the stop signal be not ready, and serve on until load balancers have noticed.
    3. Stop listening, and give running requests `drain_seconds`; break the others off with an error.

    Raises OSError: a port cannot be opened, or the certificate cannot be read.
    """
    stop = set_up_process()
    async with contextlib.AsyncExitStack() as stack:
        # What all requests share, and the services and keys by which they are routed.
        pool = await stack.enter_async_context(UpstreamPool(options.trust))
        limiter, counting = _open_limiter(options.redis_url, stack)
        feed = ClusterFeed(limiter)
        shared = SharedResources(BodyBudget(), asyncio.Lock(), pool, HealthMonitor(), KeepAlive())

        # 1. Listen, and follow the cluster.
        times = ConnectionTimes()
        table = ConnectionTable(connection_caps(limits.descriptor_limit()), times.sweep_seconds)
        context = ReloadedCertificate(options.tls).context if options.tls else None
        listener = HttpListener(handle_requests(feed.keys, shared), table, times, context)
        await listener.bind(*options.address)
        if options.metrics_address:
            server = build_health(feed, stop)
            await stack.enter_async_context(serve_answers(server, *options.metrics_address))
        log.info("gateway_started", address=options.address[0], port=listener.port)
        following = asyncio.ensure_future(_follow(client, feed, counting))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # it is not ready any more, also where the work beside requests has failed

        # 2. Serve on for a moment.
        restore_stop_signals()
        if following.done():
            log.error("gateway_failed", error=repr(following.exception()))
        log.info("gateway_draining", seconds=options.drain_seconds)
        await asyncio.sleep(WITHDRAW_SECONDS)

        # 3. End.
        listener.unbind()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(listener.finish(), options.drain_seconds)
        stopping.cancel()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    log.info("gateway_stopped")


def _open_limiter(
    redis_url: str | None, stack: contextlib.AsyncExitStack
) -> tuple[Limiter, Coroutine[Any, Any, None] | None]:
    """Return the limiter, and the coroutine that has to run beside it, if any; `stack` closes its store."""
    if redis_url is None:
        return Limiter(), None
    from gateway.cluster.redis_limits import RedisLimiter, connect_store  # noqa: PLC0415 - its library is an extra

    store = connect_store(redis_url)
    stack.push_async_callback(store.aclose)
    limiter = RedisLimiter(store)
    return limiter, limiter.run()


async def _follow(client: Client, feed: ClusterFeed, counting: Coroutine[Any, Any, None] | None) -> None:
    """Follow the cluster, and count limits in a store, for ever; log when everything was read."""
    async with asyncio.TaskGroup() as tasks:
        if counting is not None:
            tasks.create_task(counting)
        tasks.create_task(feed.follow(client))
        await feed.wait_until_complete()
        log.info("catalog_complete", services=len(feed.catalog.services), keys=len(feed.keys.keys))


def build_health(feed: ClusterFeed, stop: asyncio.Event) -> AnswerServer:
    """Return the server of health and metrics, which asks for no token.

    Its paths are /metrics, /usage (the total of each key, for the controller), /healthz (200 as long as the process
    answers) and /readyz (200 once the cluster was read, and until the gateway is asked to stop).
    """

    def begin_metrics() -> asyncio.Future[bytes]:
        asked = {str(key): service for key, service in feed.catalog.services.items() if service.metrics.requests}
        pieces = itertools.chain(list_series(asked, "pomona_gateway"), feed.admissions.usage.list_series())
        return asyncio.ensure_future(render_in_turns(pieces))

    async def answer_metrics(_: AskedQuestion) -> WholeAnswer:
        # Who hangs up does not end it for the others who share it.
        return WholeAnswer(200, await asyncio.shield(metrics.read()), CONTENT_TYPE)

    def answer_readyz() -> WholeAnswer:
        if stop.is_set():
            return WholeAnswer(503, b"the gateway is stopping\n")
        if not feed.is_complete:
            return WholeAnswer(503, b"the cluster is still being read\n")
        return WholeAnswer(200, b"ok\n")

    def render_totals() -> bytes:
        return render_usage((key.watched.metadata.uid, key.total) for key in feed.keys.keys.values())

    metrics, usage = PacedRendering(begin_metrics), PacedRendering(render_totals)
    return AnswerServer(
        {
            "/metrics": Route(answer_metrics),
            USAGE_PATH: Route(lambda _: WholeAnswer(200, usage.read(), b"application/json")),
            "/healthz": Route(lambda _: WholeAnswer(200, b"ok\n")),
            "/readyz": Route(lambda _: answer_readyz()),
        }
    )
