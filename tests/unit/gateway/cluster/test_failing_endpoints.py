"""Endpoints of a service that come and go, fail, or have too much work, and where their requests go."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from gateway.cluster.retry_budget import FREE_RETRIES, RETRIES_PER_REQUEST
from kube.resources import INFERENCE_SERVICES, ObjectKey
from tests.unit.gateway.cluster.running_gateway import NamedEngine, RunningGateway, answer_of, ask
from tests.unit.gateway.proxy.running_proxy import fake_engine, raw_engine


async def read_status(asked: aiohttp.client._RequestContextManager) -> int:
    async with asked as response:
        return response.status


async def test_endpoints_follow_the_slices(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as one, fake_engine(NamedEngine("two")) as two:
        cluster = gateway.cluster
        cluster.put_key()
        cluster.serve("team-a", "chat", one.url)
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "one"
        cluster.put_slice("team-a", "chat", "chat.host0", two.url)
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "two"
        cluster.put_slice("team-a", "chat", "chat.host0", two.url, ready=False)
        async with ask(http, gateway) as response:
            assert response.status == 503
        cluster.remove(INFERENCE_SERVICES, "team-a", "chat")
        async with ask(http, gateway) as response:
            assert response.status == 404


async def test_endpoint_that_knows_only_the_token_before_gets_that(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    engine = NamedEngine("one", accepts="old")
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.set_token("team-a", "chat", "new", previous="old")
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "one"
        assert engine.tokens == ["Bearer new", "Bearer old"]
        engine.accepts = "neither"
        async with ask(http, gateway) as response:
            assert response.status == 502


async def test_refused_connection_and_broken_off_request_go_to_another_endpoint(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    """Before its first byte, that is, and whether or not it is a stream."""

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.close()

    async with raw_engine(break_off) as broken, fake_engine(NamedEngine("one")) as sound:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", "http://127.0.0.1:1", broken.url, sound.url)
        for _ in range(4):
            async with ask(http, gateway) as response:
                assert await answer_of(response) == "one"


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_busy_endpoint_is_passed_over(gateway: RunningGateway, http: aiohttp.ClientSession, status: int) -> None:
    asked = 0

    async def refuse(_request: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response({"error": {"message": "busy"}}, status=status, headers={"Retry-After": "7"})

    async with fake_engine(refuse) as busy, fake_engine(refuse) as as_busy, fake_engine(NamedEngine("one")) as sound:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", busy.url, sound.url)
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "one"
        gateway.cluster.serve("team-a", "full", busy.url, as_busy.url)
        asked = 0
        async with ask(http, gateway, "full") as response:
            assert response.status == status
            assert asked == 2
            if status != 502:
                assert response.headers["Retry-After"] == "7"


@pytest.mark.parametrize("is_gone", [True, False])
async def test_requests_of_an_endpoint_that_is_gone_need_no_budget(
    gateway: RunningGateway, http: aiohttp.ClientSession, *, is_gone: bool
) -> None:
    waiting = asyncio.Semaphore(0)
    broken_off = asyncio.Event()

    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        waiting.release()
        await broken_off.wait()
        assert request.transport
        request.transport.abort()
        return web.Response()

    async with fake_engine(break_off) as gone, fake_engine(NamedEngine("one")) as sound:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", gone.url)
        asked = [asyncio.ensure_future(read_status(ask(http, gateway))) for _ in range(40)]
        for _ in asked:
            await waiting.acquire()
        gateway.cluster.serve("team-a", "chat", gone.url, sound.url)
        service = gateway.cluster.feed.catalog.services[ObjectKey("team-a", "chat")]
        await asyncio.sleep(0)  # the slice is read at the end of the loop's pass
        if is_gone:
            (backend,) = (backend for backend in service.config.backends if backend.url == gone.url)
            service.note_unreachable(backend)
        broken_off.set()
        statuses = await asyncio.gather(*asked)
    assert set(statuses) <= {200, 502}
    assert statuses.count(200) == 40 if is_gone else statuses.count(200) <= FREE_RETRIES + 40 * RETRIES_PER_REQUEST


async def test_engine_error_is_not_tried_elsewhere(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    asked = 0

    async def fail(_request: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response({"error": {"message": "out of cheese"}}, status=500)

    async with fake_engine(fail) as one, fake_engine(fail) as two:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", one.url, two.url)
        async with ask(http, gateway) as response:
            assert response.status == 500
    assert asked == 1


async def test_retries_keep_to_the_budget_while_all_endpoints_are_ejected(gateway: RunningGateway) -> None:
    gateway.cluster.serve("team-a", "chat", "http://10.255.0.1:1", "http://10.255.0.2:1")
    await asyncio.sleep(0)  # the slices are read at the end of the loop's pass
    service = gateway.cluster.feed.catalog.services[ObjectKey("team-a", "chat")]
    one, other = service.config.backends
    service.note_unreachable(one)
    assert sum(service.may_try_elsewhere(one) for _ in range(100)) == 100
    service.note_unreachable(other)
    assert sum(service.may_try_elsewhere(one) for _ in range(100)) == FREE_RETRIES
