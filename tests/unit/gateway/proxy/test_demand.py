"""Requests for an engine that is asleep: they wait in the real proxy, and its agent learns of them."""

import asyncio
import io
import time

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy import demand
from gateway.proxy.config import Backend, Demand, ProxyConfig, ServiceDemand
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    post_chat,
    proxy_in_process,
)

ASLEEP = Backend("a", "http://127.0.0.1:9", asleep=True, engine="mlx-lm", mode="chat", context_length=4096)


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as an engine."""
    del request
    return web.json_response({"model": "x", "choices": []})


async def ask(http: aiohttp.ClientSession, url: str, body: bytes = b'{"model": "tiny"}') -> int:
    """Send a chat completion, and return the status of its answer."""
    async with http.post(f"{url}/v1/chat/completions", data=io.BytesIO(body), headers=AUTHORIZED) as response:
        await response.read()
        return response.status


async def read_demand(proxy: ProxyProcess, seen: int = 0) -> tuple[int, ServiceDemand]:
    """Return the number of changes after `seen`, and the demand of the one service."""
    found = await proxy.client.wait_demand(seen, 10)
    return found.changes, found.services[0]


async def waits_at_proxy(proxy: ProxyProcess, requests: int) -> None:
    """Wait until so many requests wait for the engine."""

    async def is_reached() -> bool:
        return (await read_demand(proxy))[1].waiting == requests

    await eventually(is_reached)


async def test_requests_wait_for_an_engine_that_is_asleep_and_its_agent_is_told_of_the_first(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(answer) as engine:
        url = await proxy.serve(ASLEEP)
        seen, idle = await read_demand(proxy)
        assert (idle.waiting, idle.waiting_seconds, idle.idle_seconds) == (0, 0.0, None)

        waits = asyncio.create_task(proxy.client.wait_demand(seen, 10))
        first = asyncio.create_task(ask(http, url))
        told = await waits
        assert (told.changes, told.services[0].waiting) == (seen + 1, 1)
        second = asyncio.create_task(ask(http, url))
        await waits_at_proxy(proxy, 2)
        assert (await read_demand(proxy))[0] == told.changes  # only the first one is a change

        await proxy.serve(engine)
        assert [await first, await second] == [200, 200]
        _, after = await read_demand(proxy)
        assert (after.waiting, after.in_flight) == (0, 0)
        assert after.idle_seconds is not None


async def test_engine_that_falls_asleep_ends_its_requests_and_lets_new_ones_wait(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as engine:
        url = await proxy.serve(engine)
        async with post_chat(http, url) as running:
            await gated.arrived.wait()
            seen = (await read_demand(proxy))[0]
            await proxy.serve(structs.replace(engine, asleep=True))

            waiting = asyncio.create_task(ask(http, url))
            _, found = await read_demand(proxy, seen)
            assert (found.waiting, found.in_flight) == (1, 1)
            assert not await proxy.client.wait_idle("a", 0)
            gated.end()
            assert (await running.read()).endswith(b"data: [DONE]\n\n")
        assert await proxy.client.wait_idle("a", 5)

        await proxy.serve(engine)  # it is loaded again
        gated.end()
        assert await waiting == 200


async def test_another_engine_that_becomes_idle_is_a_change_while_a_request_waits(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(answer, uid="b") as engine:
        awake, asleep = make_service(engine, name="ns/awake"), make_service(ASLEEP)
        ports = [service.port for service in (await proxy.client.configure(ProxyConfig((asleep, awake)))).services]
        urls = {"awake": f"http://127.0.0.1:{ports[0]}", "asleep": f"http://127.0.0.1:{ports[1]}"}
        seen = (await proxy.client.wait_demand(0, 0)).changes
        assert await ask(http, urls["awake"]) == 200
        assert (await proxy.client.wait_demand(seen, 0)).changes == seen  # nothing waits: not told

        waiting = asyncio.create_task(ask(http, urls["asleep"]))
        seen = (await proxy.client.wait_demand(seen, 10)).changes
        assert await ask(http, urls["awake"]) == 200
        told: Demand = await proxy.client.wait_demand(seen, 10)
        assert told.changes > seen
        waiting.cancel()


async def test_client_that_hangs_up_waits_no_more(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    url = await proxy.serve(ASLEEP)
    waiting = asyncio.create_task(ask(http, url))
    await waits_at_proxy(proxy, 1)
    waiting.cancel()
    await waits_at_proxy(proxy, 0)


async def test_lists_and_health_wake_nothing_and_show_the_model(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    url = await proxy.serve(ASLEEP)
    async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    async with http.get(f"{url}/health") as response:
        assert response.status == 200
    async with http.post(f"{url}/v1/responses/input_tokens", headers=AUTHORIZED, json=CHAT) as response:
        assert (response.status, error_code(await response.json())) == (400, "unsupported_path")
    assert (await read_demand(proxy))[1].waiting == 0


@pytest.mark.parametrize("length", [1, 33 << 20], ids=["many", "large"])
async def test_too_many_and_too_large_waiting_requests_are_refused_with_the_time_of_loading(
    proxy: ProxyProcess, http: aiohttp.ClientSession, length: int
) -> None:
    service = structs.replace(make_service(ASLEEP), queue_limit=1 if length == 1 else 9, load_seconds=300.0)
    port = (await proxy.client.configure(ProxyConfig((service,)))).services[0].port
    url, body = f"http://127.0.0.1:{port}", b'{"model": "tiny", "x": "%b"}' % (b"x" * length)

    waiting = asyncio.create_task(ask(http, url, body))
    await waits_at_proxy(proxy, 1)
    async with http.post(f"{url}/v1/chat/completions", data=io.BytesIO(body), headers=AUTHORIZED) as response:
        assert (response.status, error_code(await response.json())) == (503, "model_loading")
        assert response.headers["Retry-After"] == "120"
    waiting.cancel()
    await waits_at_proxy(proxy, 0)


async def test_reason_for_which_nothing_is_loaded_is_told(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    service = structs.replace(make_service(), problem="tiny needs 9 GiB, and 4 GiB can be freed")
    port = (await proxy.client.configure(ProxyConfig((service,)))).services[0].port
    async with post_chat(http, f"http://127.0.0.1:{port}") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], response.headers["Retry-After"]) == (503, "service_unavailable", "30")
    assert error["message"] == (
        "service ns/tiny has no engine that takes requests now: tiny needs 9 GiB, and 4 GiB can be freed"
    )


@pytest.mark.interpreted
async def test_request_that_waits_for_too_long_is_refused(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "HOLD_SECONDS", 0.0)
    async with proxy_in_process(ASLEEP) as (_, url), post_chat(http, url) as response:
        assert (response.status, error_code(await response.json())) == (503, "model_loading")
        assert response.headers["Retry-After"] == "1"


@pytest.mark.interpreted
async def test_wait_for_a_slot_does_not_count_as_one_for_an_engine(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "HOLD_SECONDS", 1.0)
    gated = GatedEngine()
    async with fake_engine(gated) as found:
        engine = structs.replace(found, concurrency=1)
        async with proxy_in_process(engine) as (listeners, url), post_chat(http, url) as running:
            await gated.arrived.wait()
            waiting, began = asyncio.create_task(ask(http, url)), time.monotonic()
            await eventually(lambda: time.monotonic() > began + 1.5)
            await listeners.configure(ProxyConfig((make_service(structs.replace(engine, asleep=True)),)))
            fell_asleep = time.monotonic()
            gated.end()
            await running.read()
            assert await waiting == 503
            assert time.monotonic() >= fell_asleep + 1


async def test_prompt_is_counted_by_the_engine_that_was_loaded(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    counted = asyncio.Event()

    async def count(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/chat/completions":
            await counted.wait()
        counted.set()
        return await answer(request)

    async with fake_engine(count) as engine:
        shared = structs.replace(engine, engine="llama.cpp", mode="chat", concurrency=2, shared_tokens=4096)
        url = await proxy.serve(structs.replace(shared, url=ASLEEP.url, asleep=True))
        body = b'{"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}'
        waiting = [asyncio.create_task(ask(http, url, body)) for _ in range(3)]
        await waits_at_proxy(proxy, 3)
        await proxy.serve(shared)
        assert await asyncio.gather(*waiting) == [200] * 3


async def test_proxy_that_hands_over_sends_those_that_wait_to_the_next_one(http: aiohttp.ClientSession) -> None:
    async with proxy_in_process(ASLEEP) as (listeners, url):
        waiting = asyncio.create_task(ask(http, url))
        await eventually(lambda: listeners.demand.read().services[0].waiting == 1)
        listeners.release()
        assert await waiting == 503
