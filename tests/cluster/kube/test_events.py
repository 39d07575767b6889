"""The event recorder against a real API server."""

import pytest

from kube.client import Client, Obj
from kube.events import EventRecorder
from kube.resources import (
    EVENTS,
    METAL_HOSTS,
    SECRETS,
)
from kube.transport import Response
from tests.support.api_faults import Fault, FaultyTransport
from tests.support.api_objects import secret


async def test_an_event_that_repeats_becomes_a_count(
    faulty: Client, transport: FaultyTransport, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    regarding = await faulty.create(SECRETS, secret(namespace, "one"))
    recorder = EventRecorder(faulty, "pomona.dev/test", "test-1")

    async def happen(note: str = "It happened.") -> list[Obj]:
        await recorder.event(regarding, "Warning", "Happened", note, "Testing")
        return (await faulty.list(EVENTS, namespace)).items

    (event,) = await happen()
    assert (event["reason"], event["note"], event["type"]) == ("Happened", "It happened.", "Warning")
    assert event["regarding"]["uid"] == regarding["metadata"]["uid"]
    assert "series" not in event
    transport.sent.clear()
    await happen()
    assert [request.method for request in transport.sent] == ["GET"], "not written again within a minute"
    monkeypatch.setattr("kube.events.REFRESH_SECONDS", 0.0)
    (event,) = await happen()
    assert event["series"]["count"] == 3
    assert len(await happen("Something else happened.")) == 2
    await faulty.delete(EVENTS, event["metadata"]["name"], namespace)
    assert {event.get("series", {}).get("count") for event in await happen()} == {4, None}
    monkeypatch.setattr("kube.events.SERIES_SECONDS", 0.0)
    assert len(await happen()) == 3, "long ago: a new event"


async def test_a_failed_write_raises_nothing(
    faulty: Client, transport: FaultyTransport, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.events.WRITE_SECONDS", 0.1)
    regarding = await faulty.create(SECRETS, secret(namespace, "one"))
    recorder = EventRecorder(faulty, "pomona.dev/test", "test-1")
    faults: list[Fault | Response | None] = [Fault.FAIL, Fault.HANG, Response(403, b"{}"), None]
    transport.plan = lambda _: faults.pop(0)
    while faults:
        await recorder.event(regarding, "Normal", "Happened", "é" * 600, "Testing")
    transport.plan = lambda _: None
    (event,) = (await faulty.list(EVENTS, namespace)).items
    assert event["note"] == "é" * 512, "1,024 bytes, and the last character whole"


async def test_an_event_of_a_cluster_scoped_object_is_in_default(client: Client) -> None:
    host = await client.create(METAL_HOSTS, {"metadata": {"name": "event-test"}, "spec": {}})
    await EventRecorder(client, "pomona.dev/test", "test-1").event(
        host, "Normal", "Happened", "It happened.", "Testing"
    )
    listed = await client.list(EVENTS, "default", field_selector=f"regarding.uid={host['metadata']['uid']}")
    assert len(listed.items) == 1
    await client.delete(METAL_HOSTS, "event-test")
