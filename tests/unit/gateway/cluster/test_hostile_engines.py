"""Engines and clients of one tenant do nothing to those of others at the gateway."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.cluster.rate_limits import MINUTE_US, LimitScope
from gateway.proxy import keep_alive
from gateway.proxy.errors import RequestError
from gateway.proxy.metrics import render_metrics
from gateway.proxy.request_body import BodyBudget
from gateway.proxy.responses_stream import ResponsesStream
from kube.resources import GATEWAY_QUOTAS
from tests.support.eventually import eventually
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, RunningGateway
from tests.unit.gateway.proxy.running_proxy import GatedEngine, fake_engine

CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


def read_scopes(gateway: RunningGateway) -> Sequence[LimitScope]:
    """Return the limits of the one key, and of its namespace."""
    (key,) = gateway.cluster.feed.keys.keys.values()
    return key._scopes


@pytest.mark.parametrize("tokens", ["-1000000000000", "1000000000000", "1" + "0" * 400, "2147483647"])
async def test_counts_of_an_engine_charge_no_more_than_a_multiple_of_the_reservation(
    gateway: RunningGateway, http: aiohttp.ClientSession, tokens: str
) -> None:
    """Neither a debt of years nor a gift from the ceiling of the namespace, and the metrics can still be read."""
    usage = f'"usage":{{"prompt_tokens":{tokens},"completion_tokens":1}}'
    text = f'{{"choices":[{{"message":{{"content":"hi"}}}}],{usage}}}'

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    async with fake_engine(answer) as backend:
        gateway.cluster.put_key(tokensPerMinute=100_000)
        gateway.cluster.put(GATEWAY_QUOTAS, "", "team-a", spec={"tokensPerMinute": 100_000})
        gateway.cluster.serve("team-a", "chat", backend.url)
        for _ in range(2):
            async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=AUTHORIZED) as response:
                assert response.status == 200
        for scope in read_scopes(gateway):
            assert 0 < scope.tokens.ends_at_us < time.monotonic_ns() // 1000 + 1_000_000  # 8 * 50 tokens for each
        services = {str(name): service for name, service in gateway.cluster.feed.catalog.services.items()}
        assert b"pomona_gateway_prompt_tokens_total" in render_metrics(services, "pomona_gateway")


@pytest.mark.parametrize(("stream", "least"), [(False, 1000), (True, 10)])
async def test_client_that_leaves_before_the_answer_pays(
    gateway: RunningGateway, http: aiohttp.ClientSession, least: int, *, stream: bool
) -> None:
    """For a whole answer it pays what it has reserved, since the engine may have made it; for a stream its prompt."""
    engine = GatedEngine(kind="text/event-stream" if stream else "application/json")
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key(tokensPerMinute=10_000)
        gateway.cluster.serve("team-a", "chat", backend.url)
        began_us = time.monotonic_ns() // 1000
        body = CHAT | {"stream": stream, "max_tokens": 1000}
        asking = http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED)
        task = asyncio.ensure_future(asking.__aenter__())
        await asyncio.wait_for(engine.arrived.wait(), 5)
        task.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 5)
        (scope,) = read_scopes(gateway)
        assert scope.tokens.ends_at_us - began_us >= least * MINUTE_US // 10_000


def fail_to_render(_stream: ResponsesStream, _error: RequestError) -> bytes:
    raise ValueError("a defect")


@pytest.mark.parametrize("has_defect", [False, True])
@pytest.mark.parametrize("ending", ["engine dies", "key is suspended"])
async def test_stream_of_strange_numbers_ends(
    gateway: RunningGateway,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    *,
    has_defect: bool,
) -> None:
    """Python writes no number of 4,301 digits. A defect of its kind breaks this stream off, and ends nothing else."""
    event = b'event: response.created\ndata: {"type":"response.created","sequence_number":%b}\n\n' % (b"9" * 4300)
    if has_defect:
        monkeypatch.setattr(ResponsesStream, "_render_error", fail_to_render)
    engine_ends = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event)
        await engine_ends.wait()
        assert request.transport
        request.transport.abort()
        return response

    async with fake_engine(answer) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        body = {"model": "chat", "input": "hi", "stream": True}
        async with http.post(f"{gateway.url}/v1/responses", json=body, headers=AUTHORIZED) as response:
            await response.content.readuntil(b"\n\n")
            if ending == "engine dies":
                engine_ends.set()
            else:
                gateway.cluster.put_key(suspend=True)
            with pytest.raises(aiohttp.ClientPayloadError) if has_defect else nullcontext():
                last = await asyncio.wait_for(response.content.read(), 5)
                assert b'"type":"response.failed"' in last
        engine_ends.set()
    (service,) = gateway.cluster.feed.catalog.services.values()
    assert service.queue.in_flight == 0


async def test_no_key_admits_before_all_was_listed(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    """Else a key would have no ceiling until the quotas are there."""
    gateway.cluster.put_key()
    gateway.cluster.feed._listed[-1].clear()
    async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_credentials_for_others_reach_no_engine(gateway: RunningGateway, http: aiohttp.ClientSession) -> None:
    seen: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        fields = {"Retry-After": "86400", "Strict-Transport-Security": "max-age=1"}
        return web.json_response({"error": {"message": "busy"}}, status=429, headers=fields)

    async with fake_engine(answer) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        headers = AUTHORIZED | {"Cookie": "session=1", "Api-Key": "other", "X-Forwarded-Access-Token": "sso"}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert "Strict-Transport-Security" not in response.headers
    assert not {"Cookie", "Api-Key", "X-Forwarded-Access-Token"} & set(seen[0].headers)


@pytest.mark.parametrize("status", [477, 999])
async def test_unknown_status_of_an_engine_is_a_known_one(
    gateway: RunningGateway, http: aiohttp.ClientSession, status: int
) -> None:
    """Else each would be a series of its own."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": {"message": "odd"}}, status=status)

    async with fake_engine(answer) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=AUTHORIZED) as response:
            assert response.status == (400 if status == 477 else 502)


def test_bodies_of_one_namespace_leave_room_for_others() -> None:
    budget = BodyBudget(1000)
    budget.reserve(500, "team-a")
    with pytest.raises(RequestError):
        budget.reserve(1, "team-a")
    budget.reserve(400, "team-b")
    budget.free(500, "team-a")
    budget.reserve(500, "team-a")
    assert budget.held_bytes == 900


async def test_json_whose_head_comes_early_is_no_stream(
    gateway: RunningGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be an orderly stream without a single event."""
    monkeypatch.setattr(keep_alive, "FIRST_COMMENT_SECONDS", 0.1)
    engine = GatedEngine(kind="application/json")
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        asking = http.post(f"{gateway.url}/v1/chat/completions", json=CHAT | {"stream": True}, headers=AUTHORIZED)
        task = asyncio.ensure_future(asking.__aenter__())
        await asyncio.wait_for(engine.arrived.wait(), 5)
        engine.release(b'{"choices":')
        (running,) = next(iter(gateway.cluster.feed.keys.keys.values())).credentials.values()
        (request,) = running.running
        await eventually(lambda: request not in gateway.cluster.shared.keep_alive._requests)
        engine.release(b"[]}")
        engine._chunks.put_nowait(None)
        response = await task
        assert (response.content_type, await response.json()) == ("application/json", {"choices": []})


async def test_tokens_of_messages_are_counted_when_a_client_leaves_early(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    """Their first event reports no generated token, and the prompt without what was cached."""
    tokens = {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3, "output_tokens": 0}
    engine = GatedEngine()
    async with fake_engine(engine) as backend:
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", backend.url)
        start = {"type": "message_start", "message": {"usage": tokens}}
        delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
        for event in (start, delta, delta):
            engine.release(f"event: {event['type']}\n".encode() + b"data: %b\n\n" % msgspec.json.encode(event))
        async with http.post(
            f"{gateway.url}/v1/messages", json=CHAT | {"stream": True}, headers=AUTHORIZED
        ) as response:
            for _ in range(3):
                await response.content.readuntil(b"\n\n")
        await asyncio.wait_for(engine.cancelled.wait(), 5)
    (usage,) = gateway.cluster.feed.admissions.usage.list_usages()
    assert (usage.prompt_tokens, usage.generated_tokens) == (28, 2)
