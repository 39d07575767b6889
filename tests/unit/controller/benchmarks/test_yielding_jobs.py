"""The room of a benchmark is given up for whoever waits for it, but for as long as the Job may leave it."""

import asyncio
from typing import Any

import pytest

from controller.benchmarks import benchmark_runner
from controller.benchmarks.job_registry import YIELD_SECONDS
from kube.errors import Unreachable
from kube.resources import PODS
from tests.unit.controller.benchmarks.test_benchmark_runner import VirtualClock, World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(benchmark_runner, "datetime", VirtualClock)
    return World()


async def hang(*_: Any, **__: Any) -> None:
    """Answer nothing, as a webhook may."""
    await asyncio.sleep(600)


def test_room_of_a_job_is_given_up_until_it_has_left_or_does_not_leave(world: World) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        (job,) = world.list_jobs()
        uid = job["metadata"]["uid"]
        assert world.yielding == {f"team/{uid}"}
        assert world.yielding_nodes == {"n1"}
        world.refused.add(job["metadata"]["name"])
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(YIELD_SECONDS - 5)
        assert world.yielding == {f"team/{uid}"}
        await asyncio.sleep(10)
        assert world.yielding == frozenset(), "it was to end, and did not: nobody may wait for it"
        world.refused.clear()
        await asyncio.sleep(60)
        assert world.list_jobs() == []

    world.run(story)


def test_room_of_a_forged_job_is_not_given_up(world: World) -> None:
    async def story() -> None:
        world.refused.add("forged")
        world.forge_job("forged")
        await asyncio.sleep(2)
        assert world.yielding == {"team/uid-0"}

    world.run(story)


def test_new_leader_gives_up_the_room_of_no_job_that_it_has_not_started(world: World) -> None:
    async def first() -> None:
        assert world.yielding == {"team/uid-0"}
        world.refused.update(each["metadata"]["name"] for each in world.list_jobs())

    async def second() -> None:
        assert [each["metadata"]["uid"] for each in world.list_jobs()] == ["uid-0"]
        assert world.yielding == frozenset()

    world.run(first, second)


def test_room_is_given_up_no_longer_though_no_round_succeeds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise Unreachable("delete jobs: no answer")

    async def story() -> None:
        world.run_pod(state={"running": {}})
        monkeypatch.setattr(world, "delete", fail)
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(YIELD_SECONDS + 10)
        assert world.yielding == frozenset()

    world.run(story)


def test_room_of_a_job_that_has_ended_by_itself_is_not_awaited_for_ever(world: World) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        (pod,) = world.store.list(PODS)
        metadata = {**pod["metadata"], "name": "forged", "uid": "forged", "creationTimestamp": "2026-11-26T11:00:00Z"}
        world.put(PODS, {**pod, "metadata": metadata})
        world.finish("no memory", code=2)
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(YIELD_SECONDS + 10)
        assert world.list_jobs(), "it shows why it has failed"
        assert world.yielding == frozenset(), "a pod that does not end, or was forged, is left"

    world.run(story)


def test_room_is_given_up_no_longer_while_a_deletion_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        monkeypatch.setattr(world, "delete", hang)
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(YIELD_SECONDS + 10)
        assert world.yielding == frozenset()

    world.run(story)


def test_room_is_given_up_no_longer_while_the_runner_does_something_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        monkeypatch.setattr(world, "delete", hang)
        world.forge_job("forged")
        await asyncio.sleep(5)
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        await asyncio.sleep(YIELD_SECONDS + 10)
        assert world.yielding == frozenset()

    world.run(story)


def test_time_of_a_job_begins_anew_once_nothing_waits_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world.run_pod(state={"running": {}})
        monkeypatch.setattr(world, "delete", hang)
        world.forge_job("forged")
        await asyncio.sleep(5)
        world.runner.take_waiting_pools(frozenset({"nvidia"}))
        world.runner.take_waiting_pools(frozenset({"amd"}))
        await asyncio.sleep(YIELD_SECONDS + 10)
        assert world.yielding == {"team/uid-0"}

    world.run(story)
