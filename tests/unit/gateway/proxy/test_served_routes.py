"""Paths that the engine of a service does not answer: refused with the paths that work, mostly before it is asked."""

import re

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.config import Backend, ProxyConfig, RouterListener
from gateway.proxy.errors import RequestError
from gateway.proxy.paths import INFERENCE, resolve_alias, route_name
from gateway.proxy.served_routes import check_route, suggest_paths
from runtimes.registry import RUNTIMES
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
)

OLLAMA = "use /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/messages"


def backend(engine: str | None, mode: str | None = "chat", uid: str = "a") -> Backend:
    return Backend(uid, "http://127.0.0.1:9", engine=engine, mode=mode)


@pytest.mark.parametrize("name", RUNTIMES)
def test_routes_of_an_engine_are_known_and_each_of_its_modes_has_some(name: str) -> None:
    routes = RUNTIMES[name].routes
    assert set(routes) == (set() if name == "generic" else RUNTIMES[name].modes)
    for mode, names in routes.items():
        assert names <= set(INFERENCE.values())
        assert mode in names  # each mode has the name of the path that it is for


@pytest.mark.parametrize(
    ("backends", "route", "is_refused"),
    [
        ([backend("mlx-lm")], "messages", True),
        ([backend("mlx-lm")], "chat", False),
        ([backend("ollama")], "count_tokens", True),
        ([backend("mlx-lm", None)], "messages", True),
        ([backend("vllm", "embeddings")], "chat", False),  # perhaps it can: the engine decides
        ([backend(None)], "messages", False),
        ([backend("generic")], "messages", False),
        ([backend("from a newer version")], "messages", False),
        ([backend("mlx-lm"), backend("llama.cpp", uid="b")], "messages", False),
        ([backend("mlx-lm"), backend(None, uid="b")], "messages", False),
        ([], "messages", False),
    ],
)
def test_path_is_refused_if_no_engine_of_the_service_has_it(
    backends: list[Backend], route: str, *, is_refused: bool
) -> None:
    service = make_service(*backends)
    if not is_refused:
        check_route(route, "/path", service)
        return
    with pytest.raises(RequestError, match=r"^service ns/tiny: its engine does not serve /path: use /v1/"):
        check_route(route, "/path", service)


@pytest.mark.parametrize(
    ("backends", "route", "way"),
    [
        ([backend("mlx-lm")], "messages", "use /v1/chat/completions, /v1/completions"),
        ([backend("llama.cpp", "rerank")], "chat", "use /v1/rerank, or a service with spec.mode chat"),
        ([backend("llama.cpp", "chat")], "rerank", "use .*, or a service with spec.mode rerank"),
        ([backend("vllm", "rerank")], "embeddings", "use /v1/rerank, or a service with spec.mode embeddings"),
        ([backend("mlx-lm", None)], "messages", "use /v1/chat/completions, /v1/completions"),
        ([backend("mlx-lm", "of a newer version")], "messages", "use /v1/chat/completions, /v1/completions"),
        ([backend("generic", "embeddings")], "messages", "use /v1/embeddings"),
        ([backend(None, "chat")], "messages", "use /v1/chat/completions"),
        ([backend(None, None)], "messages", "the documentation of its engine says which paths it has"),
        ([backend(None, "chat")], "chat", "the documentation of its engine says which paths it has"),
        ([backend("mlx-lm"), backend("ollama", uid="b")], "count_tokens", OLLAMA),
    ],
)
def test_refusal_names_the_paths_that_work(backends: list[Backend], route: str, way: str) -> None:
    assert re.fullmatch(way, suggest_paths(route, backends))


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/responses/input_tokens", "/v1/messages/count_tokens"])
async def test_engine_is_not_asked_for_a_path_that_it_lacks(
    proxy: ProxyProcess, http: aiohttp.ClientSession, path: str
) -> None:
    never = GatedEngine()
    async with fake_engine(never) as engine:
        url = await proxy.serve(structs.replace(engine, engine="ollama", mode="chat"))
        async with http.post(url + path, json=CHAT, headers=AUTHORIZED) as response:
            answer = await response.json()
        assert response.status == 400
        message = answer["error"]["message"]
        assert message.startswith(f"service ns/tiny: its engine does not serve {path}: use /v1/chat/completions, ")
        if path == "/v1/messages/count_tokens":
            assert answer["error"]["type"] == "invalid_request_error"
        else:
            assert error_code(answer) == "unsupported_path"
        assert ((await proxy.stats()).errors, (await proxy.stats()).in_flight) == (0, 0)
    assert not never.arrived.is_set()


async def test_router_refuses_the_paths_of_each_service_alike(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    service = make_service(backend("mlx-lm"), name="x/chat")
    state = await proxy.client.configure(ProxyConfig((service,), RouterListener("127.0.0.1", 0)))
    assert state.router
    url = f"http://127.0.0.1:{state.router.port}/v1/responses"
    async with http.post(url, json={"model": "chat", "input": "hi"}) as response:
        answer = await response.json()
        assert (response.status, error_code(answer)) == (400, "unsupported_path")
    assert answer["error"]["message"] == (
        "service x/chat: its engine does not serve /v1/responses: use /v1/chat/completions, /v1/completions"
    )


@pytest.mark.parametrize("engine", [None, "generic", "llama.cpp"])
async def test_engine_that_answers_that_it_lacks_a_path_is_translated_alike(
    proxy: ProxyProcess, http: aiohttp.ClientSession, engine: str | None
) -> None:
    """An engine that is not known, or an older version of one that is."""

    async def lack(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": {"message": "File Not Found", "code": 404}}, status=404)

    async with fake_engine(lack) as served:
        url = await proxy.serve(structs.replace(served, engine=engine, mode="chat"))
        async with http.post(f"{url}/v1/responses", json=CHAT, headers=AUTHORIZED) as response:
            answer = await response.json()
            assert (response.status, error_code(answer)) == (400, "unsupported_path")
        message = answer["error"]["message"]
        assert message.startswith("service ns/tiny: its engine does not serve /v1/responses: use /v1/chat/completions")
        assert "/v1/responses," not in message
        assert (await proxy.stats()).errors == 0


@pytest.mark.parametrize(
    ("path", "served"),
    [
        *((f"/engines/llama.cpp{path}", path) for path in INFERENCE if path.startswith("/v1/")),
        ("/engines/v1/models/tiny", "/v1/models/tiny"),
        ("/v1/messages", "/v1/messages"),
        ("/engines/vllm/v1/models", "/engines/vllm/v1/models"),
        ("/engines/engines/v1/models", "/engines/engines/v1/models"),
        ("/engines/llamaXcpp/v1/models", "/engines/llamaXcpp/v1/models"),
        ("/v1/engines/v1/models", "/v1/engines/v1/models"),
        ("/engines/v1", "/engines/v1"),
    ],
)
def test_paths_of_docker_model_runner_stand_for_those_without_the_prefix(path: str, served: str) -> None:
    assert resolve_alias(path) == served
    assert route_name(path) == route_name(served)


@pytest.mark.parametrize("prefix", ["/engines/llama.cpp/v1", "/engines/v1"])
async def test_engine_gets_the_path_without_the_prefix(
    proxy: ProxyProcess, http: aiohttp.ClientSession, prefix: str
) -> None:
    asked: list[str] = []

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.raw_path)
        return web.json_response({"error": {"message": "no"}}, status=400)

    async with fake_engine(refuse) as engine:
        url = await proxy.serve(engine)
        async with http.post(f"{url}{prefix}/messages?beta=true", json=CHAT, headers=AUTHORIZED) as response:
            assert (await response.json())["type"] == "error"  # the form of Anthropic's API
        async with http.get(f"{url}{prefix}/models", headers=AUTHORIZED) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        async with http.post(f"{url}{prefix}/models", headers=AUTHORIZED) as response:
            assert response.status == 405
        async with http.post(f"{url}{prefix}/messages", json=CHAT) as response:
            assert (response.status, (await response.json())["type"]) == (401, "error")
    assert asked == ["/v1/messages"]
