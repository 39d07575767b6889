"""Adapters at the gateway: which a key opens, what their endpoint gets, and what the list of models says of them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.config import BackendAdapter
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, RunningGateway
from tests.unit.gateway.proxy.running_proxy import TOKEN, error_code, fake_engine, proxy_in_process

ADAPTERS = ({"modelRef": "tone", "onRequest": True}, {"modelRef": "voice", "onRequest": True}, {"modelRef": "weak"})


class Endpoint:
    """The endpoint of a service, which keeps the names of models that it was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.models: list[str] = []

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.models.append((await request.json())["model"])
        if request.path.endswith("messages"):
            refusal = {"message": "no adapter here", "type": "invalid_request_error", "code": "unsupported_path"}
            return web.json_response({"error": refusal}, status=400)
        return web.json_response({"model": "of-the-endpoint", "choices": []})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    async with fake_engine(endpoint) as backend:
        endpoint.url = backend.url
        yield endpoint


async def ask(
    http: aiohttp.ClientSession, gateway: RunningGateway, model: str, path: str = "completions"
) -> tuple[int, Any]:
    body = {"model": model, "prompt": "hi", "max_tokens": 5}
    async with http.post(f"{gateway.url}/v1/{path}", json=body, headers=AUTHORIZED) as response:
        return response.status, await response.json()


async def list_models(http: aiohttp.ClientSession, gateway: RunningGateway) -> list[dict[str, Any]]:
    async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
        return list((await response.json())["data"])


async def test_key_that_opens_a_service_opens_its_adapters(
    gateway: RunningGateway, http: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    gateway.cluster.put_key(services=["chat", "team-b/*"])
    gateway.cluster.serve("team-a", "chat", endpoint.url, adapters=ADAPTERS)
    gateway.cluster.serve("team-a", "mail", endpoint.url, adapters=ADAPTERS)
    gateway.cluster.serve("team-b", "chat", endpoint.url, access=("team-a",), adapters=ADAPTERS)
    gateway.cluster.serve("team-c", "chat", endpoint.url, adapters=ADAPTERS)
    opened = ["chat:tone", "team-a/chat:voice", "team-b/chat:tone"]
    for model in opened * 2:
        status, answer = await ask(http, gateway, model)
        assert (status, answer["model"]) == (200, model.rpartition("/")[2])
    assert endpoint.models == opened * 2
    for model in ("mail:tone", "team-c/chat:tone", "nothing:tone"):
        status, answer = await ask(http, gateway, model)
        assert (status, error_code(answer)) == (404, "model_not_found")
        offered = answer["error"]["message"].partition("set `model` to ")[2]
        assert "chat:tone" in offered
        assert "mail" not in offered
        assert "team-c" not in offered
    assert endpoint.models == opened * 2


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [("other", "requests choose no such adapter"), ("weak", "this adapter is always applied")],
)
async def test_adapter_that_no_request_chooses_is_refused_with_those_that_exist(
    gateway: RunningGateway, http: aiohttp.ClientSession, endpoint: Endpoint, adapter: str, reason: str
) -> None:
    gateway.cluster.put_key()
    gateway.cluster.serve("team-a", "chat", endpoint.url, adapters=ADAPTERS)
    for name in ("chat", "team-a/chat"):
        status, answer = await ask(http, gateway, f"{name}:{adapter}")
        assert (status, error_code(answer)) == (404, "model_not_found")
        said = answer["error"]["message"]
        assert said.endswith(f"{reason}: set `model` to {name} or {name}:tone or {name}:voice")
    assert endpoint.models == []


async def test_adapters_follow_the_spec_of_their_service(
    gateway: RunningGateway, http: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    gateway.cluster.put_key()
    for adapters, status in (((), 404), (ADAPTERS, 200), (ADAPTERS[1:], 404), (ADAPTERS, 200)):
        gateway.cluster.serve("team-a", "chat", endpoint.url, adapters=adapters)
        assert (await ask(http, gateway, "chat:tone"))[0] == status


async def test_adapters_are_listed_behind_their_service_also_without_replicas(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    gateway.cluster.put_key()
    gateway.cluster.serve("team-a", "chat", phase="Suspended", adapters=ADAPTERS)
    gateway.cluster.serve("team-b", "mail", access=("*",), adapters=ADAPTERS[:1])
    listed = await list_models(http, gateway)
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("chat", None),
        ("chat:tone", "chat"),
        ("chat:voice", "chat"),
        ("team-b/mail", None),
        ("team-b/mail:tone", "team-b/mail"),
    ]
    assert listed[1] == listed[0] | {"id": "chat:tone", "parent": "chat"}
    assert (await ask(http, gateway, "chat:tone"))[0] == 503


async def test_adapter_of_a_service_that_a_route_hides_has_the_name_of_its_namespace(
    gateway: RunningGateway, http: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    gateway.cluster.put_key()
    gateway.cluster.serve("team-a", "chat", endpoint.url, adapters=ADAPTERS)
    gateway.cluster.put_route("chat", {"chat": 1})
    assert [model["id"] for model in await list_models(http, gateway)] == [
        *("chat", "team-a/chat", "team-a/chat:tone", "team-a/chat:voice")
    ]
    assert (await ask(http, gateway, "team-a/chat:tone"))[0] == 200
    status, answer = await ask(http, gateway, "chat:tone")
    assert (status, error_code(answer)) == (404, "model_not_found")
    assert answer["error"]["message"].endswith("this is a ModelRoute: set `model` to chat")


async def test_refusal_of_the_endpoint_reaches_the_client(
    gateway: RunningGateway, http: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    gateway.cluster.put_key()
    gateway.cluster.serve("team-a", "chat", endpoint.url, adapters=ADAPTERS)
    status, answer = await ask(http, gateway, "chat:tone", "messages")
    assert status == 400
    assert "no adapter here" in json.dumps(answer)
    assert endpoint.models == ["chat:tone"]


async def test_adapter_is_asked_of_a_replica_that_has_it_during_a_rollout(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(Endpoint()) as engine:
        new = structs.replace(engine, engine="llama.cpp", mode="chat", adapters=(BackendAdapter(1, "tone"),))
        old = structs.replace(engine, engine="llama.cpp", mode="chat")
        async with proxy_in_process(new) as (_, new_url), proxy_in_process(old) as (_, old_url):
            gateway.cluster.put_key()
            gateway.cluster.serve("team-a", "tiny", new_url, old_url, token=TOKEN, adapters=ADAPTERS)
            for number in range(20):
                body = {"model": "tiny:tone", "messages": [{"role": "user", "content": f"conversation {number}"}]}
                async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                    assert response.status == 200
