"""Adapters of a service that requests choose: their names, what engines get, and backends that lack them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from cli import pod_proxy
from gateway.proxy.config import Backend, BackendAdapter, ProxyConfig, RouterListener
from gateway.proxy.pod import PodProxyOptions
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    proxy_in_process,
)

ADAPTERS = (BackendAdapter(0.5), BackendAdapter(1, "tone"), BackendAdapter(2, "voice"))
SCALES = {"tiny": [0.5, 0, 0], "tiny:tone": [0.5, 1, 0], "ns/tiny:voice": [0.5, 0, 2], "any:tone": [0.5, 0, 0]}


class Engine:
    """An engine that keeps the bodies of its requests, and answers while `open` is set."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.bodies.append(await request.json())
        await self.open.wait()
        return web.json_response({"model": "of-the-engine", "choices": []})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def backend(engine: Engine) -> AsyncIterator[Backend]:
    async with fake_engine(engine) as backend:
        yield structs.replace(backend, adapters=ADAPTERS, engine="llama.cpp", mode="chat")


async def ask(http: aiohttp.ClientSession, url: str, path: str = "chat/completions", **body: Any) -> tuple[int, Any]:
    async with http.post(f"{url}/v1/{path}", json=CHAT | body, headers=AUTHORIZED) as response:
        return response.status, await response.json()


async def list_models(http: aiohttp.ClientSession, url: str) -> list[tuple[str, str | None]]:
    async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
        return [(model["id"], model.get("parent")) for model in (await response.json())["data"]]


def test_pod_states_adapters_in_the_order_of_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[PodProxyOptions] = []
    monkeypatch.setattr(pod_proxy, "run_pod_proxy", lambda options, _preparation: stated.append(options))
    monkeypatch.setattr("uvloop.run", lambda _: None)
    arguments = ["--service=ns/tiny", "--token-file=t", "--engine-port=1", "--health-path=/health"]
    adapters = [f"--adapter={adapter.name}:{adapter.scale}" for adapter in ADAPTERS]
    pod_proxy.command.main([*arguments, *adapters], standalone_mode=False)
    assert stated[0].adapters == ADAPTERS


@pytest.mark.parametrize("padding", ["", "x" * (300 << 10)], ids=["short", "scanned"])
async def test_engine_gets_the_scales_of_all_adapters_with_each_request(
    engine: Engine, backend: Backend, http: aiohttp.ClientSession, padding: str
) -> None:
    async with proxy_in_process(backend) as (_, url):
        for model, scales in SCALES.items():
            status, answer = await ask(http, url, model=model, lora=[{"id": 2, "scale": 9}], padding=padding)
            assert (status, answer["model"]) == (200, model.removeprefix("ns/").replace("any:tone", "tiny"))
            assert engine.bodies[-1]["lora"] == [{"id": number, "scale": scale} for number, scale in enumerate(scales)]
            assert engine.bodies[-1]["cache_prompt"] is True
        await ask(http, url, model="tiny:tone", cache_prompt=False, padding=padding)
        assert engine.bodies[-1]["cache_prompt"] is False


async def test_engine_whose_adapters_are_all_applied_gets_no_list(engine: Engine, http: aiohttp.ClientSession) -> None:
    async with fake_engine(engine) as backend, proxy_in_process(backend) as (_, url):
        assert (await ask(http, url))[0] == 200
        status, answer = await ask(http, url, model="tiny:tone")
        assert (status, error_code(answer)) == (404, "model_not_found")
        assert answer["error"]["message"].endswith("requests choose no such adapter: set `model` to tiny")
    assert [sorted(body) for body in engine.bodies] == [["messages", "model"]]


async def test_unknown_adapter_is_refused_with_those_that_exist(
    engine: Engine, backend: Backend, http: aiohttp.ClientSession
) -> None:
    async with proxy_in_process(backend) as (_, url):
        for model in ("tiny:weak", "tiny:", "tiny:tone:tone", "other/tiny:weak"):
            status, answer = await ask(http, url, model=model)
            assert (status, error_code(answer)) == (404, "model_not_found")
            service = model.partition(":")[0]
            assert answer["error"]["message"].endswith(f"to {service} or {service}:tone or {service}:voice")
    assert engine.bodies == []


@pytest.mark.parametrize("path", ["messages", "embeddings", "responses"])
async def test_adapter_is_refused_on_paths_where_the_engine_chooses_none(
    backend: Backend, http: aiohttp.ClientSession, path: str
) -> None:
    async with proxy_in_process(backend) as (_, url):
        status, answer = await ask(http, url, path, model="tiny:tone")
        assert status == (200 if path == "responses" else 400)
        assert path == "responses" or f"/v1/{path} does not take the adapter" in answer["error"]["message"]
        assert (await ask(http, url, path))[0] == 200


async def test_models_are_listed_with_their_adapters(backend: Backend, http: aiohttp.ClientSession) -> None:
    async with proxy_in_process(backend) as (_, url):
        assert await list_models(http, url) == [("tiny", None), ("tiny:tone", "tiny"), ("tiny:voice", "tiny")]
    async with proxy_in_process(structs.replace(backend, draining=True)) as (_, url):
        assert await list_models(http, url) == []
        assert (await ask(http, url, model="tiny:tone"))[0] == 503
    async with proxy_in_process() as (_, url):  # nothing says yet which adapters there are
        assert (await ask(http, url, model="tiny:tone"))[0] == 503


async def test_router_finds_and_lists_the_adapters_of_each_service(
    engine: Engine, backend: Backend, http: aiohttp.ClientSession, proxy: ProxyProcess
) -> None:
    services = tuple(
        make_service(structs.replace(backend, uid=name), name=name) for name in ("ns/tiny", "x/twice", "y/twice")
    )
    state = await proxy.client.configure(ProxyConfig(services, RouterListener("127.0.0.1", 0)))
    assert state.router
    url = f"http://127.0.0.1:{state.router.port}"
    names = ("tiny", "x/twice", "y/twice")
    assert [name for name, _ in await list_models(http, url)] == sorted(
        f"{name}{adapter}" for name in names for adapter in ("", ":tone", ":voice")
    )
    for model in ("tiny:tone", "ns/tiny:tone", "x/twice:tone"):
        assert (await ask(http, url, model=model))[0] == 200
        assert [adapter["scale"] for adapter in engine.bodies[-1]["lora"]] == [0.5, 1, 0]
    for model in ("twice:tone", "other:tone", "tiny:weak"):
        status, answer = await ask(http, url, model=model)
        assert (status, error_code(answer)) == (404, "model_not_found")


async def test_request_goes_to_a_backend_that_has_its_adapter(
    engine: Engine, backend: Backend, http: aiohttp.ClientSession
) -> None:
    before = Engine()
    async with fake_engine(before, uid="before") as started:
        adapters = (BackendAdapter(1, "voice"), BackendAdapter(1, "old"))
        other = structs.replace(started, adapters=adapters, engine="llama.cpp")
        async with proxy_in_process(other, backend) as (_, url):
            for model in ("tiny:tone", "tiny:tone", "tiny:old", "tiny:old"):
                assert (await ask(http, url, model=model))[0] == 200
    assert [len(asked.bodies) for asked in (engine, before)] == [2, 2]


async def test_request_that_waits_for_an_adapter_is_refused_once_no_backend_has_it(
    engine: Engine, backend: Backend, http: aiohttp.ClientSession
) -> None:
    engine.open.clear()
    backend = structs.replace(backend, concurrency=1)
    async with proxy_in_process(backend) as (listeners, url), asyncio.TaskGroup() as tasks:
        (service,) = listeners.services.values()
        running = tasks.create_task(ask(http, url))
        await eventually(lambda: bool(engine.bodies))
        waiting = [tasks.create_task(ask(http, url, model=model)) for model in ("tiny:tone", "tiny:voice", "tiny")]
        await eventually(lambda: service.queue.queued == 3)
        service.update(make_service(structs.replace(backend, adapters=ADAPTERS[:2])))
        assert (await waiting[1])[0] == 503
        assert service.queue.queued == 2
        engine.open.set()
        assert [(await task)[0] for task in (running, waiting[0], waiting[2])] == [200, 200, 200]


async def test_request_that_waits_for_an_adapter_stops_no_other_at_a_backend_without_it(
    http: aiohttp.ClientSession,
) -> None:
    busy, idle = Engine(), Engine()
    busy.open.clear()
    async with fake_engine(busy) as one, fake_engine(idle, uid="idle") as two:
        with_adapter = structs.replace(one, adapters=ADAPTERS, engine="llama.cpp", mode="chat", concurrency=1)
        without = structs.replace(two, engine="llama.cpp", mode="chat", concurrency=1)
        async with proxy_in_process(with_adapter, without) as (listeners, url):
            (service,) = listeners.services.values()
            with_tone = [asyncio.ensure_future(ask(http, url, model="tiny:tone")) for _ in range(2)]
            await eventually(lambda: bool(busy.bodies) and service.queue.queued == 1)
            assert (await asyncio.wait_for(ask(http, url, model="tiny"), 20))[0] == 200
            assert service.queue.queued == 1
            busy.open.set()
            assert [status for status, _ in await asyncio.gather(*with_tone)] == [200, 200]
