"""The states that a watch of some objects shows, with a stand-in for the API."""

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from kube.client import Client, Obj, ObjectList, WatchEvent
from kube.resources import PODS, Resource
from tests.support.watched_states import watch_states


class Pods(Client):
    """Two pods, and what becomes of them."""

    def __init__(self, *events: WatchEvent) -> None:
        self._events = events

    async def list(self, resource: Resource, namespace: str | None = None, **selectors: Any) -> ObjectList:
        assert (resource, namespace, selectors) == (PODS, "team", {"label_selector": "a=b"})
        return ObjectList([pod("one"), pod("two")], "7")

    async def watch(
        self, resource: Resource, namespace: str | None = None, *, resource_version: str, **selectors: Any
    ) -> AsyncGenerator[WatchEvent, None]:
        assert (resource, namespace, selectors) == (PODS, "team", {"label_selector": "a=b"})
        assert resource_version == "7"
        for event in self._events:
            yield event


def pod(name: str, phase: str = "Pending") -> Obj:
    return {"metadata": {"name": name}, "status": {"phase": phase}}


def phases(pods: Iterable[Obj]) -> dict[str, str]:
    return {each["metadata"]["name"]: each["status"]["phase"] for each in pods}


async def test_each_state_is_seen_from_the_listed_one_to_the_last_change() -> None:
    client = Pods(
        WatchEvent("MODIFIED", pod("one", "Running")),
        WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
        WatchEvent("DELETED", pod("two")),
        WatchEvent("ADDED", pod("three")),
    )
    states = [phases(pods) async for pods in watch_states(client, PODS, "team", label_selector="a=b")]
    assert states == [
        {"one": "Pending", "two": "Pending"},
        {"one": "Running", "two": "Pending"},
        {"one": "Running"},
        {"one": "Running", "three": "Pending"},
    ]
