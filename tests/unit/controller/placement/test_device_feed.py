"""Devices and claims of a cluster are read once a service selects devices, and not before."""

from collections.abc import AsyncIterator
from typing import Any

from controller.placement.device_feed import DeviceFeed
from kube.client import ObjectList, WatchEvent
from kube.resources import (
    INFERENCE_SERVICES,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from kube.store import Store
from tests.support import virtual_time
from tests.support.api_objects import service
from tests.support.background import running
from tests.support.device_slices import device_slice, gpu
from tests.support.eventually import eventually


class ClusterWithDevices:
    """An API server with one node's devices."""

    def __init__(self) -> None:
        self.read: set[Resource] = set()

    async def try_list(self, resource: Resource, _namespace: str | None = None) -> None:
        await self.list(resource)

    async def list(self, resource: Resource, *_: Any, **__: Any) -> ObjectList:
        self.read.add(resource)
        return ObjectList([device_slice("n", gpu("a"))] if resource == RESOURCE_SLICES else [], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[WatchEvent]:
        await eventually(lambda: False, 1e9)
        no_events: list[WatchEvent] = []
        for event in no_events:
            yield event


async def follow_devices() -> None:
    api, store = ClusterWithDevices(), Store()
    feed = DeviceFeed(store)
    async with running(feed.follow(api)):  # type: ignore[arg-type] # a part of the client
        store.put(INFERENCE_SERVICES, service("plain", hardware={"accelerator": "nvidia"}))
        assert await feed.settle()
        assert api.read == {RESOURCE_CLAIM_TEMPLATES}
        store.put(INFERENCE_SERVICES, service("chat", hardware={"accelerator": "nvidia", "deviceSelector": {}}))
        assert await feed.settle()
        assert api.read == {RESOURCE_CLAIM_TEMPLATES, RESOURCE_SLICES, RESOURCE_CLAIMS}
        assert len(store.list(RESOURCE_SLICES)) == 1


def test_devices_are_read_once_a_service_selects_some() -> None:
    virtual_time.run(follow_devices())
