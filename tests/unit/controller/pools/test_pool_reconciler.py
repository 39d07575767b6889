"""The status of an AcceleratorPool: what it says, and when it is written."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from controller.placement.admission_parts import RoundReport
from controller.placement.cell_registry import CellRegistry
from controller.placement.planner import Round
from controller.placement.pool_limits import PoolProblem
from controller.placement.pool_standing import PoolStanding
from controller.placement.units import Unit
from controller.pools.reconciler import MEASURE_SECONDS, PoolBoard, decide_pool
from controller.reconcile.plan import Plan, Snapshot
from crds.size import GIB
from devices.vendors import VENDORS
from kube.resources import ACCELERATOR_POOLS, NODES, ObjectKey
from kube.store import Store
from tests.support import virtual_time
from tests.support.api_objects import NOW, pool, store
from tests.support.queue_decisions import runs
from tests.support.queue_units import pod
from tests.unit.controller.placement.test_cell_registry import node

KEY = ObjectKey("", "team-a")
TEAM_A: dict[str, Any] = {"nodeSelector": {"team": "a"}}


def decide(standing: PoolStanding | None) -> Plan:
    return decide_pool(Snapshot(store((ACCELERATOR_POOLS, pool("team-a", version=3, **TEAM_A))), NOW, standing), KEY)


def test_status_of_devices_has_numbers_and_words() -> None:
    plan = decide(PoolStanding("devices", 2, 16, 12, borrowed=2, lent=1, waiting=4))
    assert plan.status == {
        "cells": 2,
        "waiting": 4,
        "used": "12/16",
        "borrowed": "2",
        "lent": "1",
        "amounts": {"total": 16, "used": 12, "borrowed": 2, "lent": 1},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Ready",
                "message": "2 nodes with 16 devices",
                "observedGeneration": 3,
            }
        ],
    }
    assert plan.events == ()


def test_status_of_hosts_has_memory() -> None:
    status = decide(PoolStanding("memory", 1, 64 * GIB, 16 * GIB)).status
    assert status is not None
    assert (status["used"], status["lent"]) == ("16.0 GiB/64.0 GiB", "0 B")
    assert status["conditions"][0]["message"] == "1 host with 64.0 GiB of memory"


def test_problems_are_in_the_condition_and_in_an_event() -> None:
    problems = (PoolProblem("team-a", "NoCell", "has no node"), PoolProblem("team-a", "Overlap", "another has it"))
    plan = decide(PoolStanding("devices", problems=problems))
    assert plan.status is not None
    (ready,) = plan.status["conditions"]
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "NoCell", "has no node; another has it")
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "NoCell")]


def test_nothing_is_written_before_the_first_round_or_of_a_pool_that_is_gone() -> None:
    assert decide(None) == Plan()
    assert decide_pool(Snapshot(store(), NOW, PoolStanding("devices")), KEY) == Plan()


def report(*units: Unit) -> RoundReport:
    return RoundReport(Round((), (), {}, {}), (), units, 0.0, 0.0, 0.0)


class _Watched:
    """A board, its store, and the pools that it has told of with the time."""

    def __init__(self) -> None:
        self.store: Store = store((NODES, node("a", labels={"team": "a"})))
        self.told: list[tuple[float, str]] = []
        registry = CellRegistry(self.store, VENDORS, lambda _name: True)
        self.board = PoolBoard(self.store, VENDORS, registry, self.tell)

    def tell(self, key: ObjectKey) -> None:
        self.told.append((asyncio.get_running_loop().time(), key.name))

    def take_told(self) -> Sequence[str]:
        names = [name for _, name in self.told]
        self.told.clear()
        return names


def test_pools_are_told_of_at_most_once_a_second_and_only_on_change() -> None:
    async def main() -> None:
        watched = _Watched()
        task = asyncio.create_task(watched.board.run(None))
        await asyncio.sleep(0)
        watched.store.put(ACCELERATOR_POOLS, pool("team-a", **TEAM_A))
        await asyncio.sleep(3)
        assert (watched.take_told(), watched.board.standing("team-a")) == ([], None), "no round yet"
        watched.board.update(report())
        await asyncio.sleep(3)
        assert watched.take_told() == ["team-a"]
        watched.board.update(report())
        await asyncio.sleep(3)
        assert watched.take_told() == [], "nothing has changed"
        for number in range(20):
            waiting = (pod(f"u{index}", pools=("team-a",)) for index in range(number))
            watched.board.update(report(runs("u", 3, "a", pools=("team-a",)), *waiting))
            await asyncio.sleep(0.1)
        held = pool("team-a", version=2, nominal=1, **TEAM_A)
        watched.store.put(ACCELERATOR_POOLS, held)
        await asyncio.sleep(3)
        times = [time for time, name in watched.told if name == "team-a"]
        assert all(later - earlier >= MEASURE_SECONDS for earlier, later in itertools.pairwise(times))
        assert 3 <= len(watched.take_told()) == len(times)
        standing = watched.board.standing("team-a")
        assert standing is not None
        assert [problem.reason for problem in standing.problems] == ["LimitExceeded"]
        task.cancel()

    virtual_time.run(main())


def test_standing_of_an_edited_pool_is_of_its_new_spec() -> None:
    async def main() -> None:
        watched = _Watched()
        task = asyncio.create_task(watched.board.run(None))
        await asyncio.sleep(0)
        watched.store.put(ACCELERATOR_POOLS, pool("team-a", **TEAM_A))
        watched.board.update(report())
        await asyncio.sleep(MEASURE_SECONDS / 2)
        before = watched.board.standing("team-a")
        watched.store.put(ACCELERATOR_POOLS, pool("team-a", version=2, nodeSelector={"team": "b"}))
        after = watched.board.standing("team-a")
        assert (before and before.cells, after and after.cells) == (1, 0)
        task.cancel()

    virtual_time.run(main())


@pytest.mark.parametrize("foreign", [True, False])
def test_change_of_a_cell_is_told_without_a_round(foreign: bool) -> None:
    async def main() -> None:
        watched = _Watched()
        task = asyncio.create_task(watched.board.run(None))
        await asyncio.sleep(0)
        watched.store.put(ACCELERATOR_POOLS, pool("team-a", **TEAM_A))
        watched.board.update(report())
        await asyncio.sleep(3)
        watched.take_told()
        watched.store.put(NODES, node("b", labels={"team": "a"} if not foreign else {}))
        await asyncio.sleep(3)
        assert watched.take_told() == ([] if foreign else ["team-a"])
        task.cancel()

    virtual_time.run(main())
