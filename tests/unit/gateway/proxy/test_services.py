"""Services from the client's side: model names, served paths, the router over all services; and their metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy import errors
from gateway.proxy.config import Backend, ProxyConfig, RouterListener, ServiceStats
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    post_chat,
)


async def echo_model(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as an engine that serves any model name and returns the name."""
    asked = json.loads(await request.read())
    if not asked.get("stream"):
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        answer = {"id": 1, "model": asked["model"], "choices": [], "usage": usage, "key": request.headers.get("Auth")}
        return web.json_response(answer | {"authorization": request.headers.get("Authorization")})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = {"model": asked["model"], "choices": [{"delta": {"content": "Hi"}}]}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n" + DONE_EVENT)
    return response


# Names


async def test_engine_gets_its_model_name_and_the_client_the_service_name(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(echo_model) as backend:
        url = await proxy.serve(structs.replace(backend, model="/weights/x", api_key="engine-key"))
        async with post_chat(http, url) as response:
            answer = await response.json()
        assert (answer["model"], answer["authorization"]) == ("tiny", "Bearer engine-key")
        streaming = CHAT | {"stream": True, "model": "tiny"}
        async with http.post(f"{url}/v1/chat/completions", json=streaming, headers=AUTHORIZED) as response:
            text = await response.text()
        assert text == 'data: {"model":"tiny", "choices": [{"delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n'.replace(
            '"model":"', '"model": "'
        )


async def test_models_are_listed_under_the_service_name(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with fake_engine(echo_model) as backend:
        url = await proxy.serve(backend)
        async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "pomona")
        assert "max_model_len" not in model
        async with http.get(f"{url}/v1/models/tiny", headers=AUTHORIZED) as response:
            assert await response.json() == model
        async with http.get(f"{url}/v1/models/other", headers=AUTHORIZED) as response:
            assert (response.status, error_code(await response.json())) == (404, "model_not_found")


async def test_model_is_listed_with_the_context_that_every_backend_has(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    backends = [Backend(str(length), "http://127.0.0.1:9", context_length=length) for length in (8192, 4096, None)]
    url = await proxy.serve(*backends)
    async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
        (model,) = (await response.json())["data"]
    assert model["max_model_len"] == 4096


@pytest.mark.parametrize("backends", [(), (Backend("a", "http://127.0.0.1:9", draining=True),)])
async def test_model_that_no_engine_serves_now_is_not_listed(
    proxy: ProxyProcess, http: aiohttp.ClientSession, backends: tuple[Backend, ...]
) -> None:
    url = await proxy.serve(*backends)
    async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
        assert await response.json() == {"object": "list", "data": []}
    async with http.get(f"{url}/v1/models/tiny", headers=AUTHORIZED) as response:
        assert (response.status, error_code(await response.json())) == (503, "service_unavailable")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/slots", 404),
        ("POST", "/props", 404),
        ("POST", "/slots/0", 404),
        ("POST", "/v1/models/x/unload", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/admin/api/stats", 404),
        ("GET", "/metrics", 404),
        ("POST", "/lora-adapters", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/chat/completions/control", 404),
        ("GET", "/v1/chat/completions/chatcmpl-1", 404),
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/responses/input_tokens", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("POST", "/v1/responses/resp_1/cancel", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/tokenize", 404),
        ("POST", "/apply-template", 404),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
async def test_other_paths_of_an_engine_cannot_be_reached(
    proxy: ProxyProcess, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    never = GatedEngine()
    async with (
        fake_engine(never) as backend,
        http.request(method, await proxy.serve(backend) + path, json=CHAT, headers=AUTHORIZED) as response,
    ):
        assert response.status == status
        assert error_code(await response.json()) in {"unknown_url", "method_not_allowed"}
    assert not never.arrived.is_set()


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/responses", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/count_tokens?beta=true"),
    ],
)
async def test_every_inference_path_is_forwarded(proxy: ProxyProcess, http: aiohttp.ClientSession, path: str) -> None:
    async def where(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"path": request.raw_path, "model": "x"})

    async with fake_engine(where) as backend:
        url = await proxy.serve(backend)
        async with http.post(url + path, json={}, headers={"X-Api-Key": "s3cret-token"}) as response:
            assert await response.json() == {"path": path.partition("?")[0], "model": "tiny"}


async def test_error_of_an_engine_is_translated_and_has_retry_after(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def busy(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": "server busy"}, status=503, headers={"Retry-After": "7"})

    async with fake_engine(busy) as backend, post_chat(http, await proxy.serve(backend)) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        answer = await response.json()
    assert (error_code(answer), answer["error"]["message"]) == ("engine_error", "server busy")


async def test_keep_alive_blanks_are_forwarded_before_the_response(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    go_on = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b" \n")
        await go_on.wait()
        await response.write(b'{"model": "x", ')
        await response.write(b'"choices": []}')
        return response

    async with fake_engine(slow) as backend, post_chat(http, await proxy.serve(backend)) as response:
        assert await response.content.readany() == b" \n"
        go_on.set()
        assert await response.read() == b'{"model":"tiny","choices":[]}'


async def test_error_under_status_200_becomes_a_500(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async def late(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of memory"}})

    async with fake_engine(late) as backend, post_chat(http, await proxy.serve(backend)) as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "out of memory"


async def test_error_in_a_form_that_clients_do_not_read_is_told_again(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    """llama.cpp's error event of /v1/responses has no key `error`, without which OpenAI's library passes over it."""
    event = b'event: error\ndata: {"code":500,"message":"Compute error.","type":"server_error"}\n\n'

    async def failing(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event)
        return response

    async with fake_engine(failing) as backend:
        url = await proxy.serve(backend)
        async with http.post(f"{url}/v1/responses", json=CHAT, headers=AUTHORIZED) as response:
            got = await response.read()
    assert got.startswith(event)
    told, failed = (json.loads(line[6:]) for line in got.removeprefix(event).splitlines() if line.startswith(b"data: "))
    assert told["error"]["message"] == failed["response"]["error"]["message"] == "Compute error."


# One address for all


@pytest.fixture
async def router(proxy: ProxyProcess) -> AsyncIterator[str]:
    """A router without a token for two services of two namespaces, and one name that both namespaces have."""
    async with fake_engine(echo_model, "a") as a, fake_engine(echo_model, "b") as b:
        services = (
            make_service(structs.replace(a, model="A"), name="x/chat"),
            make_service(structs.replace(b, model="B"), name="y/mail"),
            make_service(name="x/twice"),
            make_service(name="y/twice"),
        )
        state = await proxy.client.configure(ProxyConfig(services, RouterListener("127.0.0.1", 0)))
        assert state.router
        yield f"http://127.0.0.1:{state.router.port}"


async def test_router_picks_the_service_by_model(proxy: ProxyProcess, http: aiohttp.ClientSession, router: str) -> None:
    for name, heard in (("chat", "chat"), ("mail", "mail"), ("x/chat", "chat")):
        async with http.post(f"{router}/v1/chat/completions", json=CHAT | {"model": name}) as response:
            assert (await response.json())["model"] == heard
    counted = {service.name: service.stats for service in (await proxy.client.state()).services}
    assert (counted["x/chat"].requests, counted["y/mail"].requests) == (2, 1)
    assert (counted["x/chat"].tokens_in, counted["x/chat"].tokens_out) == (6, 4)


@pytest.mark.parametrize("error", [errors.missing_model([]), errors.model_not_found("gpt", [])])
def test_error_of_a_router_without_services_says_to_try_again(error: errors.RequestError) -> None:
    assert json.loads(error.body)["error"]["message"].endswith("no model is served here now: try again later")


async def test_router_lists_the_models_that_are_served_also_in_its_errors(
    proxy: ProxyProcess, http: aiohttp.ClientSession, router: str
) -> None:
    del proxy
    async with http.get(f"{router}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["chat", "mail"]
    async with http.post(f"{router}/v1/completions", json={"model": "gpt"}) as response:
        answer = await response.json()
        assert (response.status, error_code(answer), answer["error"]["param"]) == (404, "model_not_found", "model")
        assert answer["error"]["message"].endswith("set `model` to one that is: chat, mail")
    async with http.post(f"{router}/v1/completions", json={}) as response:
        assert (response.status, error_code(await response.json())) == (400, "missing_model")
    async with http.post(f"{router}/v1/completions", json={"model": "x/twice"}) as response:
        assert response.status == 503
    async with http.get(f"{router}/health") as response:
        assert response.status == 200


# Metrics and logs


async def test_requests_are_counted_and_logged_without_their_content(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    await proxy.client.configure(ProxyConfig())
    async with fake_engine(echo_model) as backend:
        url = await proxy.serve(structs.replace(backend, model="x"))
        body = {"model": "m", "stream": True, "messages": "a-secret-prompt"}
        headers = AUTHORIZED | {"X-Request-Id": "mine-1"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
            await response.read()
        async with post_chat(http, url, headers={"X-Request-Id": "no\tgood"}) as response:
            assert response.headers["X-Request-Id"] not in {"", "no\tgood"}
    async with post_chat(http, url) as response:
        assert response.status == 503
    counted = await proxy.stats()
    assert 0 < counted.request_seconds < 60
    counted = structs.replace(counted, request_seconds=0.0)
    assert counted == ServiceStats(requests=3, errors=1, tokens_in=3, tokens_out=3)
    wanted = [("chat", 200, 1), ("chat", 200, 2), ("chat", 503, None)]

    def written() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in proxy.log if '"event":"request_finished"' in line][-3:]
        assert [(line["route"], line["status"], line["tokens_out"]) for line in lines] == wanted
        return lines

    lines = await eventually(written)
    assert (lines[0]["request_id"], lines[0]["service"]) == ("mine-1", "ns/tiny")
    assert 0 < lines[0]["first_token_seconds"] <= lines[0]["seconds"] < 10
    assert not any("a-secret-prompt" in line for line in proxy.log)
    text = (await proxy.client.metrics()).decode()
    series = '{namespace="ns",service="tiny"'
    assert 'pomona_proxy_requests_total{namespace="ns",route="chat",service="tiny",status="200"} 2.0' in text
    assert 'pomona_proxy_errors_total{namespace="ns",reason="no_server",service="tiny"} 1.0' in text
    assert f"pomona_proxy_generated_tokens_total{series}}} 3.0" in text
    assert f"pomona_proxy_time_to_first_token_seconds_count{series}}} 1.0" in text
    assert f"pomona_proxy_queued{series}}} 0.0" in text


def make_event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


async def read_lone(proxy: ProxyProcess) -> tuple[float, float]:
    """Return the tokens of lone streams, and their seconds."""
    lines = (await proxy.client.metrics()).decode().splitlines()
    metrics = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    return metrics["pomona_proxy_lone_tokens_total"], metrics["pomona_proxy_lone_token_seconds_total"]


async def test_speed_of_a_single_request_is_measured_only_while_it_is_the_only_one(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = GatedEngine()
    streaming = CHAT | {"stream": True, "model": "tiny"}
    async with fake_engine(engine) as backend:
        url = await proxy.serve(backend)

        async def stream(texts: int) -> None:
            """Stream some events; the first two come one after the other."""
            async with http.post(f"{url}/v1/chat/completions", json=streaming, headers=AUTHORIZED) as response:
                for number in range(texts):
                    engine.release(make_event(f"word{number}"))
                    await response.content.readuntil(b"\n\n")
                engine.end()
                await response.read()

        await stream(4)
        tokens, seconds = await read_lone(proxy)
        assert (tokens, seconds > 0) == (3, True)
        first = asyncio.create_task(post_stream(http, url, streaming))
        await eventually(lambda: in_flight(proxy, 1))
        second = asyncio.create_task(post_stream(http, url, streaming))
        await eventually(lambda: in_flight(proxy, 2))
        for _ in range(2):
            engine.release(make_event("a"))
            engine.release(make_event("b"))
            engine.release(make_event("c"))
            engine.release(make_event("d"))
        engine.end()
        engine.end()
        await asyncio.gather(first, second)
        assert await read_lone(proxy) == (tokens, seconds)


async def post_stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
        await response.read()


async def in_flight(proxy: ProxyProcess, count: int) -> bool:
    return (await proxy.stats()).in_flight == count


async def test_refusal_is_logged_by_the_name_of_its_path_whoever_asked(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(echo_model) as backend:
        url = await proxy.serve(backend)
        before = len(proxy.log)
        for headers, status in (({}, 401), (AUTHORIZED, 404)):
            async with http.get(f"{url}/a-secret-path", headers=headers) as response:
                assert response.status == status

    def refused() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in proxy.log[before:] if '"event":"request_refused"' in line]
        assert [(line["listener"], line["route"], line["status"], line["code"]) for line in lines] == [
            ("service ns/tiny", "other", 401, "invalid_api_key"),
            ("service ns/tiny", "other", 404, "unknown_url"),
        ]
        return lines

    await eventually(refused)
    assert not any("a-secret-path" in line for line in proxy.log)


async def test_tokens_of_a_stream_are_counted_while_it_runs(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    await proxy.client.configure(ProxyConfig())
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as stream:
            for count in (1, 2):
                gated.release(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
                await stream.content.readuntil(b"\n\n")
                assert await proxy.stats() == ServiceStats(tokens_out=count, in_flight=1)
            gated.end()
            await stream.read()
        ended = structs.replace(await proxy.stats(), request_seconds=0.0)
        assert ended == ServiceStats(requests=1, tokens_out=2)


async def test_removed_service_has_no_metric_series(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as stream:
            await proxy.client.configure(ProxyConfig())
            gated.end()
            assert await stream.read() == DONE_EVENT
    assert 'service="tiny"' not in (await proxy.client.metrics()).decode()


async def test_client_that_hangs_up_is_not_counted_as_an_error(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    await proxy.client.configure(ProxyConfig())
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as stream:
            stream.close()
        await eventually(gated.cancelled.is_set)

        async def counted() -> bool:
            return (await proxy.stats()).requests == 1

        await eventually(counted)
        assert (await proxy.stats()).errors == 0
    await eventually(lambda: '"status":499' in proxy.log[-1])  # a thread reads the log
