"""A unit waits for the end of a benchmark where nothing else is free, and where that device class is faster for it."""

from typing import Any

import msgspec
import pytest

from controller.leader_queue import IdleCells
from controller.placement.actions import Action, EvictUnit, WithdrawNomination
from controller.placement.admission_parts import RoundReport
from controller.placement.board import find_awaited, find_reason
from controller.placement.candidate_room import RoomCounter
from controller.placement.explanation import explain
from controller.placement.forecast import forecast
from controller.placement.ledger import Claim
from controller.placement.open_claims import OpenClaims
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.standing import WaitFacts, describe_wait, sort_refusals
from controller.placement.units import Cell, SpeedProfile, Unit, add_amounts, fits
from controller.placement.wake_rules import RoomWatch
from tests.support.queue_decisions import NOW, RULES, nominated, runs, say
from tests.support.queue_units import GPU, gpus, node, pod

H100, L4 = "nvidia-h100x1", "nvidia-l4x1"
SPEEDS = SpeedProfile(((H100, 120.0), (L4, 24.0)))


def measured(name: str, devices: int = 1, held: int = 1, **changes: Any) -> Cell:
    """Return a node some of whose devices a benchmark holds."""
    empty, taken = node(name, devices, **changes), gpus(held)
    free = {each: amount - taken.get(each, 0) for each, amount in empty.free.items()}
    return msgspec.structs.replace(empty, free=free, yielding=taken)


def decide(cells: list[Cell], *units: Unit, rules: PlanRules = RULES) -> Round:
    return plan(cells, units, rules, NOW)


def await_of(made: Round) -> dict[str, str]:
    return {uid: each.after_benchmark for uid, each in made.blocked.items() if each.after_benchmark}


def test_unit_waits_for_a_faster_class_rather_than_go_to_a_slower_one_for_good() -> None:
    cells = [measured("fast", device_class=H100), node("slow", 1, device_class=L4)]
    made = decide(cells, pod("a", speeds=SPEEDS))
    assert (say(made), await_of(made)) == ([], {"a": "node/fast"})
    ended = [msgspec.structs.replace(cells[0], free=cells[0].total, yielding={}), cells[1]]
    assert say(decide(ended, pod("a", speeds=SPEEDS))) == ["a gets fast"]


@pytest.mark.parametrize("speeds", [SPEEDS, SpeedProfile()])
def test_unit_does_not_wait_where_an_equal_or_better_class_is_free(speeds: SpeedProfile) -> None:
    for there in (H100, L4):
        cells = [measured("a-busy", device_class=there), node("z-free", 1, device_class=H100)]
        assert say(decide(cells, pod("a", speeds=speeds))) == ["a gets z-free"]


def test_benchmark_ends_rather_than_another_replica() -> None:
    cells = [measured("busy"), node("full", 1, free={})]
    low = runs("low", 1, "full", priority="batch")
    made = decide(cells, pod("a", priority="critical"), low)
    assert (say(made), await_of(made)) == ([], {"a": "node/busy"})


def test_benchmark_ends_rather_than_an_autoscaler_adds_a_node() -> None:
    made = decide([measured("busy")], pod("a"), rules=PlanRules(pools={"nvidia": PoolRules(elastic=1)}))
    assert (say(made), await_of(made)) == ([], {"a": "node/busy"})


def test_what_is_really_free_is_given_at_once() -> None:
    cells = [measured("n", 2, device_class=H100)]
    made = decide(cells, pod("a", at=1.0), pod("b", at=2.0), pod("c", at=3.0))
    assert (say(made), await_of(made)) == (["a gets n"], {"b": "node/n"})
    assert "c" in made.blocked


def test_unit_may_need_what_is_free_and_what_a_benchmark_holds() -> None:
    made = decide([measured("n", 2)], pod("a", 2), pod("b", 1, at=5.0))
    assert (say(made), await_of(made)) == ([], {"a": "node/n"})
    assert "b" in made.blocked


def test_room_that_is_kept_for_one_is_not_kept_for_another() -> None:
    cells = [measured("n", device_class=H100), node("slow", 1, device_class=L4)]
    made = decide(cells, pod("a", at=1.0, speeds=SPEEDS), pod("b", at=2.0, speeds=SPEEDS))
    assert (say(made), await_of(made)) == (["b gets slow"], {"a": "node/n"})


@pytest.mark.parametrize(
    "changes",
    [
        {"closed": "Cordoned"},
        {"pool": "team-b"},
        {"node": {"metadata": {"name": "n", "labels": {}}, "spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}}},
    ],
)
def test_benchmark_gives_way_only_where_the_unit_could_go(changes: dict[str, Any]) -> None:
    assert await_of(decide([measured("n", **changes)], pod("a"))) == {}


def test_unit_of_one_part_waits_behind_one_that_is_ahead_of_it() -> None:
    large, small = pod("large", 8, at=1.0), pod("small", 1, at=2.0)
    cells = [measured("n", 8), node("m", 8, free={})]
    held = runs("other", 7, "n", is_protected=True)
    full = [msgspec.structs.replace(cells[0], free=add_amounts(cells[0].free, {GPU: -7})), cells[1]]
    assert await_of(decide(full, large, small, held)) == {}


def test_quota_counts_a_unit_that_waits_for_a_benchmark() -> None:
    rules = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=1)})
    cells = [measured("n", device_class=H100), node("slow", 1, device_class=L4)]
    made = decide(cells, pod("a", at=1.0, speeds=SPEEDS), pod("b", at=2.0, speeds=SPEEDS), rules=rules)
    assert (say(made), await_of(made)) == ([], {"a": "node/n"})
    none = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=0)})
    assert await_of(decide(cells, pod("a", speeds=SPEEDS), rules=none)) == {}


def test_pool_that_a_service_prefers_comes_first() -> None:
    cells = [measured("n"), node("m", 1, pool="amd")]
    assert await_of(decide(cells, pod("a", pools=("nvidia", "amd")))) == {"a": "node/n"}
    assert say(decide(cells, pod("a", pools=("amd", "nvidia")))) == ["a gets m"]


def test_gang_does_not_wait_for_a_benchmark_alone() -> None:
    made = decide([measured("n"), node("m", 1)], pod("a", parts=(gpus(1), gpus(1))))
    assert (say(made), await_of(made)) == ([], {})


def test_void_nomination_is_withdrawn_for_the_room_of_a_benchmark() -> None:
    unit = nominated(pod("a"), "gone", "victim")
    made = decide([measured("n")], unit)
    assert await_of(made) == {"a": "node/n"}
    assert [*map(type, made.actions)] == [WithdrawNomination]


def test_cell_with_an_unknown_claim_has_no_room_of_benchmarks_either() -> None:
    claims = OpenClaims()
    claims.add({"lost": Claim(kind="pod", namespace="team", names=("lost",), cells=("node/n",))})
    (cell,), is_all_known = claims.reserve([measured("n", 2)], [])
    assert not is_all_known
    assert max(cell.room.values()) <= 0


def test_room_of_a_benchmark_counts_for_the_choice_of_an_accelerator() -> None:
    cells, unit = [measured("n", device_class=H100)], pod("prospect", speeds=SPEEDS)
    made = decide(cells)
    assert RoomCounter(cells, made, cells).count(unit).tokens_per_second == 120.0
    assert RoomCounter(cells, made, cells).find_best(unit) == cells[0]
    ended = [msgspec.structs.replace(cells[0], free=cells[0].total, yielding={})]
    assert RoomCounter(ended, made, cells).count(unit).replicas == 1
    promised = decide(cells, pod("a"))
    for now in (cells, ended):
        assert RoomCounter(now, promised, cells).count(unit).replicas == 0


def test_forecast_ends_the_benchmark() -> None:
    cells = [measured("n", device_class=H100), node("slow", 1, device_class=L4)]
    found = forecast(cells, [pod("a", speeds=SPEEDS)], RULES, NOW)
    assert found.is_complete
    assert (found.fates["a"].state, found.fates["a"].cells) == ("starts", ("node/n",))


def test_owner_is_told_what_is_awaited() -> None:
    cells, unit = [measured("n", device_class=H100)], pod("a")
    made = decide(cells, unit)
    assert find_reason(made, "a", None) == "Draining"
    (row,) = explain(unit, cells, made, RULES)
    slower = [*cells, node("slow", 1, device_class=L4)]
    unhurried = pod("a", speeds=SPEEDS)
    by_cell = {each.cell: each.message for each in explain(unhurried, slower, decide(slower, unhurried), RULES)}
    assert by_cell["node/slow"] == "the node has room, but a better one is held for it"
    assert (row.refusal.reason, row.message) == ("AwaitsBenchmark", "held for it until a benchmark there has ended")
    facts = WaitFacts(sort_refusals({}), cells=find_awaited(made, "a"), awaits_benchmark=True)
    expected = "room on node/n is kept for it: it starts as soon as a benchmark there has ended"
    assert describe_wait(unit, "Draining", facts) == expected


def test_round_is_planned_when_a_benchmark_does_not_give_way() -> None:
    watch, cell = RoomWatch(), measured("n")
    watch.take_cells([cell])
    watch.expect([pod("a")])
    assert watch.take_cells([msgspec.structs.replace(cell, yielding={})])


def test_nobody_is_evicted_for_a_unit_that_waits_for_a_benchmark() -> None:
    cells = [measured("fast", device_class=H100), node("slow", 1, device_class=L4, free={})]
    low = runs("low", 1, "slow", priority="batch")
    made = decide(cells, pod("a", priority="critical", speeds=SPEEDS), low)
    evictions: list[Action] = [each for each in made.actions if isinstance(each, EvictUnit)]
    assert evictions == []


def test_no_benchmark_starts_where_a_unit_is_being_admitted() -> None:
    cells = [node("a", 1), node("b", 1), node("c", 1)]
    made, claims = decide(cells[:1], pod("x")), OpenClaims()
    claims.add({"y": Claim(kind="pod", namespace="team", names=("y",), cells=("node/b",))})
    idle = IdleCells(lambda: cells)
    idle.update(RoundReport(made, cells, (), NOW, 0.0, 0.0, claimed=claims.list_cells()))
    assert [each.name for each in idle.list_cells() if fits({GPU: 1}, each.free)] == ["c"]
    idle.update(RoundReport(decide(cells), cells, (), NOW, 0.0, 0.0))
    assert idle.list_cells() == cells
