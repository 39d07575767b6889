"""A replica that serves is measured itself, and the room of a Job is free to the units that are admitted there."""

import asyncio
import json
from typing import Any

import pytest

from controller.benchmarks import benchmark_runner
from controller.benchmarks.benchmark_job import MeasuredEngine
from controller.services.endpoints import Endpoint
from fitness.performance import MeasuredPerformance
from kube.client import Client
from kube.resources import CONFIG_MAPS, ENDPOINT_SLICES, INFERENCE_SERVICES, PODS
from tests.support.api_objects import service
from tests.unit.controller.benchmarks.test_benchmark_runner import VirtualClock, World, ready_service


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(benchmark_runner, "datetime", VirtualClock)
    return World()


def test_benchmark_ends_when_a_unit_is_admitted_to_its_node_and_starts_nowhere_else_there(world: World) -> None:
    async def story() -> None:
        world.wait_for(given=frozenset({"node/other"}))
        await asyncio.sleep(2)
        assert len(world.list_jobs()) == 1
        world.wait_for(given=frozenset({"node/n1"}))
        world.taken = {"n1"}
        world.wait_for()
        await asyncio.sleep(3)
        assert world.list_jobs() == [], "though the pod of the unit is known by now"
        world.taken.clear()
        world.wait_for(given=frozenset({"node/n1"}))
        await asyncio.sleep(100)
        assert len(world.created) == 1

    world.run(story)


def test_room_of_a_job_is_free_to_others_until_its_pod_has_left(world: World) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        (job,) = world.list_jobs()
        room = {f"team/{job['metadata']['uid']}": "n1"}
        world.forge_job("forged")
        world.refused.add("forged")
        await asyncio.sleep(2)
        assert world.rooms == room, "that of a forged Job is not"
        world.keeps_pods = True
        world.wait_for("nvidia")
        await asyncio.sleep(10)
        assert (world.list_jobs(), world.rooms) == ([], room)
        world.store.remove(PODS, "team", world.store.list(PODS)[0]["metadata"]["name"])
        await asyncio.sleep(2)
        assert world.rooms == {}

    world.run(story)


def test_service_that_is_not_ready_is_not_measured(world: World) -> None:
    world.put(INFERENCE_SERVICES, service(hardware={"accelerator": "nvidia"}))

    async def story() -> None:
        assert world.created == []
        world.put(INFERENCE_SERVICES, ready_service())
        await asyncio.sleep(10)
        assert len(world.created) == 1

    world.run(story)


def serve(world: World) -> None:
    """Add a pod of the service that serves on the node."""
    labels = {"inference.pomona.dev/service": "chat"}
    pod = {"name": "chat-1", "namespace": "team", "uid": "chat-1", "labels": labels}
    world.put(PODS, {"metadata": pod, "spec": {"nodeName": "n1"}, "status": {"podIPs": [{"ip": "10.0.0.1"}]}})
    slice_labels = {"kubernetes.io/service-name": "chat"}
    metadata = {"name": "chat-x", "namespace": "team", "uid": "slice", "labels": slice_labels}
    endpoint = {"addresses": ["10.0.0.1"], "nodeName": "n1", "conditions": {"ready": True}}
    world.put(
        ENDPOINT_SLICES, {"metadata": metadata, "ports": [{"name": "http", "port": 8080}], "endpoints": [endpoint]}
    )


def test_replica_that_serves_is_measured_itself_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[tuple[str, str]]()

    async def measure(_client: Client, served: Any, replica: Endpoint, engine: MeasuredEngine) -> MeasuredPerformance:
        measured.append((served.metadata.name, replica.url))
        await asyncio.sleep(30)
        return MeasuredPerformance(tokens_per_second=90.0, source="live", **engine._asdict())

    monkeypatch.setattr(benchmark_runner, "measure_replica", measure)
    serve(world)

    async def story() -> None:
        assert measured == [("chat", "http://10.0.0.1:8080")]
        world.wait_for("nvidia")
        await asyncio.sleep(60)
        (stored,) = world.store.list(CONFIG_MAPS)
        assert json.loads(stored["data"]["nvidia-l4x1_team"])["source"] == "live"
        await asyncio.sleep(1000)
        assert (len(measured), world.created) == (1, [])

    world.run(story)


def test_replica_that_clients_ask_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_runner, "measure_replica", None)
    serve(world)
    busy = ready_service()
    world.put(INFERENCE_SERVICES, busy | {"status": busy["status"] | {"requestsPerMinute": 3}})

    async def story() -> None:
        assert len(world.created) == 1, "an idle device is measured in its place"

    world.run(story)
