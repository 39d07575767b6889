"""The client turns network faults into Unreachable and refusals into ApiErrors, and shows no token."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from kube.client import Client, connect
from kube.credentials import Credentials, StaticToken
from kube.errors import ApiError, Forbidden, NotFound, Unreachable
from kube.resources import METAL_HOSTS, PODS, VISIBLE_QUEUES
from tests.support.eventually import eventually

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KUEUE_ANSWERS = Path(__file__).parents[1] / "controller" / "placement" / "kueue_answers"
ClientOf = Callable[[Handler], Awaitable[Client]]


async def read_first(stream: AsyncIterator[Any]) -> object:
    return await anext(stream)


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_server_that_never_answers_is_unreachable(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kube.transport.TOTAL_SECONDS", 0.2)
    client = await client_of(hang)
    with pytest.raises(Unreachable, match="GET /api/v1/namespaces/ns/pods/a"):
        await client.get(PODS, "a", "ns")


async def test_a_body_that_never_ends_is_unreachable(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"kind":')
        return await hang(request)

    monkeypatch.setattr("kube.transport.TOTAL_SECONDS", 0.2)
    client = await client_of(trickle)
    with pytest.raises(Unreachable):
        await client.get(PODS, "a", "ns")


async def test_server_that_hangs_up_is_unreachable_and_a_write_is_not_repeated(client_of: ClientOf) -> None:
    writes = 0

    async def hang_up(request: web.Request) -> web.StreamResponse:
        nonlocal writes
        writes += 1
        assert request.transport
        request.transport.close()
        return web.Response()

    client = await client_of(hang_up)
    with pytest.raises(Unreachable):
        await client.apply(PODS, {"metadata": {"namespace": "ns", "name": "a"}}, field_manager="test")
    assert writes == 1


async def test_applied_texts_arrive_as_they_are(client_of: ClientOf) -> None:
    """The API server reads what is applied as YAML, which has other ends of lines than JSON and refuses controls."""
    bodies = list[bytes]()

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({})

    client = await client_of(answer)
    texts = ["\x7f", "\x80 \x9b2J", "a \x85 b", "a \u2028 b", "a \u2029 b", "\ufeff", "\ufffe\uffff", "ü 𝄞 \\ \x1b\n"]
    obj = {
        "metadata": {"namespace": "ns", "name": "a", "annotations": {str(key): text for key, text in enumerate(texts)}}
    }
    await client.apply(PODS, obj, field_manager="test")
    (body,) = bodies
    for read in (msgspec.json.decode, yaml.safe_load):
        assert read(body) == {"apiVersion": "v1", "kind": "Pod", **obj}


async def test_subresource_is_read_and_the_refusal_of_an_unknown_one_understood(client_of: ClientOf) -> None:
    async def answer(request: web.Request) -> web.Response:
        path = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/models/pendingworkloads"
        if request.path == path:
            return web.json_response(text=(KUEUE_ANSWERS / "two_pending.json").read_text())
        return web.json_response(text=(KUEUE_ANSWERS / "no_such_queue.json").read_text(), status=404)

    client = await client_of(answer)
    summary = await client.get_subresource(VISIBLE_QUEUES, "models", "team", "pendingworkloads")
    assert len(summary["items"]) == 2
    with pytest.raises(NotFound, match='"none" not found'):
        await client.get_subresource(VISIBLE_QUEUES, "none", "team", "pendingworkloads")


async def test_a_refused_connection_is_unreachable() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        async with connect(Credentials(server, StaticToken(None))) as client:
            with pytest.raises(Unreachable):
                await client.get(METAL_HOSTS, "a")


@pytest.mark.parametrize("answer", [b"<html>please log in</html>", b'{"kind": "\xff"}'])
async def test_an_answer_that_is_not_of_the_api_is_unreachable(client_of: ClientOf, answer: bytes) -> None:
    async def portal(_: web.Request) -> web.StreamResponse:
        return web.Response(body=answer)

    client = await client_of(portal)
    with pytest.raises(Unreachable, match="get pods ns/a: the answer is not what the API sends"):
        await client.get(PODS, "a", "ns")


async def test_error_of_a_refusal_without_a_status_object_quotes_the_answer(client_of: ClientOf) -> None:
    async def proxy(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="bad gateway")

    client = await client_of(proxy)
    with pytest.raises(ApiError, match=r"get metalhosts\.inference\.pomona\.dev studio-1: 502 no reason: bad gateway"):
        await client.get(METAL_HOSTS, "studio-1")


async def test_no_error_and_no_repr_shows_the_token(client_of: ClientOf) -> None:
    seen: list[str | None] = []

    async def refuse(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"message": "no", "reason": "Forbidden"}, status=403)

    client = await client_of(refuse)
    with pytest.raises(Forbidden) as refused:
        await client.get(PODS, "a", "ns")
    assert seen == ["Bearer hunter2"]
    assert "hunter2" not in repr(refused.value) + repr(StaticToken("hunter2")) + repr(
        Credentials("", StaticToken("hunter2"))
    )


@pytest.mark.parametrize(("wait", "asked"), [("0", 4), (None, 1)])
async def test_429_is_retried_only_with_a_retry_after(client_of: ClientOf, wait: str | None, asked: int) -> None:
    requests = 0

    async def throttle(_: web.Request) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        headers = {"Retry-After": wait} if wait else {}
        return web.json_response({"message": "slow down"}, status=429, headers=headers)

    client = await client_of(throttle)
    with pytest.raises(ApiError, match="slow down"):
        await client.get(PODS, "a", "ns")
    assert requests == asked


async def test_a_silent_watch_is_unreachable(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        return await hang(request)

    monkeypatch.setattr("kube.client.WATCH_IDLE_SECONDS", 0.2)
    client = await client_of(silence)
    with pytest.raises(Unreachable):
        async for _ in client.watch(PODS, resource_version="1"):
            pass


async def test_a_missing_object_is_not_found(client_of: ClientOf) -> None:
    async def missing(_: web.Request) -> web.StreamResponse:
        return web.json_response({"reason": "NotFound", "message": "no such pod"}, status=404)

    with pytest.raises(NotFound, match="delete pods ns/a: 404 NotFound: no such pod"):
        await (await client_of(missing)).delete(PODS, "a", "ns")


async def test_reconnecting_ends_running_watches(client_of: ClientOf) -> None:
    watches = 0

    async def watched(request: web.Request) -> web.StreamResponse:
        nonlocal watches
        watches += 1
        response = web.StreamResponse()
        await response.prepare(request)
        metadata = {"name": f"watch-{watches}", "namespace": "a", "uid": "u", "resourceVersion": "2"}
        await response.write(msgspec.json.encode({"type": "ADDED", "object": {"metadata": metadata}}) + b"\n")
        await asyncio.Event().wait()
        return response

    client = await client_of(watched)
    first = client.watch(PODS, resource_version="1")
    assert (await anext(first)).object["metadata"]["name"] == "watch-1"
    waiting = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    await client.reconnect()
    async with asyncio.timeout(60):
        with pytest.raises(Unreachable):
            await waiting
    assert (await anext(client.watch(PODS, resource_version="2"))).object["metadata"]["name"] == "watch-2"


async def test_reconnecting_ends_requests_that_wait_for_a_connection(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.transport.CONNECTIONS", 1)
    begun = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        begun.set()
        return await hang(request)

    client = await client_of(silent)
    requests = [asyncio.ensure_future(client.get(PODS, name, "ns")) for name in ("first", "second")]
    await begun.wait()
    await client.reconnect()
    async with asyncio.timeout(60):
        for task in requests:
            with pytest.raises(Unreachable):
                await task


async def test_streams_take_no_connection_from_requests(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kube.transport.CONNECTIONS", 2)

    async def serve(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"name": "a"}})
        response = web.StreamResponse()
        await response.prepare(request)
        metadata = {"name": "a", "namespace": "a", "uid": "u", "resourceVersion": "2"}
        await response.write(msgspec.json.encode({"type": "ADDED", "object": {"metadata": metadata}}) + b"\n")
        return await hang(request)

    client = await client_of(serve)
    watches = [client.watch(PODS, resource_version="1") for _ in range(5)]
    async with asyncio.timeout(60):
        assert len([await anext(watch) for watch in watches]) == 5
        assert (await client.get(PODS, "a", "ns"))["metadata"]["name"] == "a"
    for watch in watches:
        await watch.aclose()


async def test_handshakes_of_streams_are_made_a_few_at_a_time(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.transport.CONNECTIONS", 2)
    connect = aiohttp.TCPConnector._create_connection
    connecting, most, connected = 0, 0, 0

    async def count(*arguments: Any) -> Any:
        nonlocal connecting, most, connected
        connecting += 1
        most = max(most, connecting)
        try:
            return await connect(*arguments)
        finally:
            connecting -= 1
            connected += 1

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", count)
    client = await client_of(hang)
    watches = [asyncio.create_task(read_first(client.watch(PODS, resource_version="1"))) for _ in range(8)]
    await eventually(lambda: connected == len(watches))
    assert most == 2
    for watch in watches:
        watch.cancel()
    await asyncio.wait(watches)


async def test_stream_without_an_answer_holds_up_no_other(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet answers a request for a log that is followed with its first line, and not before."""
    monkeypatch.setattr("kube.transport.CONNECTIONS", 2)
    silent = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal silent
        if "/silent/" in request.path:
            silent += 1
            return await hang(request)
        return web.Response(body=b"a line\n")

    client = await client_of(serve)
    waiting = [asyncio.create_task(read_first(client.stream_log("silent", "ns", "a", follow=True))) for _ in range(3)]
    await eventually(lambda: silent == len(waiting))
    async with asyncio.timeout(60):
        assert await anext(client.stream_log("a", "ns", "a", follow=True)) == b"a line"
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_cancelled_request_is_cancelled(client_of: ClientOf) -> None:
    begun = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        begun.set()
        return await hang(request)

    client = await client_of(silent)
    request = asyncio.ensure_future(client.get(PODS, "first", "ns"))
    await begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_reconnecting_ends_running_requests(client_of: ClientOf) -> None:
    begun = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/whole"):
            return web.json_response({"metadata": {}})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"kind":')
        begun.set()
        return await hang(request)

    client = await client_of(half)
    waiting = asyncio.ensure_future(client.get(PODS, "half", "ns"))
    await begun.wait()
    await client.get(PODS, "whole", "ns")  # by now everything that was sent before has arrived too
    await client.reconnect()
    async with asyncio.timeout(60):
        with pytest.raises(Unreachable):
            await waiting


async def test_look_whether_a_kind_can_be_listed_reads_one_object(client_of: ClientOf) -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        page = {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
        return web.json_response(page)

    await (await client_of(answer)).try_list(PODS)
    assert queries == [{"limit": "1"}]


async def test_list_with_a_limit_is_one_request(client_of: ClientOf) -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        page = {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
        return web.json_response(page)

    listed = await (await client_of(answer)).list(PODS, "ns", most=16)
    assert [pod["metadata"]["name"] for pod in listed.items] == ["a"]
    assert queries == [{"limit": "16"}]


async def test_list_from_the_cache_is_one_request_without_a_limit(client_of: ClientOf) -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]})

    client = await client_of(answer)
    listed = await client.list_cached(PODS, field_selector="status.podIP=10.0.0.1")
    assert [item["metadata"]["name"] for item in listed.items] == ["a"]
    assert queries == [{"fieldSelector": "status.podIP=10.0.0.1", "resourceVersion": "0"}]
