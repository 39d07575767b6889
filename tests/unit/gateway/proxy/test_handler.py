"""A request whose configuration changes while it runs."""

import aiohttp
from aiohttp import web
from msgspec import structs

from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.config import Backend
from gateway.proxy.handler import handle_requests
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import ProxyMetrics
from gateway.proxy.request_body import BodyScans
from gateway.proxy.router import SingleServiceRouter
from gateway.proxy.service import Service
from tests.unit.gateway.proxy.running_proxy import fake_engine, make_service, post_chat


async def hello(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def test_request_to_a_dead_engine_is_sent_to_its_replacement() -> None:
    class ReplacedMeanwhile(InFlight):
        def begin(self, uid: str) -> None:
            super().begin(uid)
            tiny.config = structs.replace(dead, backends=(fresh,))

    in_flight = ReplacedMeanwhile(lambda _: None)
    dead = make_service(Backend(uid="dead", url="http://127.0.0.1:9"))
    tiny = Service(dead, in_flight, ProxyMetrics(lambda: ()))
    async with fake_engine(hello) as fresh, UpstreamPool() as pool, aiohttp.ClientSession() as client:
        shared = SharedResources(in_flight, BodyBudget(), BodyScans(), pool, HealthMonitor())
        table = ConnectionTable(ConnectionCaps(total=10, per_peer=10), sweep_seconds=1)
        listener = HttpListener(handle_requests(SingleServiceRouter(tiny), shared), table, ConnectionTimes())
        await listener.bind("127.0.0.1", 0)
        try:
            port = listener.sockets[0].getsockname()[1]
            async with post_chat(client, f"http://127.0.0.1:{port}") as response:
                assert (response.status, await response.text()) == (200, "hello")
        finally:
            listener.unbind()
            await listener.finish()
