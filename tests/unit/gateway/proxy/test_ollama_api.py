"""Ollama's API at the router: who is served, how requests wait and end, and what is refused in words."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from gateway.proxy.config import (
    Backend,
    BackendAdapter,
    ServedModelFacts,
    ServiceListener,
)
from gateway.proxy.inference_request import BODY_LIMIT_BYTES
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import TOKEN, GatedEngine, error_code, fake_engine, make_service
from tests.unit.gateway.proxy.running_router import serve_router

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
FACTS = ServedModelFacts(
    size_bytes=10,
    memory_bytes=20,
    device_bytes=20,
    digest="ab" * 32,
    source="hf://org/repo/x.gguf",
    format="gguf",
    architecture="llama",
    quantization="Q4_K_M",
    parameter_count=8_030_261_248,
    context_length=4096,
    embedding_size=64,
    capabilities=("completion", "tools"),
)


def backend_of(backend: Backend, **more: Any) -> Backend:
    return Backend(backend.uid, backend.url, **more)


def answer(
    body: object, seen: list[dict[str, Any]], **more: Any
) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    async def respond(request: web.BaseRequest) -> web.Response:
        seen.append({"path": request.path, "headers": dict(request.headers), **await request.json()})
        return web.json_response(body, **more)

    return respond


def whole(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


async def test_the_router_says_that_ollama_runs() -> None:
    async with serve_router(make_service()) as router:
        assert await router.ask("GET", "/") == (200, "Ollama is running")
        assert await router.ask("HEAD", "/") == (200, "")
        _, version = await router.ask("GET", "/api/version")
        assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # Copilot refuses older ones


async def test_lists_and_show_have_the_facts_of_the_models() -> None:
    loaded = ServiceListener("ns/tiny", "127.0.0.1", 0, TOKEN, (Backend("a", "http://127.0.0.1:1"),), facts=FACTS)
    async with serve_router(loaded, make_service(name="ns/loads")) as router:
        _, tags = await router.ask("GET", "/api/tags")
        by_name = {model["name"]: model for model in tags["models"]}
        assert set(by_name) == {"tiny:latest", "loads:latest"}
        assert len(by_name["loads:latest"]["digest"]) == 64
        assert (by_name["tiny:latest"]["size"], by_name["tiny:latest"]["details"]["parameter_size"]) == (10, "8.0B")

        (model,) = (await router.ask("GET", "/api/ps"))[1]["models"]
        assert (model["name"], model["size_vram"], model["context_length"]) == ("tiny:latest", 20, 4096)

        _, shown = await router.ask("POST", "/api/show", {"name": "tiny:latest"})
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["details"] == by_name["tiny:latest"]["details"] | {"quantization_level": "Q4_K_M"}
        assert shown["model_info"]["llama.context_length"] == 4096
        assert (await router.ask("POST", "/api/show", {"model": "no"}))[0] == 404
        assert (await router.ask("POST", "/api/show", {})) == (400, {"error": "model is required"})


async def test_a_port_of_one_service_has_no_such_api() -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend, serve_router(make_service(backend)) as router:
        (service,) = router.listeners.service_states()
        url, headers = f"http://127.0.0.1:{service.port}", {"Authorization": f"Bearer {TOKEN}"}
        for method, path in (
            *(("GET", "/api/tags"), ("POST", "/api/chat"), ("GET", "/")),
            *(("POST", "/api/generate"), ("POST", "/api/pull"), ("DELETE", "/api/delete")),
        ):
            async with router.http.request(method, url + path, headers=headers, json=CHAT) as response:
                assert response.status == 404
    assert not never.arrived.is_set()


async def test_only_those_are_served_who_are_on_other_paths() -> None:
    async with serve_router(make_service(), token="t") as router:
        for path in ("/", "/api/version", "/api/tags"):
            assert (await router.ask("GET", path))[0] == 401
            assert (await router.ask("GET", path, headers={"Authorization": "Bearer t"}))[0] == 200
    async with serve_router(make_service()) as router:
        page = {"Origin": "https://example.com"}
        status, refused = await router.ask("POST", "/api/chat", CHAT, page)
        assert (status, set(refused)) == (403, {"error"})
        status, refused = await router.ask("GET", "/v1/models", None, page)
        assert (status, error_code(refused)) == (403, "foreign_origin")


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "tiny:4b", "ns/tiny", "ns/tiny:latest"])
async def test_a_tag_is_no_part_of_the_name(name: str) -> None:
    seen: list[dict[str, Any]] = []
    async with fake_engine(answer(whole("hi"), seen)) as backend, serve_router(make_service(backend)) as router:
        status, said = await router.ask("POST", "/api/chat", {**CHAT, "model": name, "stream": False})
    assert (status, said["model"], said["message"]["content"]) == (200, name, "hi")


async def test_a_tag_may_be_an_adapter() -> None:
    seen: list[dict[str, Any]] = []
    async with fake_engine(answer(whole("hi"), seen)) as backend:
        adapted = backend_of(backend, engine="llama.cpp", adapters=(BackendAdapter(0.5, "tone"),))
        async with serve_router(make_service(adapted)) as router:
            asked = {**CHAT, "stream": False}
            for name in ("tiny:tone", "ns/tiny:tone", "tiny:latest", "tiny"):
                assert (await router.ask("POST", "/api/chat", asked | {"model": name}))[0] == 200
            assert [request["lora"][0]["scale"] for request in seen] == [0.5, 0.5, 0, 0]
            assert (await router.ask("POST", "/api/chat", asked | {"model": "tiny:other"}))[0] == 404


async def test_an_engine_gets_a_plain_request_of_openais_api() -> None:
    seen: list[dict[str, Any]] = []
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/x-ndjson", "X-Kept": "1"}
    async with fake_engine(answer(whole("hi"), seen)) as backend:
        service = make_service(backend_of(backend, model="/weights/x", api_key="key"))
        async with serve_router(service) as router:
            await router.ask("POST", "/api/chat", {**CHAT, "stream": False, "lora": [{"id": 0, "scale": 1}]}, headers)
            raw = {"model": "tiny", "prompt": "hi", "raw": True, "stream": False}
            await router.ask("POST", "/api/generate", raw, headers)
    chat, completion = seen
    of_chat = chat.pop("headers")
    assert chat == {"path": "/v1/chat/completions", "model": "/weights/x", "messages": HI}
    assert completion["path"] == "/v1/completions"
    assert (of_chat["Content-Type"], of_chat["Authorization"], of_chat["X-Kept"]) == (
        "application/json",
        "Bearer key",
        "1",
    )
    assert "Accept" not in of_chat


async def test_large_images_go_to_an_engine_whole() -> None:
    seen: list[dict[str, Any]] = []
    image = base64.b64encode(bytes(6 << 20)).decode()

    async def see(request: web.BaseRequest) -> web.Response:
        seen.append(json.loads(await request.content.read()))
        return web.json_response(whole("hi"))

    async with fake_engine(see) as backend, serve_router(make_service(backend)) as router:
        message = {"role": "user", "content": "see", "images": [image, image]}
        status, _ = await router.ask("POST", "/api/chat", {**CHAT, "messages": [message], "stream": False})
        held_bytes = router.listeners._shared.body_budget.held_bytes
        too_large = await router.ask("POST", "/api/chat", bytes(BODY_LIMIT_BYTES + 1))
    _, *urls = seen[0]["messages"][0]["content"]
    assert (status, [part["image_url"]["url"] for part in urls]) == (200, [f"data:image/jpeg;base64,{image}"] * 2)
    assert held_bytes == 0
    assert (too_large[0], set(too_large[1])) == (413, {"error"})


async def test_a_client_that_hangs_up_ends_the_work_of_the_engine() -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend, serve_router(make_service(backend)) as router:
        engine.release(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
        async with router.http.post(f"{router.url}/api/chat", json=CHAT) as response:
            assert json.loads(await response.content.readline())["message"]["content"] == "x"
            response.close()
        await asyncio.wait_for(engine.cancelled.wait(), 30)
        service = router.listeners.services["ns/tiny"]
        await eventually(lambda: service.metrics.requests["ollama_chat", 499] == 1)


async def test_an_engine_that_breaks_off_leaves_an_error_as_the_last_line() -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend, serve_router(make_service(backend)) as router:
        engine.release(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
        engine.release(b"CUT")
        status, (line, last) = await router.ask("POST", "/api/chat", CHAT)
        assert (status, line["done"]) == (200, False)
        assert last == {"error": "service ns/tiny: its engine broke off the response, which is not complete"}
        # Before the first line there is a status.
        engine.release(b"CUT")
        assert (await router.ask("POST", "/api/chat", CHAT))[0] == 502


async def test_requests_wait_for_a_slot_and_a_full_queue_is_busy() -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        only = ServiceListener("ns/tiny", "127.0.0.1", 0, TOKEN, (backend_of(backend, concurrency=1),), queue_limit=1)
        async with serve_router(only) as router:
            first = asyncio.create_task(router.ask("POST", "/api/chat", CHAT))
            await engine.arrived.wait()
            second = asyncio.create_task(router.ask("POST", "/api/generate", {"model": "tiny", "prompt": "x"}))
            queue = router.listeners.services["ns/tiny"].queue
            await eventually(lambda: queue.queued == 1)
            status, refused = await router.ask("POST", "/api/chat", CHAT)
            assert (status, "the queue is full" in refused["error"]) == (503, True)
            for _ in range(2):
                engine.release(b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n')
                engine.end()
            answers = await asyncio.gather(first, second)
    assert [(status, lines[-1]["done"]) for status, lines in answers] == [(200, True)] * 2


@pytest.mark.interpreted  # it replaces the times of comments
async def test_nothing_is_sent_to_a_client_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_COMMENT_SECONDS", "COMMENT_SECONDS", "_SWEEP_SECONDS"):
        monkeypatch.setattr(f"gateway.proxy.keep_alive.{name}", 0.01)
    engine = GatedEngine()
    async with fake_engine(engine) as backend, serve_router(make_service(backend)) as router:
        asked = asyncio.create_task(router.ask("POST", "/api/chat", CHAT))
        async with router.http.post(f"{router.url}/v1/chat/completions", json=CHAT | {"stream": True}) as comments:
            assert (await comments.content.readline()).startswith(b":")  # so it would have come by now
            comments.close()
        for _ in range(2):
            engine.release(b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n')
            engine.end()
        status, lines = await asked
    assert (status, len(lines)) == (200, 2)


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [(400, "too long", 400), (500, "no memory", 500), (401, "who", 502), (503, "loads", 503)],
)
async def test_an_error_of_an_engine_has_ollamas_form(status: int, error: str, expected: int) -> None:
    refuse = answer({"error": {"message": error, "type": "x"}}, [], status=status)
    async with fake_engine(refuse) as backend, serve_router(make_service(backend)) as router:
        for path, more in (("/api/chat", {}), ("/api/embed", {"input": "x"}), ("/api/generate", {"prompt": "x"})):
            got, said = await router.ask("POST", path, CHAT | more)
            assert (got, set(said), error in said["error"]) == (expected, {"error"}, True)


async def test_vectors_come_back_in_both_forms() -> None:
    seen: list[dict[str, Any]] = []
    one = {"data": [{"index": 0, "embedding": [0.6, 0.8]}], "usage": {"prompt_tokens": 3}}
    async with fake_engine(answer(one, seen)) as backend, serve_router(make_service(backend)) as router:
        status, embedded = await router.ask("POST", "/api/embed", {"model": "tiny", "input": "x"})
        assert (status, embedded["embeddings"], embedded["prompt_eval_count"]) == (200, [[0.6, 0.8]], 3)
        older = await router.ask("POST", "/api/embeddings", {"model": "tiny", "prompt": "x"})
        assert older == (200, {"embedding": [0.6, 0.8]})
        assert (await router.ask("POST", "/api/embeddings", {"model": "tiny", "input": "x"}))[0] == 400
        assert await router.ask("POST", "/api/embed", {"model": "tiny"}) == (200, {"model": "tiny", "embeddings": []})
    assert [request["path"] for request in seen] == ["/v1/embeddings"] * 2


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), (-1, "load"), ("5m", "load"), (0, "unload")])
async def test_a_model_is_loaded_and_unloaded_by_a_request_without_input(keep_alive: object, reason: str) -> None:
    async with serve_router(make_service(Backend("a", "http://127.0.0.1:1")), make_service(name="ns/loads")) as router:
        for path in ("/api/chat", "/api/generate"):
            status, said = await router.ask("POST", path, {"model": "tiny", "keep_alive": keep_alive})
            assert (status, said["done"], said["done_reason"]) == (200, True, reason)
        status, _ = await router.ask("POST", "/api/generate", {"model": "loads", "keep_alive": keep_alive})
        assert status == (200 if reason == "unload" else 503)
        assert (await router.ask("POST", "/api/generate", {"model": "no", "keep_alive": keep_alive}))[0] == 404


async def test_a_pull_of_what_is_served_succeeds_and_another_needs_pomona_up() -> None:
    async with serve_router(ServiceListener("ns/tiny", "127.0.0.1", 0, TOKEN, facts=FACTS)) as router:
        status, lines = await router.ask("POST", "/api/pull", {"model": "tiny:latest"})
        assert (status, lines[0], lines[-1]) == (200, {"status": "pulling manifest"}, {"status": "success"})
        assert lines[1] == {
            "status": "pulling abababababab",
            "digest": f"sha256:{FACTS.digest}",
            "total": 10,
            "completed": 10,
        }
        assert await router.ask("POST", "/api/pull", {"model": "tiny", "stream": False}) == (200, {"status": "success"})
        status, lines = await router.ask("POST", "/api/pull", {"name": "other"})
        assert (status, lines[0]) == (200, {"status": "pulling manifest"})
        assert "while `pomona up` does not run: start it again" in lines[1]["error"]
        assert (await router.ask("POST", "/api/pull", {"name": "other", "stream": False}))[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/create", 501),
        ("POST", "/api/push", 501),
        ("POST", "/api/copy", 501),
        ("HEAD", "/api/blobs/sha256:0", 501),
        ("POST", "/api/blobs/sha256:0", 501),
        ("DELETE", "/api/delete", 503),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
        ("GET", "/api/delete", 405),
        ("POST", "/api/me", 404),
        ("GET", "/api/", 404),
    ],
)
async def test_what_is_not_served_is_refused_in_words(method: str, path: str, status: int) -> None:
    async with serve_router(make_service()) as router:
        got, said = await router.ask(method, path, {"model": "tiny"})
    assert got == status
    assert method == "HEAD" or set(said) == {"error"}


@pytest.mark.parametrize("path", ["/api/chat", "/api/show", "/api/pull", "/api/embed"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"model":5}', b'{"model":"' + bytes(300_000) + b'"}']
)
async def test_a_wrong_body_is_the_clients_fault(path: str, body: bytes) -> None:
    async with serve_router(make_service()) as router:
        status, said = await router.ask("POST", path, body)
    assert (status in {400, 413}, set(said)) == (True, {"error"})
