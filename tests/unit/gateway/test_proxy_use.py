"""What clients find behind the proxy: names, places in the queue, all models at one address, and what is counted."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.proxy.client import ProxyRefusedError
from gateway.proxy.config import Backend, ProxyConfig, Router, Stats
from tests.eventually import eventually
from tests.unit.gateway.proxy_process import (
    AUTHORIZED,
    CHAT,
    LAST,
    Gated,
    ProxyProcess,
    asks,
    error_of,
    service,
    upstream,
)


async def named(request: web.BaseRequest) -> web.StreamResponse:
    """An engine that loads what it is asked for, and says so."""
    asked = json.loads(await request.read())
    if not asked.get("stream"):
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        answer = {"id": 1, "model": asked["model"], "choices": [], "usage": usage, "key": request.headers.get("Auth")}
        return web.json_response(answer | {"authorization": request.headers.get("Authorization")})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = {"model": asked["model"], "choices": [{"delta": {"content": "Hi"}}]}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n" + LAST)
    return response


# Names


async def test_the_engine_hears_its_own_name_and_the_client_the_services(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with upstream(named) as backend:
        url = await proxy.serve(structs.replace(backend, model="/weights/x", api_key="engine-key"))
        async with asks(http, url) as response:
            answer = await response.json()
        assert (answer["model"], answer["authorization"]) == ("tiny", "Bearer engine-key")
        streaming = CHAT | {"stream": True, "model": "tiny"}
        async with http.post(f"{url}/v1/chat/completions", json=streaming, headers=AUTHORIZED) as response:
            text = await response.text()
        assert text == 'data: {"model":"tiny", "choices": [{"delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n'.replace(
            '"model":"', '"model": "'
        )


async def test_models_are_listed_under_the_services_name_whether_or_not_one_answers(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    url = await proxy.serve()
    async with http.get(f"{url}/v1/models", headers=AUTHORIZED) as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "pomona")
    async with http.get(f"{url}/v1/models/tiny", headers=AUTHORIZED) as response:
        assert await response.json() == model
    async with http.get(f"{url}/v1/models/other", headers=AUTHORIZED) as response:
        assert (response.status, error_of(await response.json())) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/slots", 404),
        ("POST", "/props", 404),
        ("POST", "/slots/0", 404),
        ("POST", "/v1/models/x/unload", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/api/pull", 404),
        ("POST", "/api/generate", 404),
        ("GET", "/admin/api/stats", 404),
        ("GET", "/metrics", 404),
        ("POST", "/lora-adapters", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/chat/completions/control", 404),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
async def test_nothing_else_of_an_engine_can_be_reached(
    proxy: ProxyProcess, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    never = Gated()
    async with (
        upstream(never) as backend,
        http.request(method, await proxy.serve(backend) + path, json=CHAT, headers=AUTHORIZED) as response,
    ):
        assert response.status == status
        assert error_of(await response.json()) in {"unknown_url", "method_not_allowed"}
    assert not never.arrived.is_set()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/responses", "/v1/messages"]
)
async def test_inference_of_every_kind_is_reached(proxy: ProxyProcess, http: aiohttp.ClientSession, path: str) -> None:
    async def where(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"path": request.raw_path, "model": "x"})

    async with upstream(where) as backend:
        url = await proxy.serve(backend)
        async with http.post(url + path, json={}, headers={"X-Api-Key": "s3cret-token"}) as response:
            assert await response.json() == {"path": path, "model": "tiny"}


async def test_an_engines_error_comes_in_openais_form_and_with_a_time(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def busy(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": "server busy"}, status=503, headers={"Retry-After": "7"})

    async with upstream(busy) as backend, asks(http, await proxy.serve(backend)) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        answer = await response.json()
    assert (error_of(answer), answer["error"]["message"]) == ("engine_error", "server busy")


async def test_blanks_of_an_engine_that_still_works_go_ahead_of_its_answer(
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

    async with upstream(slow) as backend, asks(http, await proxy.serve(backend)) as response:
        assert await response.content.readany() == b" \n"
        go_on.set()
        assert await response.read() == b'{"model":"tiny","choices":[]}'


async def test_an_error_under_the_status_200_gets_its_own_status(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async def late(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of memory"}})

    async with upstream(late) as backend, asks(http, await proxy.serve(backend)) as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "out of memory"


# The queue


class Answers:
    """An engine that answers one request for each `release`, and notes in which order they came."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._released = asyncio.Semaphore(0)

    def release(self) -> None:
        self._released.release()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.order.append(json.loads(await request.read())["model"])
        await self._released.acquire()
        return web.json_response({"choices": []})


async def post(http: aiohttp.ClientSession, url: str, name: str) -> int:
    async with http.post(f"{url}/v1/completions", json={"model": name}, headers=AUTHORIZED) as response:
        await response.read()
        return response.status


async def stats(proxy: ProxyProcess) -> Stats:
    return (await proxy.client.state()).services[0].stats


async def waiting(proxy: ProxyProcess, queued: int) -> None:
    async def reached() -> bool:
        now = await stats(proxy)
        # The first one may not have arrived yet, and another could overtake it.
        return (now.in_flight, now.queued) == (1, queued)

    await eventually(reached, timeout=5)


async def line(proxy: ProxyProcess, http: aiohttp.ClientSession, url: str, names: str) -> list[asyncio.Task[int]]:
    """Have one request after the other arrive: the first is worked on, the others wait."""
    tasks = []
    for queued, name in enumerate(names):
        tasks.append(asyncio.create_task(post(http, url, name)))
        await waiting(proxy, queued)
    return tasks


async def limited(proxy: ProxyProcess, *backends: Backend, queue: int) -> str:
    config = ProxyConfig((structs.replace(service(*backends), queue=queue),))
    return f"http://127.0.0.1:{(await proxy.client.configure(config)).services[0].port}"


async def test_who_comes_first_is_served_first_and_who_finds_the_queue_full_is_told_when_to_come_back(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = Answers()
    async with upstream(engine) as backend:
        url = await limited(proxy, structs.replace(backend, concurrency=1), queue=2)
        tasks = await line(proxy, http, url, "abc")
        async with asks(http, url) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert error_of(await response.json()) == "queue_full"
        for _ in tasks:
            engine.release()
        assert [await task for task in tasks] == [200, 200, 200]
    assert engine.order == ["a", "b", "c"]


async def test_who_hangs_up_in_the_queue_leaves_it_and_never_reaches_the_engine(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    engine = Answers()
    async with upstream(engine) as backend:
        url = await limited(proxy, structs.replace(backend, concurrency=1), queue=2)
        first, second, third = await line(proxy, http, url, "abc")
        second.cancel()
        await waiting(proxy, 1)
        for _ in range(2):
            engine.release()
        assert [await first, await third] == [200, 200]
    assert engine.order == ["a", "c"]


async def test_a_backend_that_is_gone_or_full_holds_up_no_other(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    full, free = Answers(), Answers()
    async with upstream(full, "full") as a, upstream(free, "free") as b:
        one, two = structs.replace(a, concurrency=1), structs.replace(b, concurrency=2)
        url = await limited(proxy, one, queue=8)
        held = await line(proxy, http, url, "ab")
        await limited(proxy, structs.replace(one, draining=True), two, queue=8)
        free.release()
        assert await held[1] == 200, "who waited is called up for the one that came"
        more = [asyncio.create_task(post(http, url, name)) for name in "cd"]
        await eventually(lambda: len(free.order) == 3)
        for _ in range(2):
            free.release()
        assert [await task for task in more] == [200, 200]
        full.release()
        assert await held[0] == 200


async def test_who_waits_for_nobody_is_sent_away(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    engine = Answers()
    async with upstream(engine) as backend:
        url = await limited(proxy, structs.replace(backend, concurrency=1), queue=2)
        first, second = await line(proxy, http, url, "ab")
        await limited(proxy, structs.replace(backend, concurrency=1, draining=True), queue=2)
        assert await second == 503
        engine.release()
        assert await first == 200


# One address for all


@pytest.fixture
async def router(proxy: ProxyProcess) -> AsyncIterator[str]:
    """A router without a token over two services of two namespaces and one that both have."""
    async with upstream(named, "a") as a, upstream(named, "b") as b:
        services = (
            service(structs.replace(a, model="A"), name="x/chat"),
            service(structs.replace(b, model="B"), name="y/mail"),
            service(name="x/twice"),
            service(name="y/twice"),
        )
        state = await proxy.client.configure(ProxyConfig(services, Router("127.0.0.1", 0)))
        assert state.router
        yield f"http://127.0.0.1:{state.router.port}"


async def test_the_router_goes_by_the_model(proxy: ProxyProcess, http: aiohttp.ClientSession, router: str) -> None:
    for name, heard in (("chat", "chat"), ("mail", "mail"), ("x/chat", "chat")):
        async with http.post(f"{router}/v1/chat/completions", json=CHAT | {"model": name}) as response:
            assert (await response.json())["model"] == heard
    counted = {each.name: each.stats for each in (await proxy.client.state()).services}
    assert (counted["x/chat"].requests, counted["y/mail"].requests) == (2, 1)
    assert (counted["x/chat"].tokens_in, counted["x/chat"].tokens_out) == (6, 4)


async def test_the_router_lists_every_model_and_names_them_to_who_asks_for_another(
    proxy: ProxyProcess, http: aiohttp.ClientSession, router: str
) -> None:
    del proxy
    async with http.get(f"{router}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["chat", "mail", "x/twice", "y/twice"]
    async with http.post(f"{router}/v1/completions", json={"model": "gpt"}) as response:
        answer = await response.json()
        assert (response.status, error_of(answer), answer["error"]["param"]) == (404, "model_not_found", "model")
        assert "chat, mail, x/twice, y/twice" in answer["error"]["message"]
    async with http.post(f"{router}/v1/completions", json={}) as response:
        assert (response.status, error_of(await response.json())) == (400, "missing_model")
    async with http.post(f"{router}/v1/completions", json={"model": "x/twice"}) as response:
        assert response.status == 503
    async with http.get(f"{router}/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example:80"},
        {"Origin": "http://127.0.0.1.evil.example"},
    ],
)
async def test_a_web_page_cannot_use_a_router_without_a_token(
    http: aiohttp.ClientSession, router: str, headers: dict[str, str]
) -> None:
    async with http.post(f"{router}/v1/completions", json={"model": "chat"}, headers=headers) as response:
        assert (response.status, error_of(await response.json())) == (403, "foreign_origin")


async def test_a_router_without_a_token_is_for_this_machine_only(proxy: ProxyProcess) -> None:
    with pytest.raises(ValueError, match=r"a router on 0\.0\.0\.0 needs a token"):
        Router("0.0.0.0", 8080)
    with pytest.raises(ProxyRefusedError, match="needs a token"):
        await proxy.client._ask("PUT", "/services", body=b'{"router": {"address": "10.0.0.1", "port": 0}}')


async def test_a_router_with_a_token_wants_it_and_no_services(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with upstream(named) as backend:
        config = ProxyConfig((service(backend),), Router("127.0.0.1", 0, "router-token"))
        state = await proxy.client.configure(config)
        assert state.router
        url = f"http://127.0.0.1:{state.router.port}"
        async with asks(http, url) as response:
            assert response.status == 401
        async with asks(http, url, headers={"Authorization": "Bearer router-token"}) as response:
            assert response.status == 200
        changed = structs.replace(config, router=Router("127.0.0.1", 0, "another"))
        again = await proxy.client.configure(changed)
        assert again.router
        assert again.router.port == state.router.port
        async with asks(http, url, headers={"Authorization": "Bearer router-token"}) as response:
            assert response.status == 401


# What is counted


async def test_what_was_done_is_counted_and_logged_without_what_was_said(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    await proxy.client.configure(ProxyConfig())
    async with upstream(named) as backend:
        url = await proxy.serve(structs.replace(backend, model="x"))
        body = {"model": "m", "stream": True, "messages": "a-prompt-that-nobody-may-read"}
        headers = AUTHORIZED | {"X-Request-Id": "mine-1"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
            await response.read()
        async with asks(http, url, headers={"X-Request-Id": "no\tgood"}) as response:
            assert response.headers["X-Request-Id"] not in {"", "no\tgood"}
    async with asks(http, url) as response:
        assert response.status == 503
    counted = await stats(proxy)
    assert counted == Stats(requests=3, errors=1, tokens_in=3, tokens_out=3)
    wanted = [("chat", 200, 1), ("chat", 200, 2), ("chat", 503, None)]

    def written() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in proxy.log if '"event": "request"' in line][-3:]
        assert [(line["route"], line["status"], line["tokens_out"]) for line in lines] == wanted
        return lines

    lines = await eventually(written)
    assert (lines[0]["request_id"], lines[0]["service"]) == ("mine-1", "ns/tiny")
    assert 0 < lines[0]["first_token_seconds"] <= lines[0]["seconds"] < 10
    assert not any("nobody-may-read" in line for line in proxy.log)
    text = (await proxy.client.metrics()).decode()
    series = '{namespace="ns",service="tiny"'
    assert 'pomona_proxy_requests_total{namespace="ns",route="chat",service="tiny",status="200"} 2.0' in text
    assert 'pomona_proxy_errors_total{namespace="ns",reason="no_server",service="tiny"} 1.0' in text
    assert f"pomona_proxy_generated_tokens_total{series}}} 3.0" in text
    assert f"pomona_proxy_time_to_first_token_seconds_count{series}}} 1.0" in text
    assert f"pomona_proxy_queued{series}}} 0.0" in text


async def test_the_tokens_of_a_stream_are_counted_while_it_runs(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    await proxy.client.configure(ProxyConfig())
    gated = Gated()
    async with upstream(gated) as backend:
        url = await proxy.serve(backend)
        async with asks(http, url) as stream:
            for count in (1, 2):
                gated.release(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
                await stream.content.readuntil(b"\n\n")
                assert await stats(proxy) == Stats(tokens_out=count, in_flight=1)
            gated.end()
            await stream.read()
        assert await stats(proxy) == Stats(requests=1, tokens_out=2)


async def test_a_service_that_left_takes_its_series_along(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = Gated()
    async with upstream(gated) as backend:
        url = await proxy.serve(backend)
        async with asks(http, url) as stream:
            await proxy.client.configure(ProxyConfig())
            gated.end()
            assert await stream.read() == LAST
    assert 'service="tiny"' not in (await proxy.client.metrics()).decode()


async def test_a_client_that_hung_up_is_no_error_of_ours(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    await proxy.client.configure(ProxyConfig())
    gated = Gated()
    async with upstream(gated) as backend:
        url = await proxy.serve(backend)
        async with asks(http, url) as stream:
            stream.close()
        await asyncio.wait_for(gated.cancelled.wait(), 5)

        async def counted() -> bool:
            return (await stats(proxy)).requests == 1

        await eventually(counted)
        assert (await stats(proxy)).errors == 0
    assert '"status": 499' in proxy.log[-1]
