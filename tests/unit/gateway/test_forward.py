"""What a request sees of a configuration that changes while it waits."""

import aiohttp
from aiohttp import web
from msgspec import structs

from gateway.proxy import exchange
from gateway.proxy.balance import InFlight
from gateway.proxy.bodies import Bodies
from gateway.proxy.config import Backend
from gateway.proxy.entrance import OneService
from gateway.proxy.forward import Shared
from gateway.proxy.listeners import Listener, Place
from gateway.proxy.metrics import Metrics
from gateway.proxy.service import Service
from tests.unit.gateway.proxy_process import asks, service, upstream


async def hello(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def test_the_engine_that_replaces_a_dead_one_gets_its_request() -> None:
    class ReplacedMeanwhile(InFlight):
        def begin(self, uid: str) -> None:
            super().begin(uid)
            tiny.config = structs.replace(dead, backends=(fresh,))

    in_flight = ReplacedMeanwhile()
    dead = service(Backend(uid="dead", url="http://127.0.0.1:9"))
    tiny = Service(dead, in_flight, Metrics(lambda: ()))
    async with upstream(hello) as fresh, exchange.upstream_session() as session, aiohttp.ClientSession() as client:
        listener = Listener(Place("127.0.0.1", 0), OneService(tiny), Shared(in_flight, Bodies(), session))
        await listener.bind()
        try:
            async with asks(client, f"http://127.0.0.1:{listener.port}") as response:
                assert (response.status, await response.text()) == (200, "hello")
        finally:
            await listener.unbind()
            await listener.finish()
