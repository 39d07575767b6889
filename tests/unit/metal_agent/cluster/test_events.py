"""Events about memory pressure: none is lost while the API is slow, except the oldest of too many."""

import asyncio
from typing import Any

from kube.client import Client, Obj
from kube.resources import Resource
from metal_agent.cluster.events import HoldEvents
from metal_agent.memory.pressure_policy import Hold, PressureAction

MOST = 100


class SlowApi(Client):
    """An API server whose answers wait for `answering`."""

    def __init__(self) -> None:
        self.answering = asyncio.Event()
        self.asked = asyncio.Event()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, namespace
        self.asked.set()
        await self.answering.wait()
        return {"metadata": {"name": name}}


class Recorder:
    """An event recorder that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def event(self, about: Obj, kind: str, reason: str, note: str, action: str) -> None:
        assert (about["metadata"]["name"], kind, reason, action) == (
            "studio-1",
            "Warning",
            "MemoryPressure",
            "RelievePressure",
        )
        self.notes.append(note)


async def test_full_queue_drops_only_the_oldest_event() -> None:
    api, recorder = SlowApi(), Recorder()
    anything: Any = recorder
    events = HoldEvents(api, anything, "studio-1", {})
    step: PressureAction = Hold()
    for number in range(MOST):
        events.add(step, str(number))
    sending = asyncio.create_task(events.send())
    await api.asked.wait()
    events.add(step, "last")
    api.answering.set()
    await sending
    assert recorder.notes == [*map(str, range(MOST)), "last"]
