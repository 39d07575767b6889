"""A service that waits for measurements: its Jobs start at once, and it hears when nothing is measured any more."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime

import pytest

from controller.models.jobs import JobOutcome
from controller.services.probe_wait import PROBE_SECONDS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES
from tests.support.api_objects import service
from tests.unit.controller.benchmarks.test_benchmark_runner import CHAT, LABELS, START, World, simulate

H100, L4 = "nvidia-h100x1", "nvidia-l4x1"
BOTH = frozenset({H100, L4})


class ProbedWorld(World):
    """A cluster with a node of each of two classes, and a service that uses either."""

    def __init__(self) -> None:
        super().__init__()
        self.add_node("n2", LABELS | {"nvidia.com/gpu.product": "NVIDIA-H100"})
        self.put(INFERENCE_SERVICES, service(hardware={"accelerator": "auto"}))

    def follow(self) -> Collection[str] | None:
        until = datetime.fromtimestamp(START + PROBE_SECONDS, UTC)
        return self.runner.request_probes(CHAT, BOTH, until)

    def find_jobs(self) -> dict[str, Obj]:
        """Return the Jobs by the node of each."""
        return {self.rooms[f"team/{job['metadata']['uid']}"]: job for job in self.list_jobs()}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ProbedWorld:
    return simulate(ProbedWorld(), monkeypatch)


def tell(world: ProbedWorld, *stories: Callable[[], Awaitable[None]]) -> None:
    """Run stories in which the service asks before any look."""
    world.runner.restart()
    assert world.follow() is None
    world.run(*stories)


def test_service_is_answered_after_the_first_look(world: ProbedWorld) -> None:
    async def story() -> None:
        assert set(world.follow() or ()) == BOTH
        assert world.enqueued == [CHAT]
        assert set(world.find_jobs()) == {"n1", "n2"}

    tell(world, story)


def test_class_without_an_idle_device_is_not_waited_for(world: ProbedWorld) -> None:
    world.taken = {"n2"}

    async def story() -> None:
        assert world.follow() == {L4}

    tell(world, story)


def test_nothing_is_measured_where_another_service_waits(world: ProbedWorld) -> None:
    async def story() -> None:
        assert world.follow() == frozenset()

    world.runner.restart()
    assert world.follow() is None
    world.wait_for("nvidia")
    world.run(story)


def test_service_with_nothing_to_measure_does_not_wait(world: ProbedWorld) -> None:
    assert world.runner.request_probes(CHAT, (), datetime.now(UTC)) == ()


def test_service_hears_when_a_measurement_is_stored_and_when_one_fails(world: ProbedWorld) -> None:
    async def story() -> None:
        jobs = world.find_jobs()
        world.finish(jobs["n1"])
        await asyncio.sleep(10)
        assert world.follow() == {H100}
        world.finish(jobs["n2"], JobOutcome(state="Broken", reason="BrokenOff"))
        await asyncio.sleep(10)
        assert world.follow() == frozenset(), "nobody waits for a second try"
        assert world.enqueued.count(CHAT) >= 3

    tell(world, story)


def test_probe_gives_way_at_once_and_the_service_waits_no_more(world: ProbedWorld) -> None:
    async def story() -> None:
        world.enqueued.clear()
        world.wait_for("nvidia")
        await asyncio.sleep(4)
        assert world.list_jobs() == []
        assert world.follow() == frozenset()
        assert world.enqueued == [CHAT]

    tell(world, story)


def test_next_leader_goes_on(world: ProbedWorld) -> None:
    async def first() -> None:
        world.runner.restart()
        world.enqueued.clear()
        assert world.follow() is None

    async def second() -> None:
        await asyncio.sleep(10)
        assert len(world.deleted) == 2
        assert set(world.follow() or ()) == BOTH
        assert CHAT in world.enqueued

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
