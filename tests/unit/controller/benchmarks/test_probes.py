"""A service that waits for measurements: its Jobs start at once, and it hears when a device is free again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controller.benchmarks import benchmark_runner
from controller.benchmarks.probe_requests import HELD_SECONDS
from controller.placement.units import Cell
from controller.services.probe_wait import ENDING_SECONDS, PROBE_SECONDS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, NODES, PODS
from tests.support.api_objects import model, service
from tests.unit.controller.benchmarks.test_benchmark_runner import CHAT, LABELS, RESULT, START, VirtualClock, World

H100, L4 = "nvidia-h100x1", "nvidia-l4x1"
BOTH = frozenset({H100, L4})


class ProbedWorld(World):
    """A cluster with a node of each of two classes, and a service that uses either."""

    def __init__(self) -> None:
        super().__init__()
        self.old: Obj = {}
        """A Job of an earlier leader."""
        self.taken: set[str] = set()
        """Nodes whose device others have."""
        labels = LABELS | {"nvidia.com/gpu.product": "NVIDIA-H100"}
        metadata = {"name": "n2", "uid": "n2", "labels": labels}
        self.put(NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "1"}}})
        self.put(INFERENCE_SERVICES, service(hardware={"accelerator": "auto"}))

    def list_cells(self) -> list[Cell]:
        return [self._build_cell(each) for each in self.store.list(NODES)]

    def _build_cell(self, node: Obj) -> Cell:
        name, labels = node["metadata"]["name"], node["metadata"]["labels"]
        of_node = {"metadata": {"labels": labels}, "spec": {}}
        held = {name_node(each) for each in self.list_jobs()} | self.taken
        held |= {each["spec"]["nodeName"] for each in self.store.list(PODS) if is_live(each)}
        free = {"nvidia.com/gpu": 0 if name in held else 1, "memory": 2**40}
        return Cell(name=name, kind="node", pool="nvidia", total={"nvidia.com/gpu": 1}, free=free, node=of_node)

    async def delete(self, resource: Any, name: str, namespace: str | None = None, **_: Any) -> None:
        """Delete a Job; its pod goes when the story says so."""
        self.deleted.append(name)
        self.store.remove(resource, namespace, name)

    def find_jobs(self) -> dict[str, Obj]:
        """Return the Jobs by the node of each."""
        return {name_node(each): each for each in self.list_jobs()}

    def set_pod(self, node: str, phase: str, job: Obj | None = None, **bench: Any) -> None:
        """Set the pod of the Job on a node."""
        job = job or self.find_jobs()[node]
        owner = {"uid": job["metadata"]["uid"], "controller": True, "kind": "Job", "name": "j"}
        metadata = {
            "name": f"pod-{job['metadata']['uid']}",
            "namespace": "team",
            "uid": f"pod-{job['metadata']['uid']}",
            "ownerReferences": [owner | {"apiVersion": "batch/v1"}],
            "labels": {"inference.pomona.dev/benchmark": "true"},
            "creationTimestamp": VirtualClock.now(UTC).isoformat(),
        }
        status = {"phase": phase, "containerStatuses": [{"name": "bench", **bench}]}
        self.put(PODS, {"metadata": metadata, "spec": {"nodeName": node}, "status": status})

    def measure(self, node: str, phase: str = "Succeeded", code: int = 0) -> None:
        """End the measurement on a node; its engine may take longer."""
        now = VirtualClock.now(UTC).isoformat()
        ended = {"exitCode": code, "message": RESULT, "startedAt": now, "finishedAt": now}
        self.set_pod(node, phase, state={"terminated": ended})

    def follow(self) -> Collection[str] | None:
        return self.runner.follow_probes(CHAT, BOTH, until())


def name_node(job: Obj) -> str:
    """Return the node on which a Job is pinned."""
    return "n1" if "l4" in job["metadata"]["annotations"]["inference.pomona.dev/benchmark-order"] else "n2"


def is_live(pod: Obj) -> bool:
    return pod["status"].get("phase") not in {"Succeeded", "Failed"}


def until() -> datetime:
    return datetime.fromtimestamp(START + PROBE_SECONDS, UTC)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ProbedWorld:
    monkeypatch.setattr(benchmark_runner, "datetime", VirtualClock)
    return ProbedWorld()


def tell(world: ProbedWorld, *stories: Callable[[], Awaitable[None]]) -> None:
    """Run stories in which the service asks before any look, so that no other benchmark is there."""
    world.runner.restart()
    assert world.follow() is None
    world.run(*stories)


def test_service_is_answered_after_the_first_look(world: ProbedWorld) -> None:
    async def story() -> None:
        assert set(world.follow() or ()) == BOTH
        assert world.enqueued.count(CHAT) == 1
        assert set(world.find_jobs()) == {"n1", "n2"}

    tell(world, story)


def test_answer_comes_at_once_by_the_last_look(world: ProbedWorld) -> None:
    world.store.remove(INFERENCE_SERVICES, "team", "chat")

    async def story() -> None:
        assert world.created == []
        world.taken = {"n2"}
        world.put(NODES, world.store.get(NODES, "n1") or {})
        await asyncio.sleep(10)
        world.put(INFERENCE_SERVICES, service(hardware={"accelerator": "auto"}))
        assert world.runner.follow_probes(CHAT, BOTH, until()) == {L4}, "no device of the other class is idle"
        await asyncio.sleep(10)
        assert set(world.find_jobs()) == {"n1"}
        assert world.enqueued == [], "nothing has changed"

    world.run(story)


def test_nothing_is_promised_that_could_not_start(world: ProbedWorld) -> None:
    world.store.remove(INFERENCE_SERVICES, "team", "chat")

    async def story() -> None:
        world.put(INFERENCE_SERVICES, service(hardware={"accelerator": "auto"}))
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        assert world.follow() == frozenset(), "another service waits for the accelerator"
        world.runner.take_waiting_pools(frozenset())
        world.put(MODELS, model(cached=False))
        assert world.follow() == frozenset(), "the weights are not there"
        assert world.runner.follow_probes(CHAT, (), until()) == ()

    world.run(story)


def test_service_hears_of_a_measurement_when_the_engine_has_left_the_device(world: ProbedWorld) -> None:
    async def story() -> None:
        world.set_pod("n2", "Running", state={"running": {}})
        h100 = world.find_jobs()["n2"]
        world.measure("n1", phase="Running")
        pods = [dict(each) for each in world.store.list(PODS)]
        await asyncio.sleep(10)
        assert len(pods) == 2
        assert "n1" not in world.find_jobs(), "its measurement is stored"
        assert set(world.follow() or ()) == BOTH, "its engine ends yet"
        world.store.remove(PODS, "team", next(n["metadata"]["name"] for n in pods if n["spec"]["nodeName"] == "n1"))
        await asyncio.sleep(3)
        assert world.follow() == {H100}
        assert world.enqueued.count(CHAT) >= 2
        assert world.find_jobs() == {"n2": h100}

    tell(world, story)


def test_probe_gives_way_at_once_and_the_service_waits_no_more(world: ProbedWorld) -> None:
    async def story() -> None:
        world.enqueued.clear()
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(2)
        assert world.list_jobs() == []
        await asyncio.sleep(2)
        assert world.follow() == frozenset()
        assert world.enqueued == [CHAT]

    tell(world, story)


def test_failed_probe_ends_the_wait(world: ProbedWorld) -> None:
    async def story() -> None:
        for node in ("n1", "n2"):
            world.measure(node, phase="Failed", code=1)
        await asyncio.sleep(10)
        assert world.follow() == frozenset()

    tell(world, story)


def test_devices_are_free_when_the_wait_ends_and_for_a_while_afterwards(world: ProbedWorld) -> None:
    async def story() -> None:
        for node in ("n1", "n2"):
            world.set_pod(node, "Running", state={"running": {}})
        jobs = world.find_jobs()
        await asyncio.sleep(PROBE_SECONDS - ENDING_SECONDS - 5)
        assert world.list_jobs() == []
        assert set(world.follow() or ()) == BOTH, "the engines end"
        for node, job in jobs.items():
            world.set_pod(node, "Failed", job, state={})
        world.put(NODES, world.store.get(NODES, "n1") or {})
        await asyncio.sleep(5)
        assert world.follow() == frozenset()
        assert VirtualClock.now(UTC) < until()
        assert world.list_jobs() == []
        await asyncio.sleep(HELD_SECONDS + 15)
        assert len(world.list_jobs()) == 2, "as for any other service"

    tell(world, story)


def test_next_leader_goes_on_once_the_jobs_of_the_last_one_have_left(world: ProbedWorld) -> None:
    jobs = dict[str, Obj]()

    async def first() -> None:
        for node in ("n1", "n2"):
            world.set_pod(node, "Running", state={"running": {}})
        jobs.update(world.find_jobs())
        world.runner.restart()
        world.enqueued.clear()
        assert world.follow() is None

    async def second() -> None:
        assert len(world.deleted) == 2
        assert (world.list_jobs(), world.enqueued) == ([], [])
        for node, job in jobs.items():
            world.set_pod(node, "Failed", job, state={})
        await asyncio.sleep(10)
        assert set(world.follow() or ()) == BOTH
        assert world.enqueued == [CHAT]
        assert len(world.created) == 4

    tell(world, first, second)


def test_service_that_asks_the_next_leader_later_waits_for_devices_that_become_free(world: ProbedWorld) -> None:
    async def first() -> None:
        world.set_pod("n2", "Running", state={"running": {}})
        world.old = world.find_jobs()["n2"]
        world.runner.restart()

    async def second() -> None:
        assert set(world.follow() or ()) == BOTH, "one is being measured, the engine of the other ends"
        await asyncio.sleep(10)
        world.measure("n1")
        await asyncio.sleep(10)
        assert H100 in (world.follow() or ())
        world.set_pod("n2", "Failed", world.old, state={})
        await asyncio.sleep(10)
        assert world.follow() == {H100}
        assert set(world.find_jobs()) == {"n2"}

    tell(world, first, second)


def test_service_that_asks_before_the_next_look_waits_for_a_device_that_a_job_has_just_left(
    world: ProbedWorld,
) -> None:
    async def first() -> None:
        world.set_pod("n2", "Running", state={"running": {}})
        world.old = world.find_jobs()["n2"]
        world.runner.restart()

    async def second() -> None:
        world.set_pod("n2", "Failed", world.old, state={})
        await asyncio.sleep(benchmark_runner.LOOK_SECONDS / 4)
        assert set(world.find_jobs()) == {"n1"}, "nobody has looked since"
        assert set(world.follow() or ()) == BOTH
        await asyncio.sleep(10)
        assert set(world.find_jobs()) == {"n1", "n2"}
        assert set(world.follow() or ()) == BOTH

    tell(world, first, second)


def test_service_that_is_gone_is_measured_for_no_more(world: ProbedWorld) -> None:
    async def story() -> None:
        world.enqueued.clear()
        world.runner.forget(CHAT)
        world.store.remove(INFERENCE_SERVICES, "team", "chat")
        await asyncio.sleep(10)
        assert world.list_jobs() == []
        assert world.enqueued == []

    tell(world, story)


def test_job_without_a_pod_yet_counts_as_a_measurement(world: ProbedWorld) -> None:
    async def story() -> None:
        await asyncio.sleep(60)
        assert set(world.follow() or ()) == BOTH
        (job,) = [each for node, each in world.find_jobs().items() if node == "n1"]
        moment = (VirtualClock.now(UTC) - timedelta(seconds=600)).isoformat()
        ended = {"type": "Failed", "status": "True", "reason": "Lost", "lastTransitionTime": moment}
        world.put(JOBS, {**job, "status": {"conditions": [ended]}})
        await asyncio.sleep(5)
        assert world.follow() == {H100}

    tell(world, story)
