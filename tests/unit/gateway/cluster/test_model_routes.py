"""Routes at the gateway: what opens them, which service answers, what is counted there, and which stands in for it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.cluster.routed_service import RoutedService
from gateway.proxy import keep_alive
from gateway.proxy.metrics import render_metrics
from kube.resources import INFERENCE_SERVICES, MODEL_ROUTES, ObjectKey
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, RunningGateway
from tests.unit.gateway.proxy.running_proxy import GatedEngine, Handler, fake_engine

OTHER = "pomona-another-secret-that-is-long"
TEXT_EVENT = b'data: {"choices":[{"delta":{"content":"a"}}],"model":"any"}\n\n'
NOBODY = "http://127.0.0.1:1"
LONG = {"error": {"message": "request (9 tokens) exceeds", "type": "exceed_context_size_error", "code": 400}}


class Engines:
    """Engines of services, each of which counts its requests and answers with the name of its service."""

    def __init__(self, gateway: RunningGateway, stack: contextlib.AsyncExitStack) -> None:
        self.asked: Counter[str] = Counter()
        self._gateway = gateway
        self._stack = stack

    async def serve(
        self, name: str, *handlers: Handler, access: tuple[str, ...] = (), namespace: str = "team-a"
    ) -> None:
        """Serve a service with an endpoint for each handler; without any, with one that answers."""

        def count(handler: Handler) -> Handler:
            async def answer(request: web.BaseRequest) -> web.StreamResponse:
                self.asked[name] += 1
                return await handler(request)

            return answer

        async def answer_with_name(request: web.BaseRequest) -> web.StreamResponse:
            if (await request.json()).get("stream"):
                body = (
                    b'data: {"choices":[{"delta":{"content":"%b"}}],"model":"any"}\n\ndata: [DONE]\n\n' % name.encode()
                )
                return web.Response(body=body, content_type="text/event-stream")
            usage = {"prompt_tokens": 7, "completion_tokens": 5}
            return web.json_response({"choices": [{"message": {"content": name}}], "model": "any", "usage": usage})

        urls = [
            (await self._stack.enter_async_context(fake_engine(count(handler)))).url
            for handler in handlers or (answer_with_name,)
        ]
        self._gateway.cluster.serve(namespace, name, *urls, access=access)


@pytest.fixture
async def engines(gateway: RunningGateway) -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        yield Engines(gateway, stack)


def refuse(status: int, body: Any = None) -> Handler:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        message = body or {"error": {"message": "no", "type": "server_error"}}
        return web.json_response(message, status=status, headers={"Retry-After": "7"})

    return answer


async def break_off(request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport
    request.transport.close()
    return web.Response()


class Answer:
    """The response to a request for one word."""

    def __init__(self, response: aiohttp.ClientResponse, text: str) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = text

    @property
    def service(self) -> str:
        """The service that answered, as the engine says, and as the header does."""
        assert self.status == 200, self.text
        namespace, _, name = self.headers["X-Pomona-Service"].partition("/")
        assert f'"content":"{name}"' in self.text.replace(" ", "")
        return name if namespace == "team-a" else f"{namespace}/{name}"


async def ask(
    http: aiohttp.ClientSession,
    gateway: RunningGateway,
    model: str,
    *,
    stream: bool = False,
    says: str = "hi",
    path: str = "chat/completions",
    secret: str = "",
) -> Answer:
    body = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": says}], "stream": stream}
    headers = {"Authorization": f"Bearer {secret}"} if secret else AUTHORIZED
    async with http.post(f"{gateway.url}/v1/{path}", json=body, headers=headers) as response:
        return Answer(response, (await response.read()).decode())


def counts(gateway: RunningGateway, name: str) -> RoutedService:
    """Return a service, for what it has counted."""
    return gateway.cluster.feed.catalog.services[ObjectKey("team-a", name)]


async def model_names(http: aiohttp.ClientSession, gateway: RunningGateway) -> list[str]:
    async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
        return [model["id"] for model in (await response.json())["data"]]


# Who answers


@pytest.mark.parametrize("stream", [False, True])
async def test_model_in_the_answer_is_the_name_that_was_asked_for(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, stream: bool
) -> None:
    gateway.cluster.put_key()
    await engines.serve("small")
    gateway.cluster.put_route("gpt-4.1", {"small": 1})
    answer = await ask(http, gateway, "gpt-4.1", stream=stream)
    assert answer.service == "small"
    assert '"model":"gpt-4.1"' in answer.text.replace(" ", "")


async def test_header_names_the_service_whatever_an_engine_says(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    async def lie(_request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"choices": []}, headers={"x-pomona-service": "team-b/large"})

    gateway.cluster.put_key()
    await engines.serve("small", lie)
    await engines.serve("bad", refuse(500))
    for model in ("small", "team-a/small", "bad"):
        answer = await ask(http, gateway, model)
        assert answer.headers.getall("X-Pomona-Service") == [f"team-a/{model.rpartition('/')[2]}"]


async def test_conversation_stays_at_one_service_and_others_are_shared_by_weight(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key()
    for name in ("one", "two", "never"):
        await engines.serve(name)
    gateway.cluster.put_route("r", {"one": 1, "two": 1, "never": 0})
    by_conversation = {says: (await ask(http, gateway, "r", says=says)).service for says in map(str, range(40))}
    assert set(by_conversation.values()) == {"one", "two"}
    for says, service in by_conversation.items():
        assert (await ask(http, gateway, "r", says=says)).service == service
    # Embeddings are of no conversation.
    engines.asked.clear()
    for _ in range(40):
        body = {"model": "r", "input": "hi"}
        await http.post(f"{gateway.url}/v1/embeddings", json=body, headers=AUTHORIZED)
    assert set(engines.asked) == {"one", "two"}


async def test_routes_are_listed_with_what_holds_for_all_of_their_services(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    cluster = gateway.cluster
    cluster.put_key()
    cluster.serve("team-a", "small", NOBODY)
    cluster.serve("team-a", "asleep", phase="Suspended")
    for name, length in (("long", 65_536), ("short", 2048)):
        status = {"phase": "Progressing", "serving": {"contextLength": length}}
        cluster.put(INFERENCE_SERVICES, "team-a", name, spec={"modelRef": "weights"}, status=status)
    cluster.put_route("r", {"small": 1, "short": 1}, {"long": ["Unavailable"]})
    cluster.put_route("grows", {"small": 1}, {"long": ["ContextTooLong"]})
    cluster.put_route("sleepy", {"asleep": 1})
    cluster.put_route("nothing", {"missing": 1})
    cluster.put_route("theirs", {"small": 1}, namespace="team-b")
    async with http.get(f"{gateway.url}/v1/models", headers=AUTHORIZED) as response:
        models = {model["id"]: model for model in (await response.json())["data"]}
    assert list(models) == ["asleep", "grows", "long", "r", "short", "sleepy", "small"]
    assert [models[name]["context_length"] for name in ("r", "grows")] == [2048, 65_536]
    assert [models[name]["status"]["value"] for name in ("r", "sleepy")] == ["loaded", "unloaded"]
    assert models["r"]["pomona"] == {"route": "team-a/r", "services": ["team-a/small", "team-a/short"]}


# Who may


async def test_route_opens_nothing_that_the_key_does_not_open(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key(services=["small", "route"])
    await engines.serve("small")
    await engines.serve("large")
    await engines.serve("theirs", namespace="team-b", access=("team-a",))
    await engines.serve("closed", namespace="team-b")
    for target in ("large", "team-b/theirs", "team-b/closed", "missing"):
        gateway.cluster.put_route("route", {target: 1}, {target: []})
        answer = await ask(http, gateway, "route")
        assert answer.status == 404
        assert target not in answer.text
        assert "route" not in await model_names(http, gateway)
    # What it opens of a route gets all of the requests, also in place of a fallback.
    gateway.cluster.put_route("route", {"small": 1, "large": 1000}, {"large": []})
    assert {(await ask(http, gateway, "route", says=says)).service for says in "abcdef"} == {"small"}
    gateway.cluster.put_route("route", {"large": 1}, {"team-b/theirs": [], "small": ["Unavailable"]})
    assert (await ask(http, gateway, "route")).service == "small"
    assert set(engines.asked) == {"small"}


async def test_route_leads_to_a_service_of_another_namespace_only_while_that_admits_its_own(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key()
    await engines.serve("theirs", namespace="team-b", access=("team-a",))
    gateway.cluster.put_route("route", {"team-b/theirs": 1})
    assert (await ask(http, gateway, "route")).service == "team-b/theirs"
    spec: dict[str, Any] = {"modelRef": "weights", "access": {"namespaces": ["team-c"]}}
    gateway.cluster.put(INFERENCE_SERVICES, "team-b", "theirs", spec=spec)
    assert (await ask(http, gateway, "route")).status == 404
    assert engines.asked["theirs"] == 1


async def test_route_of_another_namespace_is_no_name(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    """Neither can a tenant take over names of others, nor does a route have a name in other namespaces."""
    gateway.cluster.put_key()
    await engines.serve("mine")
    await engines.serve("evil", namespace="team-b", access=("*",))
    for name in ("mine", "route"):
        gateway.cluster.put_route(name, {"evil": 1}, namespace="team-b")
    assert (await ask(http, gateway, "mine")).service == "mine"
    for model in ("route", "team-b/route", "team-b/mine"):
        assert (await ask(http, gateway, model)).status == 404


async def test_route_takes_the_name_of_a_service_over_and_leads_no_prompt_out_of_the_namespace(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key()
    gateway.cluster.put_key("team-b", "theirs", OTHER)
    for name in ("chat", "chat-2"):
        await engines.serve(name, access=("team-b",))
    await engines.serve("evil", namespace="team-b", access=("*",))
    gateway.cluster.put_route("chat", {"chat-2": 1, "team-b/evil": 1000}, {"team-b/evil": []})
    assert {(await ask(http, gateway, "chat", says=says)).service for says in "abcdef"} == {"chat-2"}
    assert await model_names(http, gateway) == ["chat", "chat-2", "team-a/chat", "team-b/evil"]
    # NAMESPACE/SERVICE is always the service, and for others nothing has changed.
    for secret in ("", OTHER):
        assert (await ask(http, gateway, "team-a/chat", secret=secret)).service == "chat"
    gateway.cluster.put_route("chat", {"team-b/evil": 1})
    assert (await ask(http, gateway, "chat")).service == "chat"
    assert not engines.asked["evil"]
    gateway.cluster.remove(MODEL_ROUTES, "team-a", "chat")
    assert (await ask(http, gateway, "chat")).service == "chat"


# Fallbacks


FAILURES: dict[str, tuple[list[Handler] | str, str]] = {
    "busy": ([refuse(429)], "NoCapacity"),
    "all busy": ([refuse(429), refuse(429)], "NoCapacity"),
    "unavailable": ([refuse(503)], "Unavailable"),
    "bad gateway": ([refuse(502)], "Unavailable"),
    "broken off": ([break_off], "Unavailable"),
    "refused": (NOBODY, "Unavailable"),
    "no endpoint": ("", "Unavailable"),
    "too long for llama.cpp": ([refuse(400, LONG)], "ContextTooLong"),
    "too long for vLLM": (
        [refuse(400, {"object": "error", "message": "This model's maximum context length is 8 tokens.", "code": 400})],
        "ContextTooLong",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
async def test_service_stands_in_by_cause(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, failure: str, stream: bool
) -> None:
    cluster, (how, cause) = gateway.cluster, FAILURES[failure]
    cluster.put_key()
    if isinstance(how, str):
        cluster.serve("team-a", "first", *filter(None, [how]))
    else:
        await engines.serve("first", *how)
    for name in ("other", "last"):
        await engines.serve(name)
    others = [other for other in ("NoCapacity", "Unavailable", "ContextTooLong") if other != cause]
    cluster.put_route("r", {"first": 1}, {"other": others, "last": [cause]})
    answer = await ask(http, gateway, "r", stream=stream)
    assert answer.service == "last"
    assert '"model":"r"' in answer.text.replace(" ", "")
    cluster.put_route("any", {"first": 1}, {"other": []})
    assert (await ask(http, gateway, "any", stream=stream)).service == "other"
    # Without a fallback for the cause the client gets the error.
    cluster.put_route("r", {"first": 1}, {"other": others})
    assert (await ask(http, gateway, "r", stream=stream)).status in {400, 429, 502, 503}
    assert (engines.asked["other"], engines.asked["last"]) == (1, 1)

    # Each request is counted once, at the service that ended it, and nothing is left running.
    first, other, last = (counts(gateway, name) for name in ("first", "other", "last"))
    assert first.metrics.fallbacks == {cause: 2}
    assert [service.metrics.requests.total() for service in (first, other, last)] == [1, 1, 1]
    assert other.metrics.errors.total() == last.metrics.errors.total() == 0
    for service in (first, other, last):
        assert (service.queue.in_flight, service.running_requests()) == (0, ())
        assert [endpoint.outstanding_tokens for endpoint in service.endpoints.values()] == [0] * len(service.endpoints)
    series = render_metrics({"team-a/first": first}, "pomona_gateway").decode()
    assert f'pomona_gateway_fallbacks_total{{cause="{cause}",namespace="team-a",service="first"}} 2.0' in series


@pytest.mark.parametrize("message", ["Messages of Anthropic have no code", "nothing"])
async def test_proxy_in_between_hides_no_context_that_is_too_long(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, message: str
) -> None:
    """A proxy of an endpoint has translated the error: on Anthropic's paths, only its message tells."""
    ending = ": send less, or set spec.contextLength of the InferenceService"
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": message + ending}}
    gateway.cluster.put_key()
    await engines.serve("first", refuse(400, error))
    gateway.cluster.put_route("r", {"first": 1}, {"first": []})
    answer = await ask(http, gateway, "r", path="messages")
    assert (answer.status, answer.text.count("send less")) == (400, 1)
    await engines.serve("long")
    gateway.cluster.put_route("r", {"first": 1}, {"long": ["ContextTooLong"]})
    assert (await ask(http, gateway, "r", path="messages")).service == "long"


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_error_of_the_request_or_of_an_engine_that_works_goes_nowhere(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, status: int
) -> None:
    gateway.cluster.put_key()
    await engines.serve("first", refuse(status, {"error": {"message": "out of cheese"}}))
    await engines.serve("other")
    gateway.cluster.put_route("r", {"first": 1}, {"other": []})
    assert (await ask(http, gateway, "r")).status == status
    assert not engines.asked["other"]


async def test_no_service_is_tried_twice_and_the_last_error_counts(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key()
    await engines.serve("busy", refuse(429))
    await engines.serve("away", refuse(503))
    await engines.serve("small", refuse(400, LONG))
    gateway.cluster.put_route("r", {"busy": 1}, {"busy": [], "away": [], "small": []})
    answer = await ask(http, gateway, "r")
    assert (answer.status, answer.headers["X-Pomona-Service"]) == (400, "team-a/small")
    assert "context_length_exceeded" in answer.text
    gateway.cluster.put_route("r", {"small": 1}, {"busy": [], "away": ["ContextTooLong"]})
    answer = await ask(http, gateway, "r")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    assert engines.asked == {"busy": 2, "away": 1, "small": 2}


async def test_weighted_services_stand_in_for_each_other(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    gateway.cluster.put_key()
    await engines.serve("one")
    gateway.cluster.serve("team-a", "two", NOBODY)
    gateway.cluster.put_route("r", {"one": 1, "two": 1}, {"one": [], "two": []})
    for says in "abcdefgh":
        assert (await ask(http, gateway, "r", says=says)).service == "one"
    gateway.cluster.remove(INFERENCE_SERVICES, "team-a", "two")
    assert (await ask(http, gateway, "r")).service == "one"


async def test_request_that_two_engines_broke_off_goes_nowhere_else(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    """It may be what makes engines fail, whichever service they are of."""
    gateway.cluster.put_key()
    await engines.serve("first", break_off, break_off, break_off)
    await engines.serve("second", break_off)
    await engines.serve("third")
    gateway.cluster.put_route("r", {"first": 1}, {"second": [], "third": []})
    assert (await ask(http, gateway, "r")).status == 502
    assert engines.asked == {"first": 2}
    gateway.cluster.put_route("r", {"second": 1}, {"first": [], "third": []})
    assert (await ask(http, gateway, "r")).status == 502
    assert engines.asked == {"first": 3, "second": 1}


@pytest.mark.parametrize("begun", [False, True])
async def test_nothing_stands_in_once_an_answer_has_begun(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, begun: bool
) -> None:
    """The head of a stream is no answer yet: engines send it before they compute the prompt."""
    engine = GatedEngine()
    gateway.cluster.put_key()
    await engines.serve("first", engine)
    await engines.serve("other")
    gateway.cluster.put_route("r", {"first": 1}, {"other": []})
    if begun:
        engine.release(TEXT_EVENT)
    engine.release(b"CUT")
    answer = await ask(http, gateway, "r", stream=True)
    assert ("upstream_failed" in answer.text) == begun
    assert (answer.status, engines.asked["other"]) == (200, not begun)


async def test_comments_are_no_beginning_of_an_answer(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "FIRST_COMMENT_SECONDS", 0.2)
    go_on = asyncio.Event()

    async def refuse_late(_request: web.BaseRequest) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({}, status=503)

    gateway.cluster.put_key()
    await engines.serve("first", refuse_late)
    await engines.serve("other")
    gateway.cluster.put_route("r", {"first": 1}, {"other": []})
    body = {"model": "r", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
        assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
        assert "X-Pomona-Service" not in response.headers
        go_on.set()
        assert b'"content":"other"' in await response.content.read()


async def test_running_request_is_of_the_service_that_answers(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    """So the end of the key ends it, and its usage is counted there."""
    engine = GatedEngine()
    gateway.cluster.put_key()
    await engines.serve("first", refuse(503))
    await engines.serve("other", engine)
    gateway.cluster.put_route("r", {"first": 1}, {"other": []})
    body = {"model": "r", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    engine.release(TEXT_EVENT)
    async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
        await response.content.readuntil(b"\n\n")
        services = [counts(gateway, name) for name in ("first", "other")]
        assert [(len(service.running_requests()), service.queue.in_flight) for service in services] == [(0, 0), (1, 1)]
        gateway.cluster.put_key(suspend=True)
        assert b'"key_revoked"' in await response.content.read()
    assert [usage.service for usage in gateway.cluster.feed.admissions.usage.list_usages()] == ["team-a/other"]


async def test_client_that_leaves_ends_the_request_at_the_service_that_stands_in(
    gateway: RunningGateway, http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = GatedEngine()
    gateway.cluster.put_key()
    await engines.serve("first", refuse(429))
    await engines.serve("other", engine)
    gateway.cluster.put_route("r", {"first": 1}, {"other": []})
    asking = asyncio.ensure_future(ask(http, gateway, "r", stream=True))
    await asyncio.wait_for(engine.arrived.wait(), 5)
    asking.cancel()  # the client leaves
    await asyncio.wait_for(engine.cancelled.wait(), 5)
    assert [counts(gateway, name).metrics.requests for name in ("first", "other")] == [{}, {("chat", 499): 1}]
