"""Elastic pools: pods go unpinned, so that an autoscaler adds nodes, and never more of them than a pool says."""

from typing import Any

from msgspec.structs import replace

from controller.placement.actions import Admit
from controller.placement.planner import PlanRules
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import NodeRequirement, Unit
from tests.support.queue_decisions import decide, nominated, say
from tests.support.queue_units import node, pod, process

TEAM_A = (("team", "a"),)
SPOT = (("capacity", "spot"),)
RULES = PlanRules(
    pools={"team-a": PoolRules(elastic=2, node_labels=TEAM_A), "spot": PoolRules(elastic=1, node_labels=SPOT)}
)


def pending(uid: str, *pools: str, labels: tuple[tuple[str, str], ...] = (), need: int = 1, **changes: Any) -> Unit:
    """Return a pod that was admitted to a pool without a node."""
    terms = [{"matchExpressions": [{"key": name, "operator": "In", "values": [value]} for name, value in labels]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    requirement = NodeRequirement("", {"affinity": {"nodeAffinity": required}})
    return pod(uid, need, state="running", pools=pools, requirement=requirement, **changes)


def test_as_many_go_unpinned_as_the_pool_says_with_its_labels() -> None:
    made = decide([], [pod(f"u{number}", at=number, pools=("team-a",)) for number in range(4)], RULES)
    assert say(made) == ["u0 gets a new node", "u1 gets a new node"]
    assert [action.node_labels for action in made.actions if isinstance(action, Admit)] == [TEAM_A, TEAM_A]


def test_what_is_pending_already_counts_until_it_has_a_node() -> None:
    units = [
        pending("p", "team-a", labels=TEAM_A),
        *(pod(f"u{number}", at=number, pools=("team-a",)) for number in range(3)),
    ]
    assert say(decide([], units, RULES)) == ["u0 gets a new node"]
    full = node("n", 1, pool="team-a")
    runs = pod("p", state="running", pools=("team-a",), cells=("node/n",))
    assert say(decide([full], [runs, *units[1:]], RULES)) == ["u0 gets a new node", "u1 gets a new node"]


def test_pod_that_another_gate_holds_does_not_go_unpinned() -> None:
    """No scheduler would place it, and it would keep room on each node of the pool from all others, for ever."""
    held = pod("held", pools=("team-a",), has_other_gate=True)
    assert say(decide([], [held, pod("u", at=1, pools=("team-a",))], RULES)) == ["u gets a new node"]
    assert say(decide([node("n", 1, pool="team-a")], [held], RULES)) == ["held gets n"]


def test_room_of_a_new_node_is_left_to_what_waits_for_it_unpinned() -> None:
    pinned = [pod(f"u{number}", at=number, pools=("team-a",)) for number in range(3)]
    units = [pending("p", "team-a", labels=TEAM_A), pending("q", "team-a", labels=TEAM_A), *pinned]
    of_pool: dict[str, Any] = {"pool": "team-a", "labels": dict(TEAM_A)}
    assert say(decide([node("n", 2, **of_pool)], units, RULES)) == []
    assert say(decide([node("n", 3, **of_pool)], units, RULES)) == ["u0 gets n"]
    closed = node("n", 2, closed="NotReady", **of_pool)
    assert say(decide([closed, node("m", 8, pool="nvidia")], units, RULES)) == []


def test_nothing_goes_unpinned_while_the_scheduler_would_put_it_on_room_for_others() -> None:
    of_pool: dict[str, Any] = {"pools": ("team-a",)}
    # One of the two devices is free, and kept for "large" until "old" has ended.
    old = pod("old", cells=("node/n",), **of_pool, priority="batch")
    kept = [nominated(pod("large", 2, priority="high", **of_pool), "n", "old"), replace(old, state="ending")]
    small = pod("small", at=2, **of_pool)
    cells = [node("n", 2, pool="team-a")]
    assert say(decide(cells, [*kept, small], RULES)) == []
    assert say(decide(cells, [*kept, pod("wide", 2, at=2, **of_pool)], RULES)) == ["wide gets a new node"]
    assert say(decide([*cells, node("m", 1, pool="team-a")], [*kept, small], RULES)) == ["small gets m"]
    # One that would wait a round for what this round gives would close the node to others of its priority meanwhile.
    made = decide([node("n", 1, pool="team-a")], [pod("first", **of_pool), small], RULES)
    assert say(made) == ["first gets n", "small gets a new node"]


def test_nothing_goes_unpinned_while_the_scheduler_would_put_it_on_a_node_closed_to_it() -> None:
    # The volume of "bound" is on this node: no new one helps it.
    bound = pod("bound", 2, pools=("team-a",))
    bound = replace(bound, requirement=replace(bound.requirement, volume_nodes=frozenset({"n"})))
    holder = pod("r", cells=("node/n",), pools=("team-a",), priority="critical")
    cells = [node("n", 2, pool="team-a")]
    assert say(decide(cells, [holder, bound, pod("small", at=2, pools=("team-a",))], RULES)) == []
    wide = pod("wide", 2, at=2, pools=("team-a",))
    assert say(decide(cells, [holder, bound, wide], RULES)) == ["wide gets a new node"]


def test_node_that_is_too_small_for_what_waits_unpinned_is_left_to_others() -> None:
    cell = node("n", 4, pool="team-a", labels=dict(TEAM_A))
    units = [pending("p", "team-a", labels=TEAM_A, need=4), pod("u", 2, pools=("team-a",))]
    assert say(decide([cell], units, RULES)) == ["u gets a new node"]
    holder = pod("h", 1, pools=("team-a",), cells=("node/n",), is_protected=True)
    assert say(decide([cell], [*units, holder], RULES)) == ["u gets n"]


def test_pod_that_a_scheduler_places_by_itself_keeps_no_room() -> None:
    assert say(decide([node("n", 1)], [pending("p", "nvidia"), pod("u")])) == ["u gets n"]


def test_pending_pod_counts_in_the_pool_whose_labels_it_has() -> None:
    both = ("team-a", "spot")
    units = [pending("p", *both, labels=SPOT), *(pod(f"u{number}", at=number, pools=both) for number in range(4))]
    made = decide([], units, RULES)
    assert [action.node_labels for action in made.actions if isinstance(action, Admit)] == [TEAM_A, TEAM_A]


def test_pending_pod_without_labels_counts_in_the_pool_that_has_none() -> None:
    rules = PlanRules(pools={**RULES.pools, "nvidia": PoolRules(elastic=1)})
    units = [
        pending("p", "team-a", "nvidia"),
        *(pod(f"u{number}", at=number, pools=("team-a", "nvidia")) for number in range(4)),
    ]
    made = decide([], units, rules)
    assert [action.node_labels for action in made.actions if isinstance(action, Admit)] == [TEAM_A, TEAM_A]


def test_pod_whose_selector_contradicts_the_pool_waits_for_no_node_of_it() -> None:
    def admitted(**selector: str) -> list[str]:
        return say(decide([], [pod("u", pools=("team-a",), selector=selector)], RULES))

    assert admitted(team="b") == []
    assert admitted(team="a", zone="z") == ["u gets a new node"]


def test_process_and_pod_over_its_quota_wait_for_no_node() -> None:
    assert say(decide([], [process("m", pools=("team-a",))], RULES)) == []
    rules = RULES._replace(quotas={("*", "team-a"): PoolQuota(devices=1)})
    units = [pod(f"u{number}", at=number, pools=("team-a",)) for number in range(2)]
    assert say(decide([], units, rules)) == ["u0 gets a new node"]
