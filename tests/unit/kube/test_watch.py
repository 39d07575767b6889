"""A reflection continues after interrupted watches, refusals and errors, and does not flood the server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from kube import watch
from kube.client import Client, Obj
from kube.resources import PODS
from kube.store import Store
from kube.watch import Selection, reflect
from tests.support.background import running
from tests.support.eventually import eventually

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ClientOf = Callable[[Handler], Awaitable[Client]]


class Script:
    """Answers of a server to lists and watches, in order; the last one is repeated."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        watching = "watch" in request.query
        self.asked.append(f"watch {request.query['resourceVersion']}" if watching else "list")
        answers = self.watches if watching else self.lists
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, int):
            return web.json_response({"message": "scripted"}, status=answer)
        if not watching:
            return web.json_response(answer)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in answer:
            if piece == "hang":
                await asyncio.Event().wait()
            await response.write(piece.encode())
            # Make sure that the pieces are separate on the wire, too.
            await asyncio.sleep(0.01)
        return response


def listed(version: int, **pods: int) -> Any:
    items = [
        {"metadata": {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(of)}}
        for name, of in pods.items()
    ]
    return {"metadata": {"resourceVersion": str(version)}, "items": items}


def event(kind: str, name: str, version: int) -> str:
    metadata = f'{{"namespace":"ns","name":"{name}","uid":"{name}","resourceVersion":"{version}"}}'
    return f'{{"type":"{kind}","object":{{"metadata":{metadata}}}}}\n'


BOOKMARK = '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"20"}}}\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(watch, "LAST_RETRY_SECONDS", 0.02)


async def reflected(client_of: ClientOf, script: Script, until: Callable[[Store], bool]) -> Store:
    client, store, synced = await client_of(script.answer), Store(), asyncio.Event()
    async with running(reflect(client, store, Selection(PODS), synced)):
        await eventually(lambda: until(store))
        assert synced.is_set()
    return store


def known(store: Store) -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in store.list(PODS)}


async def test_events_are_whole_lines_even_if_chunks_split_them(client_of: ClientOf) -> None:
    line = event("ADDED", "b", 11)
    script = Script([listed(10, a=1)], [[line[:20], line[20:-1], "\n" + event("DELETED", "a", 12), "hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"b": "11"})
    assert script.asked == ["list", "watch 10"]


async def test_a_cut_watch_continues_from_the_last_bookmark(client_of: ClientOf) -> None:
    script = Script([listed(10, a=1)], [[BOOKMARK, '{"type":"ADDED","obj'], [event("ADDED", "b", 21), "hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"a": "1", "b": "21"})
    assert script.asked == ["list", "watch 10", "watch 20"]


@pytest.mark.parametrize("refusal", [429, 500, 503])
async def test_watch_of_the_same_version_is_repeated_after_a_busy_or_failing_server(
    client_of: ClientOf, refusal: int
) -> None:
    script = Script([listed(10, a=1)], [refusal, refusal, [event("ADDED", "b", 11), "hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"a": "1", "b": "11"})
    assert script.asked == ["list", "watch 10", "watch 10", "watch 10"]


async def test_repeated_failures_of_a_watch_are_followed_by_a_new_list(client_of: ClientOf) -> None:
    script = Script([listed(10, a=1), listed(30, c=3)], [500])
    await reflected(client_of, script, lambda store: known(store) == {"c": "3"})


async def test_retry_after_is_respected(client_of: ClientOf) -> None:
    asked_at: list[float] = []
    script = Script([listed(10, a=1)], [[event("ADDED", "b", 11), "hang"]])

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            asked_at.append(asyncio.get_running_loop().time())
            if len(asked_at) == 1:
                return web.json_response({}, status=429, headers={"Retry-After": "1"})
        return await script.answer(request)

    client, store = await client_of(answer), Store()
    async with running(reflect(client, store, Selection(PODS))):
        await eventually(lambda: "b" in known(store))
    assert asked_at[1] - asked_at[0] >= 1


@pytest.mark.parametrize("refusal", [410, 403])
async def test_a_refused_watch_is_followed_by_a_new_list(client_of: ClientOf, refusal: int) -> None:
    script = Script([listed(10, a=1, b=2), listed(30, b=2, c=3)], [refusal, ["hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"b": "2", "c": "3"})
    assert script.asked[:3] == ["list", "watch 10", "list"]


async def test_an_error_event_is_followed_by_a_new_list(client_of: ClientOf) -> None:
    gone = '{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'
    script = Script([listed(10, a=1), listed(30, c=3)], [[event("ADDED", "b", 11), gone], ["hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"c": "3"})


@pytest.mark.parametrize("odd", ['{"code":"410"}', '{"details":{"causes":[{"field":1}]}}'])
async def test_a_malformed_error_event_is_followed_by_a_new_list(client_of: ClientOf, odd: str) -> None:
    error = f'{{"type":"ERROR","object":{odd}}}\n'
    script = Script([listed(10, a=1), listed(30, c=3)], [[event("ADDED", "b", 11), error], ["hang"]])
    await reflected(client_of, script, lambda store: known(store) == {"c": "3"})


async def test_a_refused_list_is_repeated_and_nothing_is_forgotten(client_of: ClientOf) -> None:
    script = Script([listed(10, a=1), 500, 403, listed(30, a=1, c=3)], [410, ["hang"]])
    client, store = await client_of(script.answer), Store()
    async with running(reflect(client, store, Selection(PODS))):
        await eventually(lambda: "a" in known(store))
        forgotten: list[Any] = []
        store.subscribe(lambda _, old, new: forgotten.append(old) if new is None else None)
        await eventually(lambda: "c" in known(store))
        assert not forgotten


async def test_watches_that_end_at_once_are_repeated_with_pauses(client_of: ClientOf) -> None:
    script = Script([listed(10)], [[]])
    client = await client_of(script.answer)
    async with running(reflect(client, Store(), Selection(PODS))):
        await asyncio.sleep(0.5)
    assert len(script.asked) < 60, "0.5 s with pauses of about 0.016 s"


async def test_objects_of_a_page_are_reduced_before_the_next_page_is_read(client_of: ClientOf) -> None:
    """Whole objects of a long list would take more memory than a controller has."""
    store, steps = Store(), list[str]()

    def reduce(obj: Obj) -> Obj:
        steps.append(obj["metadata"]["name"])
        return {"metadata": obj["metadata"], "kind": obj["kind"]}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.Event().wait()
        steps.append("page")
        page = listed(9, c=3) if "continue" in request.query else listed(9, a=1, b=2)
        page["metadata"] |= {} if "continue" in request.query else {"continue": "more"}
        return web.json_response(page)

    store.set_reduction(PODS, reduce)
    synced = asyncio.Event()
    async with running(reflect(await client_of(answer), store, Selection(PODS), synced)):
        await synced.wait()
    assert steps == ["page", "a", "b", "page", "c"]
    assert [(type(obj), obj["kind"]) for obj in store.list(PODS)] == [(dict, "Pod")] * 3
