"""The board: each waiting service's place, its reason with the way out, and at what pace services are told."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from controller.placement.board import Board, Depths
from controller.placement.planner import PlanRules, plan
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.standing import ServiceStanding
from controller.placement.start_history import UnitStart
from controller.placement.units import Cell, NodeRequirement, Nomination, Unit
from kube.resources import ObjectKey
from tests.support import virtual_time
from tests.support.waiting_units import GPU, gpu_cell, host_cell, running_unit, waiting_process, waiting_unit

NOW = 10_000.0
NO_RULES = PlanRules()


class Told:
    """A board, and when each service was told that its standing has changed."""

    def __init__(self) -> None:
        self.notices: list[tuple[float, str]] = []
        self.starts: list[UnitStart] = []
        self.depths: list[Depths] = []
        self.board = Board(self._note, self.starts.append, on_depths=self.depths.append)

    def _note(self, service: ObjectKey) -> None:
        self.notices.append((asyncio.get_running_loop().time(), service.name))

    def update(
        self, cells: Sequence[Cell], units: Sequence[Unit], now: float = NOW, rules: PlanRules = NO_RULES
    ) -> None:
        self.board.update(plan(cells, units, rules, now), cells, now, units=units)

    def take(self) -> list[str]:
        names = [name for _, name in self.notices]
        self.notices.clear()
        return names


def standings(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules = NO_RULES) -> dict[str, ServiceStanding]:
    """Return the standings after one round, by the name of the service."""

    async def main() -> dict[str, ServiceStanding]:
        told = Told()
        told.update(cells, units, rules=rules)
        names = {unit.service for unit in units}
        return {key.name: standing for key in names if (standing := told.board.find_standing(key)) is not None}

    return virtual_time.run(main())


def one(cells: Sequence[Cell], *units: Unit) -> ServiceStanding:
    return standings(cells, units)["chat"]


def full(number: int = 1, **fields: Any) -> list[Cell]:
    return [gpu_cell(f"n{index}", free=0, **fields) for index in range(number)]


def test_position_is_the_place_in_the_order_of_the_pool() -> None:
    units = [
        waiting_unit("low", priority="low", enqueued_at=1.0),
        waiting_unit("first", enqueued_at=2.0),
        waiting_unit("second", enqueued_at=3.0),
        waiting_unit("high", priority="high", enqueued_at=4.0),
        waiting_process("mac", 48, enqueued_at=5.0),
    ]
    by_service = standings([*full(), host_cell("studio", free_gib=0)], units)
    assert {name: standing.place for name, standing in by_service.items()} == {
        "high": "1/4",
        "first": "2/4",
        "second": "3/4",
        "low": "4/4",
        "mac": "1/1",
    }
    assert by_service["low"].ahead == {"high": 1, "normal": 2}
    assert by_service["mac"].waiting_for == "memory: 48.0 GiB"
    assert by_service["low"].waiting_for == f"{GPU}: 1"


def test_service_with_several_waiting_replicas_reports_the_first() -> None:
    units = [
        waiting_unit("chat-2", 1, service="chat", enqueued_at=3.0),
        waiting_unit("other", 1, enqueued_at=2.0),
        waiting_unit("chat-1", 2, service="chat", enqueued_at=1.0),
    ]
    standing = one(full(), *units)
    assert (standing.place, standing.waiting_for, standing.enqueued_at) == ("1/3", f"{GPU}: 2", 1.0)


def test_admitted_service_has_no_standing_and_is_not_counted() -> None:
    by_service = standings([gpu_cell("n1", free=1)], [waiting_unit("chat", enqueued_at=1.0), waiting_unit("next")])
    assert {name: standing.place for name, standing in by_service.items()} == {"next": "1/1"}


OLD = running_unit(waiting_unit("old", 8, priority="low"), "node/n1")
ENDING = msgspec.structs.replace(OLD, state="ending", ends_by=1_790_000_600.0)
PEER = running_unit(waiting_unit("peer", 8), "node/n0")
RULED = NodeRequirement("a100", {"nodeSelector": {"gpu": "a100"}})
REASONS: dict[str, tuple[list[Cell], list[Unit], str, str]] = {
    "no device is free": (
        [*full(2), gpu_cell("n9", free=0, closed="Cordoned")],
        [waiting_unit("chat", 2), PEER],
        "InsufficientDevices",
        (
            "needs nvidia.com/gpu: 2; each of the 2 nodes that could run it has less free; 1 node that could run it "
            "is closed (1 Cordoned): it starts once others end; add a node, or raise spec.priority so that others make "
            "room"
        ),
    ),
    "no memory is free on a host": (
        [host_cell("studio", free_gib=8)],
        [waiting_process("chat", 24)],
        "InsufficientMemory",
        (
            "needs memory: 24.0 GiB; the only open host that could run it has less free; none that runs there may be "
            "evicted for it, even at priority critical: it starts once others end, or add a host"
        ),
    ),
    "no memory is free beside devices": (
        [gpu_cell("n1", total={GPU: 8, "memory": 100}, free={GPU: 8, "memory": 10})],
        [waiting_unit("chat", {GPU: 1, "memory": 50})],
        "InsufficientMemory",
        "most of them lack memory",
    ),
    "a larger one ahead waits for the same node": (
        [gpu_cell("n1", free=2)],
        [waiting_unit("large", 4, enqueued_at=1.0), waiting_unit("chat", 2)],
        "HeadOfLine",
        (
            "needs nvidia.com/gpu: 2; the nodes with that much free are kept for a replica ahead, which waits for "
            "more: wait, or raise spec.priority"
        ),
    ),
    "it evicts another": (
        [gpu_cell("n1", free=0)],
        [OLD, waiting_unit("chat", 2)],
        "Draining",
        "room on node/n1 is kept for it: it starts as soon as replicas of team/old have ended",
    ),
    "what it evicts still answers": (
        [gpu_cell("n1", free=0)],
        [ENDING, waiting_unit("chat", 2, nomination=Nomination(("node/n1",), frozenset({OLD.uid})))],
        "Draining",
        "replicas of team/old have ended, which finish their answers, at the latest by 2026-09-21T14:23:20Z",
    ),
    "all nodes are closed": (
        [gpu_cell("n1", closed="Cordoned"), gpu_cell("n2", closed="NotReady")],
        [waiting_unit("chat", 2)],
        "CellsClosed",
        (
            "needs nvidia.com/gpu: 2, and 2 nodes that could run it are closed (1 Cordoned, 1 NotReady): wait until "
            "one opens, or add a node"
        ),
    ),
    "all nodes are too small": (
        [gpu_cell("n1", 4), gpu_cell("n2", 8), gpu_cell("n3", 4)],
        [waiting_unit("chat", 16)],
        "NoSuchHardware",
        (
            "no node can ever run it: it needs nvidia.com/gpu: 16, and the largest, n2, has nvidia.com/gpu: 8: ask for "
            "less, or add such a node"
        ),
    ),
    "its rules match no node": (
        [gpu_cell("n1"), gpu_cell("n2")],
        [waiting_unit("chat", requirement=RULED)],
        "NoSuchHardware",
        (
            "no node of pool nvidia can ever run it: 2 nodes do not match its nodeSelector, affinity or tolerations: "
            "change the service, or add a node"
        ),
    ),
    "there is no node": (
        [],
        [waiting_unit("chat")],
        "NoSuchHardware",
        "no node is in pool nvidia: add one that has nvidia.com/gpu: 1",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_reason_is_told_with_the_way_out(case: str) -> None:
    cells, units, reason, message = REASONS[case]
    standing = one(cells, *units)
    assert standing.reason == reason
    assert message in standing.message


def test_gang_that_no_cluster_holds_is_told_so() -> None:
    gang = waiting_unit("chat", parts=({GPU: 8}, {GPU: 8}))
    standing = one([gpu_cell("n1")], gang)
    assert (standing.reason, standing.waiting_for) == ("NoSuchHardware", f"2 pods with {GPU}: 8 each")
    assert standing.message == "its 2 pods do not fit on 1 node together: ask for less, or add nodes"


ELSEWHERE = waiting_unit("chat", 2, pools=("nvidia", "team-b"))
"""A unit that may borrow from another pool."""
LIMITS: dict[str, tuple[Sequence[Cell], Unit, PlanRules, str, str]] = {
    "its namespace has used its quota": (
        [gpu_cell("n1")],
        waiting_unit("chat", 2),
        PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=4)}),
        "Quota",
        (
            "needs nvidia.com/gpu: 2, but the quota of namespace team in pool nvidia allows 4 devices, of which 3 are "
            "used: raise the quota, end services of the namespace, or raise spec.priority"
        ),
    ),
    "it needs more than its quota": (
        [gpu_cell("n1")],
        waiting_unit("chat", 2),
        PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=1)}),
        "Quota",
        (
            "needs nvidia.com/gpu: 2, but the quota of namespace team in pool nvidia allows 1 device: ask for less, or "
            "raise the quota"
        ),
    ),
    "all is closed to it, by a limit and by a cordon": (
        [gpu_cell("n1", closed="Cordoned"), gpu_cell("n2", pool="team-b")],
        ELSEWHERE,
        PlanRules(pools={"team-b": PoolRules(lending_limit=0)}),
        "CellsClosed",
        "1 node that could run it is closed (1 Cordoned): wait until one opens, or add a node",
    ),
    "its home is full, and another pool lends nothing": (
        [gpu_cell("n1", free=0), gpu_cell("n2", pool="team-b")],
        ELSEWHERE,
        PlanRules(pools={"team-b": PoolRules(lending_limit=0)}),
        "InsufficientDevices",
        "the only open node that could run it has less free; limits keep it out of 1 node (1 Lending); none that",
    ),
    "its home is full, and so is another pool whose quota is used": (
        [gpu_cell("n1", free=0), gpu_cell("n2", free=0, pool="team-b")],
        ELSEWHERE,
        PlanRules(quotas={("team", "team-b"): PoolQuota(devices=1)}),
        "InsufficientDevices",
        "the only open node that could run it has less free; limits keep it out of 1 node (1 Quota); none that",
    ),
    "its home is full, and the node of another pool whose quota is used is cordoned": (
        [gpu_cell("n1", free=0), gpu_cell("n2", pool="team-b", closed="Cordoned")],
        ELSEWHERE,
        PlanRules(quotas={("team", "team-b"): PoolQuota(devices=1)}),
        "InsufficientDevices",
        "has less free; 1 node that could run it is closed (1 Cordoned); none that",
    ),
    "its home has no node, and another pool lends nothing": (
        [gpu_cell("n2", pool="team-b")],
        ELSEWHERE,
        PlanRules(pools={"team-b": PoolRules(lending_limit=0)}),
        "Quota",
        "needs nvidia.com/gpu: 2, but lendingLimit of pool team-b allows 0 devices: raise lendingLimit",
    ),
    "its home is full, and only a quota keeps it from another pool": (
        [gpu_cell("n1", free=0), gpu_cell("n2", pool="team-b")],
        ELSEWHERE,
        PlanRules(quotas={("team", "team-b"): PoolQuota(devices=1)}),
        "Quota",
        "the quota of namespace team in pool team-b allows 1 device: ask for less, or raise the quota",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limit_is_told_only_where_it_is_what_the_service_waits_for(case: str) -> None:
    cells, unit, rules, reason, message = LIMITS[case]
    running = [running_unit(waiting_unit("other", 3), "node/n1")] if "used its quota" in case else []
    standing = standings(cells, [unit, *running], rules)["chat"]
    assert (standing.reason, standing.place) == (reason, "" if "needs more" in case or "has no node" in case else "1/1")
    assert message in standing.message


def test_change_of_a_limit_is_told() -> None:
    async def main() -> None:
        told, cells, units = Told(), [gpu_cell("n1")], [waiting_unit("chat", 4)]
        for devices in (1, 2):
            told.update(cells, units, rules=PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=devices)}))
            await asyncio.sleep(60.0)
            assert told.take() == ["chat"]

    virtual_time.run(main())


def test_change_of_the_reason_alone_is_told() -> None:
    async def main() -> None:
        told, units = Told(), [waiting_unit("ahead", 2), waiting_unit("chat", enqueued_at=1_001.0)]
        for free, reason in ((1, "HeadOfLine"), (0, "InsufficientDevices")):
            told.update([gpu_cell("n1", free=free)], units)
            await asyncio.sleep(60.0)
            standing = told.board.find_standing(ObjectKey("team", "chat"))
            assert standing is not None
            assert (standing.place, standing.reason) == ("2/2", reason)
            assert told.take()[-1] == "chat"

    virtual_time.run(main())


def test_service_is_told_when_a_higher_priority_begins_to_help() -> None:
    async def main() -> None:
        told, chat = Told(), waiting_unit("chat", 2)
        for units, helps in (([chat], False), ([chat, PEER], True)):
            told.update(full(), units)
            await asyncio.sleep(60.0)
            assert told.take()[-1:] == ["chat"]
            standing = told.board.find_standing(ObjectKey("team", "chat"))
            assert standing is not None
            assert ("raise spec.priority" in standing.message) == helps

    virtual_time.run(main())


def test_critical_service_is_not_told_to_raise_its_priority() -> None:
    critical = one(full(), waiting_unit("chat", priority="critical"))
    assert critical.message.endswith(
        "the only open node that could run it has less free: it starts once others end, or add a node"
    )
    assert "or raise spec.priority" in one(full(), waiting_unit("chat"), PEER).message


@pytest.mark.parametrize(("needed", "reason"), [(16, "NoSuchHardware"), (4, "Quota")])
def test_service_that_can_never_start_has_no_position_and_holds_up_no_other(needed: int, reason: str) -> None:
    units = [waiting_unit("chat", needed, enqueued_at=1.0), waiting_unit("next", 2, enqueued_at=2.0)]
    quota = PoolQuota(devices=3 if reason == "Quota" else None)
    by_service = standings(full(), units, PlanRules(quotas={("team", "nvidia"): quota}))
    assert (by_service["chat"].place, by_service["chat"].start, by_service["chat"].reason) == ("", "NoPosition", reason)
    assert (by_service["next"].place, by_service["next"].ahead) == ("1/1", {})


def test_units_beyond_those_that_a_round_considers_have_a_position() -> None:
    # Each needs an amount of its own, or one round would know them all to be blocked.
    units = [waiting_unit(f"s{number}", {GPU: 8, "memory": number}, enqueued_at=float(number)) for number in range(300)]
    by_service = standings([gpu_cell("n1", total={GPU: 8, "memory": 1_000}, free={GPU: 0, "memory": 0})], units)
    assert by_service["s299"].place == "300/300"
    assert by_service["s299"].reason == "NotConsidered"
    assert by_service["s299"].message.startswith("299 replicas are ahead")


def test_victims_that_an_earlier_round_evicted_are_named() -> None:
    """After a change of leader, no action names them: they only end."""
    ending = msgspec.structs.replace(running_unit(waiting_unit("old", 8, priority="low"), "node/n1"), state="ending")
    nomination = Nomination(("node/n1",), frozenset({ending.uid}))
    standing = one([gpu_cell("n1", free=0)], ending, waiting_unit("chat", nomination=nomination))
    assert (standing.reason, standing.cells, standing.victims) == ("Draining", ("node/n1",), ("team/old",))
    assert standing.start == "Draining", "no estimate"
    of_others = msgspec.structs.replace(ending, service=ObjectKey("bank", "secret"))
    standing = one([gpu_cell("n1", free=0)], of_others, waiting_unit("chat", nomination=nomination))
    assert standing.victims == ("a service of another namespace",)
    assert "bank" not in standing.message
    assert "secret" not in standing.message


def test_service_is_told_only_of_what_changes() -> None:
    async def main() -> None:
        told = Told()
        units = [waiting_unit("chat"), waiting_unit("next", enqueued_at=1_001.0)]
        told.update(full(), units)
        assert told.take() == ["chat", "next"]
        for _ in range(20):
            await asyncio.sleep(5)
            told.update(full(), units)
        await asyncio.sleep(5)
        assert told.take() == []
        told.update(full(), units[1:])
        await asyncio.sleep(5)
        assert sorted(told.take()) == ["chat", "next"]
        assert told.board.find_standing(ObjectKey("team", "chat")) is None

    virtual_time.run(main())


def test_service_whose_admission_fails_stays_in_the_queue_and_is_told_why() -> None:
    async def main() -> None:
        told = Told()
        failing, later = waiting_unit("chat"), waiting_unit("later", 2, enqueued_at=1_001.0)
        running = running_unit(waiting_unit("other"), "node/n1")
        failures = {failing.uid: "a webhook denied it", running.uid: "a budget"}
        # Rounds that leave it out, and in between one that admits it once more.
        for planned in ([later], [failing, later], [later]):
            cells = [gpu_cell("n1", free=1)]
            made = plan(cells, [*planned, running], PlanRules(), NOW)
            told.board.update(made, cells, NOW, units=[later, running, failing], failures=failures)
            await asyncio.sleep(5)
            standing = told.board.find_standing(ObjectKey("team", "chat"))
            assert standing is not None
            assert (standing.place, standing.reason) == ("1/2", "AdmissionFailed")
            assert standing.message.endswith("is tried again: a webhook denied it")
            assert told.board.find_standing(ObjectKey("team", "other")) is None
        assert [name for name in told.take() if name == "chat"] == ["chat"], "it is told once"
        told.board.update(plan(full(), [failing, later], PlanRules(), NOW), full(), NOW, units=[failing, later])
        standing = told.board.find_standing(ObjectKey("team", "chat"))
        assert standing is not None
        assert standing.reason == "InsufficientDevices"

    virtual_time.run(main())


def test_closed_nodes_are_told_as_reasons_depend_on_them() -> None:
    async def main() -> None:
        told = Told()
        units = [waiting_unit("chat")]
        told.update(full(2), units)
        told.take()
        told.update(full(2, closed="Cordoned"), units)
        await asyncio.sleep(2)
        assert told.take() == ["chat"]
        standing = told.board.find_standing(ObjectKey("team", "chat"))
        assert standing is not None
        assert standing.reason == "CellsClosed"

    virtual_time.run(main())


def test_storm_of_rounds_tells_each_service_at_most_once_a_second_and_few_of_all() -> None:
    """500 services wait, and five times a second the first one is admitted."""

    async def main() -> None:
        told = Told()
        units = [waiting_unit(f"s{number:03}", enqueued_at=float(number)) for number in range(500)]
        told.update(full(), units)
        told.take()
        await asyncio.sleep(2)
        for _ in range(300):
            del units[0]
            told.update(full(), units)
            await asyncio.sleep(0.2)
        by_service: dict[str, list[float]] = {}
        for at, name in told.notices:
            by_service.setdefault(name, []).append(at)
        gaps = [later - earlier for times in by_service.values() for earlier, later in itertools.pairwise(times)]
        assert min(gaps) >= 1.0 - 1e-9
        # Those that leave, and those at the front, are told at once: five a second, and three others a second.
        moves = len(told.notices) - 60 * (5 + 3)
        assert moves <= 50 + 60 / 2
        assert len(told.notices) > 300 + 50
        await asyncio.sleep(2)
        told.notices.clear()
        await asyncio.sleep(500)
        names = [unit.service.name for unit in units]
        assert told.take() == names[names.index("s304") :], "the nearest to the head is next, and all are told once"
        # A queue that was at rest for two minutes tells a short change at once.
        await asyncio.sleep(120)
        del units[-1]
        told.update(full(), units)
        assert told.board.find_standing(ObjectKey("team", "s310")) is not None
        await asyncio.sleep(10)
        assert 50 <= len(told.notices) <= 50 + 1 + 10
        assert "s310" not in told.take(), "it has reported its place by itself"

    virtual_time.run(main())


def test_after_a_storm_every_service_has_been_told_its_last_place() -> None:
    async def main() -> None:
        seen: dict[str, str] = {}
        board: Board | None = None

        def note(service: ObjectKey) -> None:
            standing = board.find_standing(service) if board is not None else None
            seen[service.name] = standing.place if standing is not None else ""

        board = Board(note)
        units = [waiting_unit(f"s{number:02}", enqueued_at=float(number)) for number in range(60)]
        for _ in range(30):
            board.update(plan(full(), units, PlanRules(), NOW), full(), NOW, units=units)
            await asyncio.sleep(0.1)
            del units[0]
        await asyncio.sleep(60)
        shown = {name: place for name, place in seen.items() if place}
        assert shown == {f"s{number:02}": f"{number - 28}/31" for number in range(29, 60)}

    virtual_time.run(main())


def test_depth_counts_all_that_wait_in_the_last_round_of_a_second() -> None:
    async def main() -> None:
        told = Told()
        told.update([], [])
        told.update(
            [*full(), host_cell("studio", free_gib=0)],
            [waiting_unit("a"), waiting_unit("b"), waiting_unit("c", priority="high"), waiting_process("d", 9)],
        )
        await asyncio.sleep(2)  # without a further round
        assert told.depths[-1] == {("nvidia", "normal"): 2, ("nvidia", "high"): 1, ("metal", "normal"): 1}

    virtual_time.run(main())
