"""The queue of a service through the real process: its order, its limit, and clients that leave it."""

import asyncio
import json
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.config import Backend, ProxyConfig
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.request_queue import RequestQueue
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    post_chat,
)


def retry_seconds(*durations: float, in_flight: int) -> int:
    """Return what a refused client is told after requests that took so long, while others are in flight."""
    slots = [Backend("a", "http://127.0.0.1:1")] * (len(durations) + in_flight)
    queue = RequestQueue(lambda _: slots.pop() if slots else None, limit=0)
    while queue.take_free_slot(cast("InferenceRequest", None)):
        pass
    for seconds in durations:
        queue.finish_request(seconds)
    assert queue.is_full
    return queue.estimate_retry_seconds()


@pytest.mark.parametrize(
    ("durations", "in_flight", "seconds"),
    [
        ((), 1, 1),  # nothing has ended yet
        ((10.0,), 1, 10),
        ((10.0, 20.0), 1, 12),  # the newest counts a fifth
        ((10.0, 20.0), 4, 3),
        ((10.0, 20.0), 0, 12),  # all ended at this moment
        ((1000.0,), 1, 60),
    ],
)
@pytest.mark.interpreted
def test_refused_client_is_told_when_a_slot_is_likely_to_be_free(
    durations: tuple[float, ...], in_flight: int, seconds: int
) -> None:
    assert retry_seconds(*durations, in_flight=in_flight) == seconds


class SlowEngine:
    """An engine that answers one request for each `release`, and records the order of the requests."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._released = asyncio.Semaphore(0)

    def release(self) -> None:
        self._released.release()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.order.append(json.loads(await request.read())["model"])
        await self._released.acquire()
        return web.json_response({"choices": []})


async def post_completion(http: aiohttp.ClientSession, url: str, name: str) -> int:
    async with http.post(f"{url}/v1/completions", json={"model": name}, headers=AUTHORIZED) as response:
        await response.read()
        return response.status


async def until_queued(proxy: ProxyProcess, queued: int) -> None:
    async def reached() -> bool:
        now = await proxy.stats()
        # Without this wait another request could overtake one that has not arrived yet.
        return (now.in_flight, now.queued) == (1, queued)

    await eventually(reached)


async def queue_up(proxy: ProxyProcess, http: aiohttp.ClientSession, url: str, names: str) -> list[asyncio.Task[int]]:
    """Send one request after the other: the first is forwarded, the others wait in the queue."""
    tasks = []
    for queued, name in enumerate(names):
        tasks.append(asyncio.create_task(post_completion(http, url, name)))
        await until_queued(proxy, queued)
    return tasks


async def serve_with_limit(proxy: ProxyProcess, *backends: Backend, queue: int) -> str:
    config = ProxyConfig((structs.replace(make_service(*backends), queue_limit=queue),))
    return f"http://127.0.0.1:{(await proxy.client.configure(config)).services[0].port}"


async def test_queue_is_first_come_first_served_and_refuses_with_retry_after_when_full(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = SlowEngine()
    async with fake_engine(engine) as backend:
        url = await serve_with_limit(proxy, structs.replace(backend, concurrency=1), queue=2)
        tasks = await queue_up(proxy, http, url, "abc")
        async with post_chat(http, url) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            answer = await response.json()
            assert error_code(answer) == "queue_full"
            retry = f"try again in {response.headers['Retry-After']} s"
            full = f"service ns/tiny: all slots are busy and the queue is full: {retry}"
            assert answer["error"]["message"] == full
        for _ in tasks:
            engine.release()
        assert [await task for task in tasks] == [200, 200, 200]
    assert engine.order == ["a", "b", "c"]


async def test_client_that_hangs_up_leaves_the_queue_without_reaching_the_engine(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = SlowEngine()
    async with fake_engine(engine) as backend:
        url = await serve_with_limit(proxy, structs.replace(backend, concurrency=1), queue=2)
        first, second, third = await queue_up(proxy, http, url, "abc")
        second.cancel()
        await until_queued(proxy, 1)
        for _ in range(2):
            engine.release()
        assert [await first, await third] == [200, 200]
    assert engine.order == ["a", "c"]


async def test_new_backend_gets_the_waiting_requests_while_another_is_full_or_draining(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    full, free = SlowEngine(), SlowEngine()
    async with fake_engine(full, "full") as a, fake_engine(free, "free") as b:
        one, two = structs.replace(a, concurrency=1), structs.replace(b, concurrency=2)
        url = await serve_with_limit(proxy, one, queue=8)
        held = await queue_up(proxy, http, url, "ab")
        await serve_with_limit(proxy, structs.replace(one, draining=True), two, queue=8)
        free.release()
        assert await held[1] == 200, "the waiting request goes to the new backend"
        more = [asyncio.create_task(post_completion(http, url, name)) for name in "cd"]
        await eventually(lambda: len(free.order) == 3)
        for _ in range(2):
            free.release()
        assert [await task for task in more] == [200, 200]
        full.release()
        assert await held[0] == 200


async def test_waiting_requests_are_refused_when_no_backend_is_left(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = SlowEngine()
    async with fake_engine(engine) as backend:
        url = await serve_with_limit(proxy, structs.replace(backend, concurrency=1), queue=2)
        first, second = await queue_up(proxy, http, url, "ab")
        await serve_with_limit(proxy, structs.replace(backend, concurrency=1, draining=True), queue=2)
        assert await second == 503
        engine.release()
        assert await first == 200
