"""The room that a service would find on an accelerator, and who is told when it comes or goes."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from controller.placement import candidate_room
from controller.placement.admission_parts import RoundReport
from controller.placement.candidate_room import (
    IDLE_SHARE,
    CandidateRoom,
    CandidateRooms,
    ProspectiveReplica,
    RoomCounter,
    restrict_to_volume_nodes,
)
from controller.placement.planner import PlanRules, plan
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import Cell, NodeRequirement, SpeedProfile, Unit
from controller.reconcile.plan import Leading
from crds.size import GIB
from kube.resources import ObjectKey
from tests.support import virtual_time
from tests.support.waiting_units import GPU, gpu_cell, host_cell, running_unit, waiting_process, waiting_unit

NOW = 10_000.0
NO_RULES = PlanRules()
CHAT = ObjectKey("team", "chat")
POD, PROCESS = waiting_unit("chat", 2), waiting_process("chat", 24)


def count(
    unit: Unit, cells: Sequence[Cell], *units: Unit, rules: PlanRules = NO_RULES, now: Sequence[Cell] | None = None
) -> CandidateRoom:
    """Return the room after a round; `now` are the cells as they are by now."""
    made = plan(cells, units, rules, NOW)
    return RoomCounter(cells if now is None else now, made, cells).count(unit)


@pytest.mark.parametrize(
    ("unit", "cells", "replicas"),
    [
        (POD, [gpu_cell("a", 8, 5), gpu_cell("b", 8, 2), gpu_cell("c", 1)], 3),
        (POD, [gpu_cell("a", closed="Cordoned"), gpu_cell("b", pool="team-b")], 0),
        (PROCESS, [host_cell("a", 64, 50), host_cell("b", 64, 23), gpu_cell("c")], 2),
        (PROCESS, [host_cell("a", runtimes=frozenset({"mlx-lm"}))], 0),
    ],
)
def test_room_is_counted_by_whole_replicas(unit: Unit, cells: Sequence[Cell], replicas: int) -> None:
    assert count(unit, cells).replicas == replicas


def test_room_of_units_that_wait_is_not_given_twice() -> None:
    cells = [gpu_cell("a", 8, 4)]
    assert count(POD, cells, waiting_unit("other", 2)).replicas == 1
    ahead = waiting_unit("large", 8)
    assert count(POD, cells, ahead, running_unit(waiting_unit("low", 4, priority="low"), "node/a")).replicas == 0
    assert count(POD, cells, ahead).replicas == 0, "the node is closed for one ahead of it"
    assert count(msgspec.structs.replace(POD, priority="low"), cells, ahead).replicas == 2


def test_room_that_became_free_since_the_round_counts() -> None:
    before, after = [gpu_cell("a", 8, 0)], [gpu_cell("a", 8, 6)]
    assert count(POD, before, now=after).replicas == 3
    held = waiting_unit("held", 2)
    assert count(POD, [gpu_cell("a", 8, 4)], held, now=[gpu_cell("a", 8, 8)]).replicas == 3
    assert count(POD, [], now=after).replicas == 3, "a node that is new"


def test_limits_leave_room_for_some_replicas_only() -> None:
    quota = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=5)})
    assert count(POD, [gpu_cell("a")], rules=quota).replicas == 2
    assert count(POD, [gpu_cell("a")], running_unit(waiting_unit("r", 2), "node/a"), rules=quota).replicas == 1
    other = PlanRules(quotas={("other", "nvidia"): PoolQuota(devices=0)})
    assert count(POD, [gpu_cell("a")], rules=other).replicas == 4


@pytest.mark.parametrize(
    ("unit", "cells", "lack"),
    [
        (POD, [], f"no node has {GPU}"),
        (PROCESS, [gpu_cell("a")], "no host is in pool metal"),
        (msgspec.structs.replace(POD, pools=("team-a", "nvidia")), [], "no node is in pool team-a, nvidia"),
    ],
)
def test_pool_without_cells_could_never_run_a_replica(unit: Unit, cells: Sequence[Cell], lack: str) -> None:
    assert count(unit, cells) == CandidateRoom(0, could_run=False, lack=lack)


def test_cells_that_are_too_small_or_closed_are_told_apart() -> None:
    small = count(POD, [gpu_cell("a", 1)])
    assert not small.could_run
    assert small.lack.startswith(f"no node can ever run it: it needs {GPU}: 2, and the largest, a, has {GPU}: 1")
    closed = count(POD, [gpu_cell("a", closed="Cordoned")])
    lack = "too little is free on the nodes of pool nvidia"
    assert closed == CandidateRoom(0, could_run=True, lack=lack, device_classes=frozenset({""}))
    elastic = PlanRules(pools={"nvidia": PoolRules(elastic=1)})
    assert count(POD, [], rules=elastic).could_run, "an autoscaler adds a node"


def test_pod_has_room_only_where_its_volume_is() -> None:
    prospect = ProspectiveReplica(POD, {"metadata": {}, "spec": {}})
    held = restrict_to_volume_nodes(prospect, lambda _pod: frozenset({"b"}))
    assert isinstance(held.requirement, NodeRequirement)
    assert count(held, [gpu_cell("a"), gpu_cell("b", 8, 2)]).replicas == 1
    assert restrict_to_volume_nodes(ProspectiveReplica(POD), lambda _pod: frozenset({"b"})) is POD


class Watched:
    """Cells that change, and the services that are told."""

    def __init__(self) -> None:
        self.cells: Sequence[Cell] = [host_cell("a", 64, 0)]
        self.told: list[tuple[float, ObjectKey]] = []
        self._listeners: list[Callable[[], None]] = []
        self.rooms = CandidateRooms(
            self, lambda service: self.told.append((asyncio.get_running_loop().time(), service))
        )

    def list_cells(self) -> Sequence[Cell]:
        return self.cells

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def change(self, *cells: Cell, seconds: float = 5.0) -> None:
        """Change the cells, and let time pass."""
        self.cells = cells
        for listener in self._listeners:
            listener()
        await asyncio.sleep(seconds)

    def plan(self) -> None:
        made = plan(self.cells, (), PlanRules(), NOW)
        self.rooms.update(RoundReport(made, self.cells, (), NOW, 0.0, 0.0))


def watch(test: Callable[[Watched], Coroutine[Any, Any, None]]) -> None:
    """Run a test beside the task of a leader."""

    async def main() -> None:
        watched = Watched()
        # The task reads nothing of the leader.
        leading: Leading = None  # type: ignore[assignment]
        task = asyncio.get_running_loop().create_task(watched.rooms.run(leading))
        await asyncio.sleep(0)
        await test(watched)
        task.cancel()

    virtual_time.run(main())


def test_service_is_told_when_room_comes_and_goes_and_not_of_each_change() -> None:
    async def test(watched: Watched) -> None:
        watched.plan()
        watched.rooms.follow(CHAT, {"metal": ProspectiveReplica(PROCESS)})
        await watched.change(host_cell("a", 64, 10))
        assert watched.told == []
        for free in (30, 64, 40):
            await watched.change(host_cell("a", 64, free))
        assert [service for _, service in watched.told] == [CHAT]
        assert watched.rooms.free_seconds(CHAT, "metal") > 10.0
        await watched.change(host_cell("a", 64, 0))
        assert len(watched.told) == 2
        assert watched.rooms.free_seconds(CHAT, "metal") == 0.0
        watched.rooms.forget(CHAT)
        await watched.change(host_cell("a", 64, 64))
        assert len(watched.told) == 2, "it is not followed any more"

    watch(test)


def test_service_is_told_at_most_once_a_second() -> None:
    async def test(watched: Watched) -> None:
        watched.plan()
        watched.rooms.follow(CHAT, {"metal": ProspectiveReplica(PROCESS)})
        for number in range(100):
            await watched.change(host_cell("a", 64, 64 * (number % 2)), seconds=0.07)
        moments = [moment for moment, _ in watched.told]
        assert moments
        assert all(later - earlier > 0.99 for earlier, later in itertools.pairwise(moments))

    watch(test)


def test_room_is_unknown_until_it_is_known_where_the_volumes_of_the_pod_are() -> None:
    """A choice before that would stay: `auto` took a slower accelerator, as if no node could mount the weights."""

    async def main() -> None:
        is_known, told, cells = False, list[ObjectKey](), Watched()
        cells.cells = [gpu_cell("a")]
        rooms = CandidateRooms(
            cells, told.append, lambda _pod: frozenset({"a"} if is_known else ()), lambda _pod: is_known
        )
        cells.rooms = rooms
        prospect = ProspectiveReplica(POD, {"metadata": {}, "spec": {}})
        leading: Leading = None  # type: ignore[assignment]
        task = asyncio.get_running_loop().create_task(rooms.run(leading))
        await asyncio.sleep(0)
        cells.plan()
        assert rooms.count(prospect) is None
        assert rooms.count(ProspectiveReplica(POD)) is not None
        rooms.follow(CHAT, {"nvidia": prospect})
        is_known = True
        cells.plan()
        await asyncio.sleep(5.0)
        assert told == [CHAT]
        room = rooms.count(prospect)
        assert room is not None
        assert room.replicas > 0
        task.cancel()

    virtual_time.run(main())


def test_room_is_unknown_before_the_first_round_which_is_told() -> None:
    async def test(watched: Watched) -> None:
        watched.rooms.follow(CHAT, {"metal": ProspectiveReplica(PROCESS)})
        assert watched.rooms.count(ProspectiveReplica(PROCESS)) is None
        await asyncio.sleep(5.0)
        assert watched.told == []
        watched.plan()
        await asyncio.sleep(5.0)
        assert [service for _, service in watched.told] == [CHAT], "although there is none"
        assert watched.rooms.count(ProspectiveReplica(PROCESS)) is not None
        watched.rooms.restart()
        assert watched.rooms.count(ProspectiveReplica(PROCESS)) is None

    watch(test)


def test_room_is_counted_anew_for_decisions_by_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many cells, one changes between any two decisions."""

    async def test(watched: Watched) -> None:
        made: list[float] = []
        loop: Any = asyncio.get_running_loop()

        class SlowCounter(RoomCounter):
            def __init__(self, *arguments: Any) -> None:
                made.append(loop.time())
                loop._jump.now += 0.01
                super().__init__(*arguments)

        monkeypatch.setattr(candidate_room, "RoomCounter", SlowCounter)
        watched.plan()
        for _ in range(100):
            watched.cells = [host_cell("a", 64, 64)]
            watched.rooms._expire()
            watched.rooms.count(ProspectiveReplica(PROCESS))
            loop._jump.now += 0.002
        assert len(made) == 2
        assert made[1] - made[0] >= 0.01 * IDLE_SHARE
        for _ in range(2):
            loop._jump.now += 1.0
            watched.rooms.count(ProspectiveReplica(PROCESS))
        assert len(made) == 3, "nothing has changed"
        watched.rooms.follow(CHAT, {"metal": ProspectiveReplica(PROCESS)})
        await watched.change(host_cell("a", 64, 1), seconds=0.01)
        assert [service for _, service in watched.told] == [CHAT], "a look at all that wait is one at the present"

    watch(test)


def test_room_of_hosts_is_memory() -> None:
    assert count(waiting_process("chat", 24), [host_cell("a", 64, 47)]).replicas == 1
    assert PROCESS.parts[0]["memory"] == 24 * GIB


@pytest.mark.parametrize(
    ("cells", "best"),
    [
        ([gpu_cell("a", device_class="slow"), gpu_cell("b", device_class="fast")], "b"),
        ([gpu_cell("a", device_class="slow"), gpu_cell("b", device_class="unknown")], None),
        ([gpu_cell("a", device_class="fast"), gpu_cell("b", 8, 1, device_class="fast")], None),
        ([gpu_cell("c", 8, device_class="fast"), gpu_cell("b", 8, 2, device_class="fast")], "b"),
        ([gpu_cell("b", device_class="fast", closed="Cordoned")], None),
    ],
    ids=["faster", "of unknown speed", "left or full", "packed", "closed"],
)
def test_best_place_is_free_and_known_to_be_fast_enough(cells: Sequence[Cell], best: str | None) -> None:
    speeds = SpeedProfile((("slow", 40.0), ("fast", 140.0)), least=57.0)
    unit = msgspec.structs.replace(POD, speeds=speeds, avoid=frozenset({"node/a"}))
    cell = RoomCounter(cells, plan(cells, [], NO_RULES, NOW), cells).find_best(unit)
    assert (cell.name if cell is not None else None) == best


def test_best_place_is_within_the_limits_of_a_pool() -> None:
    cells, rules = [gpu_cell("a")], PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=1)})
    assert RoomCounter(cells, plan(cells, [], rules, NOW), cells).find_best(POD) is None
