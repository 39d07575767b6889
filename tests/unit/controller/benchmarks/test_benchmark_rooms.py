"""A replica that serves is measured itself, and the room of a Job of this leader alone is free to units."""

import asyncio
import json

import pytest

from kube.resources import CONFIG_MAPS, ENDPOINT_SLICES, INFERENCE_SERVICES, PODS
from tests.support.api_objects import service
from tests.unit.controller.benchmarks.test_benchmark_runner import World, ready_service, simulate


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return simulate(World(), monkeypatch)


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
        world.run_pod()
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


def test_replica_that_serves_is_measured_itself_once(world: World) -> None:
    serve(world)

    async def story() -> None:
        world.wait_for("nvidia")
        await asyncio.sleep(60)
        (stored,) = world.store.list(CONFIG_MAPS)
        assert json.loads(stored["data"]["nvidia-l4x1_team"])["source"] == "live"
        await asyncio.sleep(1000)
        assert (world.measured_pods, world.created) == (["http://10.0.0.1:8080"], [])

    world.run(story)


def test_service_that_serves_is_measured_though_another_with_its_model_does_not(world: World) -> None:
    waiting = service(name="a-waits", hardware={"accelerator": "nvidia"})
    serve(world)
    served = world.store.get(INFERENCE_SERVICES, "chat", "team") or {}
    world.store.remove(INFERENCE_SERVICES, "team", "chat")
    world.put(INFERENCE_SERVICES, waiting)
    world.put(INFERENCE_SERVICES, served)

    async def story() -> None:
        assert world.measured_pods == ["http://10.0.0.1:8080"]

    world.run(story)


def test_replica_that_clients_ask_is_left_alone(world: World) -> None:
    serve(world)
    busy = ready_service()
    world.put(INFERENCE_SERVICES, busy | {"status": busy["status"] | {"requestsPerMinute": 3}})

    async def story() -> None:
        assert world.measured_pods == []
        assert len(world.created) == 1, "an idle device is measured in its place"

    world.run(story)


def test_forged_jobs_hold_no_benchmark_up_and_are_ended(world: World) -> None:
    world.forge_job("first")
    world.forge_job("second", suspend=True)

    async def story() -> None:
        assert len(world.created) == 1
        assert set(world.deleted) == {"first", "second"}
        world.finish()
        await asyncio.sleep(10)
        assert len(list(world.store.list(CONFIG_MAPS))) == 1

    world.run(story)


def test_job_that_the_controller_may_not_delete_stops_nothing_else(world: World) -> None:
    world.forge_job("kept")
    world.refused = {"kept"}

    async def story() -> None:
        assert len(world.created) == 1
        world.finish()
        await asyncio.sleep(10)
        assert len(list(world.store.list(CONFIG_MAPS))) == 1

    world.run(story)
