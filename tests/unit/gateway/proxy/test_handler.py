"""A request whose configuration changes while it runs."""

import aiohttp
from aiohttp import web
from msgspec import structs

from gateway.proxy import upstream_request
from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.config import Backend
from gateway.proxy.handler import SharedResources
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.listeners import ListenAddress, Listener
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import ProxyMetrics
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

    in_flight = ReplacedMeanwhile()
    dead = make_service(Backend(uid="dead", url="http://127.0.0.1:9"))
    tiny = Service(dead, in_flight, ProxyMetrics(lambda: ()))
    async with (
        fake_engine(hello) as fresh,
        upstream_request.open_session() as session,
        aiohttp.ClientSession() as client,
    ):
        shared = SharedResources(in_flight, BodyBudget(), session, HealthMonitor())
        listener = Listener(ListenAddress("127.0.0.1", 0), SingleServiceRouter(tiny), shared)
        await listener.bind()
        try:
            async with post_chat(client, f"http://127.0.0.1:{listener.port}") as response:
                assert (response.status, await response.text()) == (200, "hello")
        finally:
            await listener.unbind()
            await listener.finish()
