"""The rules of the planner by name: victims, nominations, gangs, predecessors, elastic pools."""

from typing import Any

import msgspec
import pytest

from controller.placement.actions import EvictUnit
from controller.placement.planner import MIN_RUN_SECONDS, PlanRules
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import CPU, MEMORY, PODS, NodeRequirement, Nomination, Unit
from tests.support.queue_decisions import NOW, decide, nominated, runs, say
from tests.support.queue_units import GPU, gpus, host, node, pod, process

HIGH = pod("high", 4, priority="high")


def gang(uid: str, *sizes: int, **changes: Any) -> Unit:
    return pod(uid, parts=tuple(gpus(size) for size in sizes), **changes)


def ending(unit: Unit) -> Unit:
    return msgspec.structs.replace(unit, state="ending")


# Victims


def test_less_important_unit_makes_room() -> None:
    assert say(decide([node("n", 4)], [runs("r", 4, "n"), HIGH])) == ["high waits on n for r", "r ends for high"]


@pytest.mark.parametrize("priority", ["high", "critical"])
def test_equal_or_more_important_unit_is_never_evicted(priority: str) -> None:
    assert say(decide([node("n", 4)], [runs("r", 4, "n", priority=priority), HIGH])) == []


def test_protected_unit_is_never_evicted() -> None:
    assert say(decide([node("n", 4)], [runs("r", 4, "n", is_protected=True), HIGH])) == []


@pytest.mark.parametrize(
    ("age_seconds", "is_evicted"),
    [
        (MIN_RUN_SECONDS - 1, False),
        (MIN_RUN_SECONDS, True),
        (-1, False),  # the clocks of two machines differ
        (-MIN_RUN_SECONDS, True),  # a clock jumped back
    ],
)
def test_unit_is_not_evicted_before_its_minimum_run_time(age_seconds: float, *, is_evicted: bool) -> None:
    made = decide([node("n", 4)], [runs("r", 4, "n", evictable_since=NOW - age_seconds), HIGH])
    assert any(isinstance(action, EvictUnit) for action in made.actions) is is_evicted
    assert made.again_seconds == (None if is_evicted else MIN_RUN_SECONDS - age_seconds)


def test_free_place_is_better_than_a_victim() -> None:
    assert say(decide([node("n", 4), node("m", 8)], [runs("r", 4, "n"), HIGH])) == ["high gets m"]


def test_unit_that_ends_anyway_is_the_first_victim() -> None:
    units = [runs("a", 4, "m"), ending(runs("z", 4, "n", priority="high")), HIGH]
    assert say(decide([node("m", 4), node("n", 4)], units)) == ["high waits on n for z"]


def test_unit_that_ends_anyway_spares_a_less_important_one_beside_it() -> None:
    units = [runs("low", 4, "n", priority="low"), ending(runs("z", 4, "n", priority="critical")), HIGH]
    assert say(decide([node("n", 8)], units)) == ["high waits on n for z"]


def test_least_important_unit_is_evicted_first() -> None:
    units = [runs("a", 4, "n"), runs("b", 4, "n", priority="low"), HIGH]
    assert "b ends for high" in say(decide([node("n", 8)], units))
    units = [runs("a", 4, "m"), runs("b", 4, "n", priority="low"), HIGH]
    assert "b ends for high" in say(decide([node("m", 4), node("n", 4)], units))


def test_unit_that_was_admitted_last_is_evicted_first() -> None:
    units = [runs("a", 4, "n", evictable_since=5), runs("b", 4, "n", evictable_since=9), HIGH]
    assert "b ends for high" in say(decide([node("n", 8)], units))


def test_fewest_units_are_evicted() -> None:
    units = [*(runs(f"r{number}", 1, "m") for number in range(4)), runs("one", 4, "n"), HIGH]
    assert "one ends for high" in say(decide([node("m", 4), node("n", 4)], units))


def test_least_is_freed_in_vain() -> None:
    assert "b ends for high" in say(decide([node("m", 8), node("n", 4)], [runs("a", 8, "m"), runs("b", 4, "n"), HIGH]))


def test_unit_that_a_larger_victim_makes_needless_is_spared() -> None:
    units = [runs("small", 1, "n", priority="batch"), runs("large", 4, "n", priority="low"), HIGH]
    assert say(decide([node("n", 5)], units)) == ["high waits on n for large", "large ends for high"]


def test_unit_that_gives_none_of_what_is_lacking_is_spared() -> None:
    idle = pod("idle", {MEMORY: 60}, cells=("node/n",), priority="batch", evictable_since=0.0)
    assert "r ends for high" in say(decide([node("n", 4)], [idle, runs("r", 4, "n"), HIGH]))
    assert "idle ends for high" not in say(decide([node("n", 4)], [idle, runs("r", 4, "n"), HIGH]))


def test_victims_make_room_in_each_resource() -> None:
    memory = pod("memory", {MEMORY: 60}, cells=("node/n",), evictable_since=0.0)
    units = [memory, runs("gpu", 4, "n"), pod("high", gpus(4, memory=30), priority="high")]
    assert say(decide([node("n", 4)], units))[0] == "high waits on n for gpu memory"


def test_processes_on_hosts_are_evicted_alike() -> None:
    running = process("r", 60, cells=("host/h",), evictable_since=0.0)
    made = decide([host("h")], [running, process("p", 60, priority="high")])
    assert say(made) == ["p waits on h for r", "r ends for p"]


def test_room_of_a_victim_is_promised_once() -> None:
    """I7; the rest of its room makes room for others, so that no second one is evicted in vain."""
    units = [runs("r", 8, "n"), runs("other", 4, "m"), HIGH, pod("next", 4, at=1, priority="high")]
    made = decide([node("n", 8), node("m", 2)], units[:1] + units[2:])
    assert say(made) == ["high waits on n for r", "r ends for high", "next waits on n for r"]
    made = decide([node("n", 8)], [runs("r", 8, "n"), pod("a", 6, priority="high"), pod("b", 4, at=1, priority="high")])
    assert say(made) == ["a waits on n for r", "r ends for a"]


def test_victim_comes_back_at_its_old_place() -> None:
    """I6: the planner orders a victim that waits again by the time that it kept."""
    made = decide([node("n", 4)], [pod("later", 4, at=50), pod("victim", 4, at=10)])
    assert say(made) == ["victim gets n"]


# Nominations


def test_nominated_unit_gets_its_cell_when_the_victims_have_ended() -> None:
    assert say(decide([node("n", 4)], [nominated(HIGH, "n", "gone")])) == ["high gets n"]


def test_cell_is_held_while_victims_end() -> None:
    units = [ending(runs("r", 3, "n")), nominated(HIGH, "n", "r"), pod("small", 1, priority="low")]
    assert say(decide([node("n", 4)], units)) == []


def test_only_what_the_victims_do_not_give_is_held() -> None:
    units = [ending(runs("r", 3, "n")), nominated(HIGH, "n", "r"), pod("small", 1, priority="low")]
    assert say(decide([node("n", 5)], units)) == ["small gets n"]


def test_nominated_unit_takes_a_better_free_place_at_once() -> None:
    units = [ending(runs("r", 4, "n")), nominated(HIGH, "n", "r")]
    assert say(decide([node("n", 4), node("m", 4)], units)) == ["high gets m"]


def test_room_that_was_made_for_an_earlier_spec_is_for_the_one_that_supersedes_it() -> None:
    earlier = msgspec.structs.replace(nominated(HIGH, "n", "r"), is_superseded=True)
    units = [ending(runs("r", 4, "n")), runs("other", 4, "m"), earlier, pod("later", 4, priority="high")]
    cells = [node("n", 4), node("m", 4)]
    assert say(decide(cells, units)) == ["later waits on n for r"], "nothing else is evicted"
    assert say(decide(cells, [runs("other", 4, "m"), earlier])) == []


def test_eviction_that_failed_is_asked_for_again() -> None:
    assert say(decide([node("n", 4)], [runs("r", 4, "n"), nominated(HIGH, "n", "r")])) == ["r ends for high"]


def test_unit_that_lost_its_place_to_a_foreign_pod_is_nominated_anew() -> None:
    units = [runs("r", 4, "m"), nominated(HIGH, "n", "gone")]
    stolen = node("n", 4, free={GPU: 0, MEMORY: 64, "cpu": 64, "pods": 16})
    assert say(decide([stolen, node("m", 4)], units)) == ["high waits on m for r", "r ends for high"]
    assert say(decide([stolen], units[1:])) == ["high waits for nothing"]


def test_rest_of_a_place_that_was_stolen_in_part_is_used_without_a_needless_eviction() -> None:
    units = [ending(runs("r", 2, "n")), runs("other", 2, "n"), nominated(HIGH, "n", "r", "gone")]
    made = decide([node("n", 4)], units)
    assert say(made) == ["high waits on n for other r", "other ends for high"]


@pytest.mark.parametrize(
    "cells",
    [[], [node("n", 4, closed="Cordoned")], [node("n", 4, pool="other")], [node("n", 2)]],
    ids=["vanished", "closed", "in another pool", "smaller"],
)
def test_nomination_for_a_cell_that_is_lost_is_withdrawn(cells: list) -> None:  # type: ignore[type-arg]
    assert say(decide(cells, [nominated(HIGH, "n", "gone")])) == ["high waits for nothing"]


@pytest.mark.parametrize("victims", [frozenset[str](), frozenset({"r"})], ids=["none", "one that runs"])
def test_nomination_for_more_cells_than_parts_is_void(victims: frozenset[str]) -> None:
    """Where no policy holds people, they edit the annotation: a cell that is not there hid that it is one too many."""
    forged = pod("high", 4, priority="high", nomination=Nomination(("node/n", "node/none"), victims))
    assert say(decide([node("n", 4)], [forged])) == ["high gets n"]
    made = decide([node("n", 4)], [runs("r", 4, "n", priority="high"), forged])
    assert say(made) == ["high waits for nothing"], "the cell is full"


def test_nomination_whose_victim_became_protected_is_withdrawn() -> None:
    units = [runs("r", 4, "n", is_protected=True), nominated(HIGH, "n", "r")]
    assert say(decide([node("n", 4)], units)) == ["high waits for nothing"]


def test_more_important_unit_takes_the_room_of_a_nominated_one() -> None:
    units = [ending(runs("r", 4, "n")), nominated(HIGH, "n", "r"), pod("top", 4, priority="critical")]
    assert say(decide([node("n", 4)], units)) == ["top waits on n for r", "high waits for nothing"]


def test_promised_room_is_not_for_an_older_unit_of_the_same_priority() -> None:
    older, new = pod("older", 2, at=-1, priority="high"), nominated(HIGH, "n", "r", "gone")
    assert say(decide([node("n", 4)], [older, new])) == ["high gets n"]
    ends = [ending(runs("r", 2, "n")), older, new]
    assert say(decide([node("n", 4)], ends)) == [], "the room of one that is gone is kept while the other one ends"
    assert say(decide([node("n", 4), node("m", 2)], ends)) == ["older gets m"]


def test_older_unit_is_ahead_of_a_nominated_one_where_nothing_is_promised() -> None:
    older, new = pod("older", 4, at=-1, priority="high"), nominated(HIGH, "n", "r")
    units = [ending(runs("r", 4, "n")), older, new]
    assert say(decide([node("n", 4), node("m", 4)], units)) == ["older gets m"]
    assert say(decide([node("m", 4)], [older, nominated(HIGH, "n", "gone")])) == [
        "older gets m",
        "high waits for nothing",
    ]


def test_promised_limit_is_not_for_an_older_unit_of_the_same_priority() -> None:
    rules = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=4)})
    units = [pod("older", 4, at=-1, priority="high"), nominated(HIGH, "n", "gone")]
    assert say(decide([node("n", 4), node("m", 4)], units, rules)) == ["high gets n"]


def test_same_decision_is_not_written_twice() -> None:
    """I8."""
    units = [ending(runs("r", 4, "n")), nominated(HIGH, "n", "r")]
    assert say(decide([node("n", 4)], units)) == []


# Gangs


def test_gang_is_admitted_whole_or_not_at_all() -> None:
    cells = [node("m", 4), node("n", 4)]
    assert say(decide(cells, [gang("g", 4, 4)])) == ["g gets m n"]
    assert say(decide(cells, [gang("g", 4, 4), runs("r", 1, "n", priority="critical")])) == []


def test_parts_of_a_gang_share_a_cell() -> None:
    assert say(decide([node("n", 4)], [gang("g", 2, 2)])) == ["g gets n n"]
    assert say(decide([node("n", 3)], [gang("g", 2, 2)])) == []


def test_largest_part_of_a_gang_is_placed_first() -> None:
    cells = [node("a", 2, weights=frozenset({"w"})), node("b", 1)]
    assert say(decide(cells, [gang("g", 1, 2, weights="w")])) == ["g gets b a"]


def test_gang_closes_no_pool_in_which_it_could_never_run_whole() -> None:
    # One cell has room for one of its two parts; the other pool, in which both fit, is taken.
    cells = [node("small", 4, pool="amd"), node("large", 8)]
    units = [
        gang("g", 4, 4, at=1.0, pools=("amd", "nvidia")),
        runs("r", 8, "large"),
        pod("single", 4, at=2.0, pools=("amd",)),
    ]
    made = decide(cells, units)
    assert say(made) == ["single gets small"]
    assert made.closed.keys() == {"node/large"}


def test_gang_has_units_evicted_on_several_cells() -> None:
    units = [runs("a", 4, "m"), runs("b", 4, "n"), gang("g", 4, 4, priority="high")]
    made = decide([node("m", 4), node("n", 4)], units)
    assert say(made) == ["g waits on m n for a b", "a ends for g", "b ends for g"]


def test_gang_uses_a_free_cell_beside_one_with_a_victim() -> None:
    units = [runs("b", 4, "n"), gang("g", 4, 4, priority="high")]
    assert say(decide([node("m", 4), node("n", 4)], units)) == ["g waits on m n for b", "b ends for g"]


def test_gang_as_a_victim_frees_room_for_each_part() -> None:
    victim = gang("v", 4, 4, cells=("node/m", "node/n"), evictable_since=0.0)
    units = [victim, runs("other", 4, "n", evictable_since=5.0), gang("g", 4, 4, priority="high")]
    made = decide([node("m", 4), node("n", 8)], units)
    assert say(made) == ["g waits on m n for v", "v ends for g"]


def test_gang_whose_places_are_not_all_known_is_no_victim() -> None:
    victim = gang("v", 4, 4, state="running", cells=("node/n",), evictable_since=0.0)
    cell = node("n", 4, free={GPU: 0, MEMORY: 64, "cpu": 64, "pods": 16})
    made = decide([cell], [victim, HIGH])
    assert say(made) == []


def test_gang_larger_than_the_cluster_closes_nothing() -> None:
    made = decide([node("n", 4)], [gang("g", 4, 4), pod("a", at=1)])
    assert say(made) == ["a gets n"]
    assert made.blocked["g"].feasible == 0


# Predecessors


def test_successor_is_nominated_for_the_place_of_its_predecessor() -> None:
    units = [runs("old", 4, "n"), pod("new", 4, replaces=frozenset({"old"}))]
    assert say(decide([node("n", 4)], units)) == ["new waits on n for old"]


def test_predecessor_of_equal_priority_gives_its_place_behind_a_blocked_unit() -> None:
    units = [runs("old", 4, "n"), pod("large", 8), pod("new", 4, at=1, replaces=frozenset({"old"}))]
    assert say(decide([node("n", 8)], units)) == ["new waits on n for old"]


def test_successor_that_needs_more_waits_behind_a_blocked_unit() -> None:
    units = [runs("old", 4, "n"), pod("large", 8), pod("new", 5, at=1, replaces=frozenset({"old"}))]
    assert say(decide([node("n", 8)], units)) == []


def test_successor_that_needs_a_device_of_another_kind_waits_behind_a_blocked_unit() -> None:
    old = runs("old", {MEMORY: 1, CPU: 1, PODS: 1}, "n")
    units = [old, runs("r", 1, "n"), pod("large", 8), pod("new", 1, at=1, replaces=frozenset({"old"}))]
    assert say(decide([node("n", 8)], units)) == []


def test_two_successors_do_not_share_one_predecessor() -> None:
    old = frozenset({"old"})
    units = [runs("old", 8, "n"), pod("a", 4, replaces=old), pod("b", 4, replaces=old)]
    assert say(decide([node("n", 8)], units)) == ["a waits on n for old"]


def test_predecessor_whose_place_is_for_its_successor_is_no_victim_of_a_nominated_unit() -> None:
    new = pod("new", 4, priority="critical", replaces=frozenset({"old"}))
    units = [ending(runs("r", 4, "n")), runs("old", 4, "n", priority="low"), new, nominated(HIGH, "n", "r", "old")]
    assert say(decide([node("n", 8)], units)) == ["new waits on n for old", "high waits on n for r"]


def test_predecessor_on_a_node_that_lost_its_devices_gives_no_place() -> None:
    lost = node("n", 0, free={GPU: 0, MEMORY: 64, "cpu": 64, "pods": 16})
    assert say(decide([lost], [runs("old", 4, "n"), pod("new", 4, replaces=frozenset({"old"}))])) == []


def test_place_of_a_predecessor_is_for_its_successor_also_once_it_is_gone() -> None:
    old, older = runs("old", 4, "n"), pod("older", 4, at=-1)
    new = nominated(pod("new", 4, replaces=frozenset({"old"})), "n", "old")
    for gone in ([old], [ending(old)]):
        assert say(decide([node("n", 4)], [*gone, older, new])) == []
    assert say(decide([node("n", 4)], [older, nominated(pod("new", 4), "n", "old")])) == ["new gets n"]


def test_successor_at_a_full_quota_takes_the_place_of_its_predecessor() -> None:
    rules = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=4)})
    units = [runs("old", 4, "n"), pod("new", 4, replaces=frozenset({"old"}))]
    assert say(decide([node("n", 8)], units, rules)) == ["new waits on n for old"]
    assert say(decide([node("n", 8)], [units[0], pod("other", 4)], rules)) == []


def test_successor_at_a_full_quota_keeps_the_place_of_its_predecessor_while_that_ends() -> None:
    rules = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=4)})
    ends = ending(runs("old", 4, "n", service="chat"))
    new = nominated(pod("new", 4, service="chat"), "n", "old")
    assert say(decide([node("n", 8)], [ends, new, pod("other", 4, at=-1)], rules)) == []
    stranger = ending(runs("stranger", 4, "n", namespace="other"))
    waits = nominated(pod("new", 4), "n", "stranger")
    units = [runs("busy", 4, "n"), stranger, waits]
    assert say(decide([node("n", 8)], units, rules)) == ["new waits for nothing"], "that frees nothing of its quota"


# Elastic pools

ELASTIC = PlanRules(pools={"nvidia": PoolRules(elastic=1)})


def test_head_goes_unpinned_to_an_elastic_pool() -> None:
    units = [runs("r", 4, "n"), HIGH, pod("next", 4, at=1, priority="high", is_protected=True)]
    assert say(decide([node("n", 4)], units, ELASTIC))[0] == "high gets a new node"


def test_need_larger_than_any_node_is_for_the_autoscaler() -> None:
    assert say(decide([node("n", 4)], [pod("a", 8)], ELASTIC)) == ["a gets a new node"]


def test_no_more_units_wait_for_a_node_than_the_pool_allows() -> None:
    assert say(decide([node("n", 4)], [pod("a", 8), pod("b", 8, at=1)], ELASTIC)) == ["a gets a new node"]


def test_units_that_wait_for_a_node_count_in_the_next_round() -> None:
    made = decide([node("n", 4)], [pod("a", 8, state="running"), pod("b", 8)], ELASTIC)
    assert say(made) == []


def test_unit_that_waits_for_a_node_counts_also_above_its_quota() -> None:
    rules = PlanRules(pools=ELASTIC.pools, quotas={("team", "nvidia"): PoolQuota(devices=4)})
    units = [runs("r", 4, "n"), pod("a", 8, state="running"), pod("b", 8, namespace="other")]
    for order in (units, units[::-1]):
        assert say(decide([node("n", 4)], order, rules)) == []


def test_autoscaler_adds_no_host_and_no_volume() -> None:
    bound = pod("a", 8, requirement=NodeRequirement("", {}, frozenset({"n"})))
    assert say(decide([node("n", 4)], [bound], ELASTIC)) == []
    rules = PlanRules(pools={"metal": PoolRules(elastic=1)})
    assert say(decide([], [process("p")], rules)) == []


def test_elastic_pool_keeps_to_the_quota() -> None:
    rules = PlanRules(pools=ELASTIC.pools, quotas={("team", "nvidia"): PoolQuota(devices=4)})
    assert say(decide([node("n", 4)], [pod("a", 8)], rules)) == []
