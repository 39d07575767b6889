"""The gateway from its listener to engines: who may ask which service, its limits, its streams and their errors."""

import asyncio
import contextlib
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.proxy import keep_alive
from kube.resources import GATEWAY_KEYS, GATEWAY_QUOTAS
from tests.unit.gateway.cluster.running_gateway import (
    AUTHORIZED,
    SECRET,
    NamedEngine,
    RunningGateway,
    answer_of,
    ask,
    in_seconds,
)
from tests.unit.gateway.proxy.running_proxy import GatedEngine, error_code, fake_engine

OTHER = "pomona-another-secret-that-is-long"
TEXT_EVENT = b'data: {"choices":[{"delta":{"content":"a"}}],"model":"chat"}\n\n'


async def test_key_reaches_services_of_its_namespace_and_those_that_admit_it(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    engines = [NamedEngine(name) for name in ("own", "open", "for-all", "closed")]
    async with contextlib.AsyncExitStack() as stack:
        own, opened, for_all, closed = [
            (await stack.enter_async_context(fake_engine(engine))).url for engine in engines
        ]
        cluster = gateway.cluster
        cluster.put_key()
        cluster.serve("team-a", "chat", own)
        cluster.serve("team-b", "chat", opened, access=("team-a",))
        cluster.serve("team-b", "public", for_all, access=("*",))
        cluster.serve("team-b", "private", closed, access=("team-c",))
        for model, name in (
            ("chat", "own"),
            ("team-a/chat", "own"),
            ("team-b/chat", "open"),
            ("team-b/public", "for-all"),
        ):
            async with ask(http, gateway, model) as response:
                assert await answer_of(response) == name
        for model in ("team-b/private", "public", "private", "team-a/", "/", "nothing"):
            async with ask(http, gateway, model) as response:
                assert (response.status, error_code(await response.json())) == (404, "model_not_found")
        async with ask(http, gateway, None) as response:
            assert (response.status, error_code(await response.json())) == (400, "missing_model")
        assert not engines[3].tokens

        # What it may not use is not named, either.
        async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
            names = [model["id"] for model in (await response.json())["data"]]
        assert names == ["chat", "team-b/chat", "team-b/public"]


async def test_patterns_of_a_key_limit_what_it_opens(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.put_key(services=["small-*"])
        gateway.cluster.serve("team-a", "small-chat", backend.url)
        gateway.cluster.serve("team-a", "large-chat", backend.url)
        async with ask(http, gateway, "small-chat") as response:
            assert await answer_of(response) == "one"
        async with ask(http, gateway, "large-chat") as response:
            assert response.status == 404


async def test_models_are_listed_without_replicas_too(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    gateway.cluster.put_key()
    gateway.cluster.serve("team-a", "chat", "http://127.0.0.1:1")
    gateway.cluster.serve("team-a", "sleepy", phase="Suspended")
    async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
        chat, sleepy = (await response.json())["data"]
    assert (chat["id"], chat["context_length"]) == ("chat", 4096)
    assert (chat["max_model_len"], chat["status"]) == (4096, {"value": "loaded"})
    assert (sleepy["id"], sleepy["status"]) == ("sleepy", {"value": "unloaded"})
    async with http.get(f"{gateway.url}/v1/models/team-a/sleepy", headers=AUTHORIZED) as response:
        assert response.status == 404  # it is listed by its short name
    async with http.get(f"{gateway.url}/v1/models/sleepy", headers=AUTHORIZED) as response:
        assert (await response.json())["id"] == "sleepy"
    async with ask(http, gateway, "sleepy") as response:
        assert (response.status, error_code(await response.json())) == (503, "service_unavailable")
        assert 1 <= int(response.headers["Retry-After"]) <= 120


@pytest.mark.parametrize(
    "spec", [{"suspend": True}, {"expiresAt": in_seconds(-1)}, {"expiresAt": "2026-13-40T00:00:00Z"}]
)
async def test_key_that_is_not_valid_is_refused(
    gateway: RunningGateway, http: aiohttp.ClientSession, spec: dict[str, Any]
) -> None:
    gateway.cluster.serve("team-a", "chat", "http://127.0.0.1:1")
    gateway.cluster.put_key(**spec)
    for secret in (SECRET, "wrong", ""):
        async with ask(http, gateway, secret=secret) as response:
            assert (response.status, error_code(await response.json())) == (401, "invalid_api_key")
    async with http.get(f"{gateway.url}/v1/models") as response:
        assert response.status == 401


async def test_replaced_key_is_valid_until_its_end(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.put_key(secret=OTHER, previous={SECRET: in_seconds(600), "former": in_seconds(-1)})
        for secret, status in ((OTHER, 200), (SECRET, 200), ("former", 401)):
            async with ask(http, gateway, secret=secret) as response:
                assert response.status == status
        gateway.cluster.put_key(secret=OTHER)
        async with ask(http, gateway, secret=SECRET) as response:
            assert response.status == 401


async def test_copied_digest_takes_nothing_over(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.put_key("team-b", "thief", born="2026-11-29T13:00:00Z")
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.serve("team-b", "chat", "http://127.0.0.1:1")
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "one"
        gateway.cluster.remove(GATEWAY_KEYS, "team-b", "thief")
        async with ask(http, gateway) as response:
            assert await answer_of(response) == "one"


@pytest.mark.parametrize("how", ["deleted", "suspended", "replaced", "expired"])
async def test_revoked_key_ends_its_streams_by_an_event(
    gateway: RunningGateway, http: aiohttp.ClientSession, how: str
) -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.put_key()
        gateway.cluster.put_key("team-a", "other", OTHER)
        engine.release(TEXT_EVENT)
        async with ask(http, gateway, stream=True) as ended:
            assert await ended.content.readuntil(b"\n\n") == TEXT_EVENT
            if how == "deleted":
                gateway.cluster.remove(GATEWAY_KEYS, "team-a", "ci")
            elif how == "expired":
                gateway.cluster.put_key(expiresAt=in_seconds(0.5))
            elif how == "suspended":
                gateway.cluster.put_key(suspend=True)
            else:
                gateway.cluster.put_key(secret="pomona-new-secret")
            began = time.monotonic()
            rest = await ended.content.read()
            assert b'"key_revoked"' in rest
            assert b"[DONE]" not in rest
            assert time.monotonic() - began < 5
        await asyncio.wait_for(engine.cancelled.wait(), 5)


async def test_stream_of_another_key_goes_on(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.put_key()
        gateway.cluster.put_key("team-a", "other", OTHER)
        engine.release(TEXT_EVENT)
        async with ask(http, gateway, secret=OTHER, stream=True) as response:
            await response.content.readuntil(b"\n\n")
            gateway.cluster.remove(GATEWAY_KEYS, "team-a", "ci")
            engine.release(TEXT_EVENT)
            engine.end()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "comment"),
    [("/v1/chat/completions", b": waiting\n\n"), ("/v1/messages", b'event: ping\ndata: {"type": "ping"}\n\n')],
)
@pytest.mark.interpreted
async def test_stream_that_waits_gets_comments(
    gateway: RunningGateway,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    comment: bytes,
) -> None:
    monkeypatch.setattr(keep_alive, "FIRST_COMMENT_SECONDS", 0.2)
    monkeypatch.setattr(keep_alive, "COMMENT_SECONDS", 0.2)
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        body = {"model": "chat", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        async with http.post(f"{gateway.url}{path}", json=body, headers=AUTHORIZED) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for _ in range(2):
                assert await response.content.readuntil(b"\n\n") == comment.partition(b"\n\n")[0] + b"\n\n"
            engine.release(TEXT_EVENT)
            engine.release(b"CUT")
            rest = (await response.content.read()).replace(comment, b"")
            assert rest.startswith(TEXT_EVENT)
            assert b"upstream_failed" in rest or b"api_error" in rest


@pytest.mark.interpreted
async def test_error_after_comments_is_an_event(
    gateway: RunningGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "FIRST_COMMENT_SECONDS", 0.2)
    answers: asyncio.Queue[web.Response] = asyncio.Queue()

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return await answers.get()

    async with fake_engine(answer) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        for late in (web.json_response({"error": {"message": "full"}}, status=503), web.json_response({"choices": []})):
            async with ask(http, gateway, stream=True) as response:
                assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
                answers.put_nowait(late)
                assert (await response.content.read()).startswith(b'data: {"error":')


async def test_error_in_the_first_seconds_keeps_its_status(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    """Although the engine has sent the head of a stream before it breaks off."""
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        engine.release(b"CUT")
        async with ask(http, gateway, stream=True) as response:
            assert (response.status, error_code(await response.json())) == (502, "upstream_failed")


async def test_client_that_leaves_ends_the_request_of_the_engine(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    for stream in (True, False):
        engine = GatedEngine()
        async with fake_engine(engine) as backend:
            gateway.cluster.put_key()
            gateway.cluster.serve("team-a", "chat", backend.url)
            asking = asyncio.ensure_future(ask(http, gateway, stream=stream).__aenter__())
            await asyncio.wait_for(engine.arrived.wait(), 5)
            asking.cancel()
            began = time.monotonic()
            await asyncio.wait_for(engine.cancelled.wait(), 5)
            assert time.monotonic() - began < 1


async def test_health_needs_no_key(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{gateway.url}/health") as response:
        assert response.status == 200
    gateway.cluster.feed._listed[0].clear()
    async with http.get(f"{gateway.url}/health") as response:
        assert response.status == 503


async def test_limits_of_a_key_refuse_with_the_way_out(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.put_key(requestsPerMinute=2)
        gateway.cluster.put_key("team-a", "other", OTHER)
        gateway.cluster.serve("team-a", "chat", backend.url)
        for remaining in ("1", "0"):
            async with ask(http, gateway) as response:
                assert await answer_of(response) == "one"
                assert response.headers["x-ratelimit-limit-requests"] == "2"
                assert response.headers["x-ratelimit-remaining-requests"] == remaining
        async with ask(http, gateway) as response:
            assert (response.status, error_code(answer := await response.json())) == (429, "rate_limit_exceeded")
            assert "GatewayKey team-a/ci: spec.requestsPerMinute 2 is used up" in answer["error"]["message"]
            assert 1 <= int(response.headers["Retry-After"]) <= 120
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        async with ask(http, gateway, secret=OTHER) as response:
            assert await answer_of(response) == "one"
            assert "x-ratelimit-limit-requests" not in response.headers


async def test_nothing_but_the_key_says_who_asks(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.put_key(requestsPerMinute=1)
        gateway.cluster.serve("team-a", "chat", backend.url)
        async with ask(http, gateway) as response:
            assert response.status == 200
        another = {"user": "b", "safety_identifier": "b", "metadata": {"user_id": "b"}, "service_tier": "priority"}
        headers = AUTHORIZED | {"user": "b", "X-User-Id": "b", "X-Forwarded-For": "10.9.9.9", "X-Pomona-Service": "b"}
        body = another | {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert (response.status, error_code(await response.json())) == (429, "rate_limit_exceeded")


async def test_quota_of_a_namespace_holds_over_all_its_keys(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(NamedEngine("one")) as backend:
        gateway.cluster.put_key()
        gateway.cluster.put_key("team-a", "other", OTHER)
        gateway.cluster.serve("team-a", "chat", backend.url)
        gateway.cluster.put(GATEWAY_QUOTAS, "", "team-a", spec={"requestsPerMinute": 2})
        for secret in (SECRET, OTHER):
            async with ask(http, gateway, secret=secret) as response:
                assert response.status == 200
        for secret in (SECRET, OTHER):
            async with ask(http, gateway, secret=secret) as response:
                assert response.status == 429
                assert "GatewayQuota team-a: spec.requestsPerMinute 2" in (await response.json())["error"]["message"]
        gateway.cluster.remove(GATEWAY_QUOTAS, "", "team-a")
        async with ask(http, gateway) as response:
            assert response.status == 200


async def test_concurrent_requests_are_counted_until_they_end(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key(concurrentRequests=1)
        gateway.cluster.serve("team-a", "chat", backend.url)
        engine.release(TEXT_EVENT)
        async with ask(http, gateway, stream=True) as response:
            async with ask(http, gateway) as refused:
                assert (refused.status, error_code(await refused.json())) == (429, "rate_limit_exceeded")
            engine.end()
            await response.content.read()
        async with fake_engine(NamedEngine("one")) as other:
            gateway.cluster.serve("team-a", "chat", other.url)
            async with ask(http, gateway) as response:
                assert await answer_of(response) == "one"


@pytest.mark.parametrize("asks_for_usage", [True, False])
async def test_tokens_are_reserved_and_settled_by_the_counts_of_the_engine(
    gateway: RunningGateway, http: aiohttp.ClientSession, *, asks_for_usage: bool
) -> None:
    """The counts are asked for in each stream, and hidden from a client that has not asked for them."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":20}}\n\n'
    bodies: list[dict[str, Any]] = []

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        bodies.append(json.loads(await request.read()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(TEXT_EVENT + usage + b"data: [DONE]\n\n")
        return response

    async with fake_engine(stream) as backend:
        gateway.cluster.put_key(tokensPerMinute=1000)
        gateway.cluster.serve("team-a", "chat", backend.url)
        body: dict[str, Any] = {"model": "chat", "messages": [], "stream": True, "max_tokens": 400}
        if asks_for_usage:
            body["stream_options"] = {"include_usage": True}
        for number in range(3):  # three reservations of 400 would not fit
            async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                assert response.status == 200
                assert int(response.headers["x-ratelimit-remaining-tokens"]) < 600 - 30 * number
                answer = await response.content.read()
                assert (usage in answer) == asks_for_usage
                assert answer.replace(usage, b"") == TEXT_EVENT + b"data: [DONE]\n\n"
        assert [body["stream_options"] for body in bodies] == [{"include_usage": True}] * 3
        (counted,) = gateway.cluster.feed.admissions.usage.list_usages()
        assert (counted.requests, counted.prompt_tokens, counted.generated_tokens) == (3, 30, 60)

        body["max_tokens"] = 5000
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
            assert (response.status, error_code(await response.json())) == (400, "request_over_limit")
            assert response.headers["x-should-retry"] == "false"


async def test_limits_are_forgotten_with_what_states_them(gateway: RunningGateway) -> None:
    cluster, scopes = gateway.cluster, gateway.cluster.feed.admissions.limiter._scopes
    cluster.put_key(requestsPerMinute=5)
    cluster.put(GATEWAY_QUOTAS, "", "team-a", spec={"requestsPerMinute": 5})
    assert scopes.keys() == {"uid-of-team-a-ci", "uid-of--team-a"}
    cluster.put_key()
    cluster.put(GATEWAY_QUOTAS, "", "team-a", uid="another", spec={"requestsPerMinute": 5})
    assert scopes.keys() == {"another"}
    cluster.put_key(requestsPerMinute=5)
    cluster.remove(GATEWAY_QUOTAS, "", "team-a")
    cluster.remove(GATEWAY_KEYS, "team-a", "ci")
    assert not scopes
