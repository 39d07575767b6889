"""Events about memory pressure: none is lost while the API is slow, except the oldest of too many."""

import asyncio
from typing import Any, get_args

import pytest

from kube.client import Client, Obj
from kube.resources import Resource
from metal_agent.cluster.events import HoldEvents
from metal_agent.memory.pressure_policy import ActionKind, HoldAction

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
        assert about["metadata"]["name"] == "studio-1"
        assert kind in {"Normal", "Warning"}
        self.notes.append(f"{reason} {action} {note}")


async def test_full_queue_drops_only_the_oldest_event() -> None:
    api, recorder = SlowApi(), Recorder()
    anything: Any = recorder
    events = HoldEvents(api, anything, "studio-1", {})
    step = HoldAction("hold")
    for number in range(MOST):
        events.add(step, str(number))
    sending = asyncio.create_task(events.send())
    await api.asked.wait()
    events.add(step, "last")
    api.answering.set()
    await sending
    assert recorder.notes == [f"MemoryPressure RelievePressure {note}" for note in (*range(MOST), "last")]


@pytest.mark.parametrize("kind", get_args(ActionKind))
async def test_each_kind_of_step_has_an_event(kind: ActionKind) -> None:
    api, recorder = SlowApi(), Recorder()
    api.answering.set()
    anything: Any = recorder
    events = HoldEvents(api, anything, "studio-1", {})
    events.add(HoldAction(kind), "why")
    await events.send()
    assert len(recorder.notes) == 1
