"""The rules of the planner by name: order, admission, and the head of the line."""

import msgspec
import pytest

from controller.placement import planner
from controller.placement.actions import Admit, EvictUnit
from controller.placement.planner import plan
from controller.placement.score import score_cell
from controller.placement.units import CPU, MEMORY, NodeRequirement, subtract_amounts
from tests.support.queue_decisions import NOW, RULES, decide, nominated, runs, say, subtract_units
from tests.support.queue_units import GPU, gpus, host, node, pod, process

# Order


def test_more_important_unit_is_admitted_first() -> None:
    made = decide([node("n", 1)], [pod("old", at=1), pod("high", at=2, priority="high")])
    assert say(made) == ["high gets n"]


def test_unit_that_waits_longer_is_admitted_first() -> None:
    assert say(decide([node("n", 1)], [pod("a", at=2), pod("b", at=1)])) == ["b gets n"]


def test_order_of_equal_units_follows_from_their_uid() -> None:
    assert say(decide([node("n", 1)], [pod("b"), pod("a")])) == ["a gets n"]


def test_pods_and_processes_are_in_one_queue() -> None:
    made = decide([node("n", 1), host("h")], [process("p", at=2), pod("a", at=1)])
    assert say(made) == ["a gets n", "p gets h"]


# Admission


@pytest.mark.parametrize("resource", [GPU, MEMORY, CPU, "pods"])
def test_each_resource_must_be_free(resource: str) -> None:
    cell = node("n")
    short = msgspec.structs.replace(cell, free={**cell.free, resource: 1})
    need = {GPU: 2, MEMORY: 2, CPU: 2, "pods": 2}
    assert say(decide([cell], [pod("a", need)])) == ["a gets n"]
    assert say(decide([short], [pod("a", need)])) == []


def test_small_unit_leaves_whole_nodes_to_large_ones() -> None:
    made = decide([node("empty", 8), node("used", 8)], [runs("r", 7, "used"), pod("a")])
    assert say(made) == ["a gets used"]


def test_replicas_of_a_service_are_spread() -> None:
    cells = [node("m", 8), node("n", 8)]
    units = [pod("a", at=1, service="s"), pod("b", at=2, service="s"), runs("r", 1, "m", service="s")]
    assert say(decide(cells, units)) == ["a gets n", "b gets m"]


def test_host_with_most_memory_free_is_preferred_before_a_faster_one() -> None:
    cells = [host("g", 32, bandwidth_bytes_per_second=800), host("h", 64, bandwidth_bytes_per_second=400)]
    assert say(decide(cells, [process("p")])) == ["p gets h"]


def test_faster_of_two_hosts_with_as_much_free_is_preferred() -> None:
    cells = [host("g", bandwidth_bytes_per_second=400), host("h", bandwidth_bytes_per_second=800)]
    assert say(decide(cells, [process("p")])) == ["p gets h"]


def test_score_is_explained_by_all_that_decides() -> None:
    free = {MEMORY: 40 * 2**30}
    there = host("h", free=free, weights=frozenset({"w"}), bandwidth_bytes_per_second=800 * 10**9)
    held = score_cell(process("p", weights="w"), {MEMORY: 8 * 2**30}, there, free, siblings=0)
    assert held.explain() == "no replica of the service there, 48 points, weights there, 32.0 GiB left, 800 GB/s"
    unknown = score_cell(process("p"), {MEMORY: 8 * 2**30}, there, free, siblings=0)
    assert unknown.explain() == "no replica of the service there, 32 points, 32.0 GiB left, 800 GB/s"
    refused = pod("a", weights="w", refused_by=frozenset({"node/n"}))
    score = score_cell(refused, gpus(2), node("n", 3), node("n", 3).free, siblings=1)
    assert score.explain() == "refused there before, 1 replica of the service there, 35 points, 1 device left"
    lacking = score_cell(process("p", weights="v"), {MEMORY: 8 * 2**30}, there, free, siblings=0)
    assert lacking.explain() == "no replica of the service there, 32 points, weights to fetch, 32.0 GiB left, 800 GB/s"


def test_cell_with_the_weights_is_preferred() -> None:
    cells = [host("g"), host("h", weights=frozenset({"w"}))]
    assert say(decide(cells, [process("p", weights="w")])) == ["p gets h"]


def test_cell_that_refused_the_unit_is_tried_last() -> None:
    cells = [host("g"), host("h", weights=frozenset({"w"}))]
    unit = process("p", weights="w", refused_by=frozenset({"host/h"}))
    assert say(decide(cells, [unit])) == ["p gets g"]
    assert say(decide(cells[1:], [unit])) == ["p gets h"]


def test_cell_to_avoid_is_not_used() -> None:
    assert say(decide([node("n")], [pod("a", avoid=frozenset({"node/n"}))])) == []


def test_closed_cell_is_not_used() -> None:
    made = decide([node("n", closed="Cordoned")], [pod("a")])
    assert say(made) == []
    assert made.blocked["a"].feasible == 1


def test_preferred_pool_is_used_first() -> None:
    cells = [node("n"), node("m", pool="amd")]
    assert say(decide(cells, [pod("a", pools=("amd", "nvidia"))])) == ["a gets m"]
    assert say(decide(cells, [pod("a", 8, pools=("nvidia", "amd")), runs("r", 1, "n")])) == ["a gets m"]


def test_node_that_shrank_below_its_use_takes_only_who_needs_nothing_of_that() -> None:
    shrunk = node("n", free={GPU: 1, MEMORY: -5, CPU: 5, "pods": 5})
    assert say(decide([shrunk], [pod("a", {GPU: 1, MEMORY: 0})])) == ["a gets n"]
    assert say(decide([shrunk], [pod("a", {GPU: 1, MEMORY: 1})])) == []


def test_volume_that_is_bound_elsewhere_keeps_only_its_own_pod_away() -> None:
    bound = NodeRequirement("same", {}, frozenset({"m"}))
    units = [pod("a", at=1, requirement=bound), pod("b", at=2, requirement=NodeRequirement("same", {}))]
    assert say(decide([node("n", 1)], units)) == ["b gets n"]


# Head of line


def test_equal_unit_does_not_pass_a_blocked_one() -> None:
    units = [runs("r", 1, "n", priority="high"), pod("large", 8, at=1), pod("small", 1, at=2)]
    made = decide([node("n", 8)], units)
    assert say(made) == []
    assert made.blocked["small"].is_shadowed
    assert not made.blocked["large"].is_shadowed


def test_less_important_unit_passes_a_blocked_one() -> None:
    units = [runs("r", 1, "n", priority="high"), pod("large", 8, at=1), pod("small", 1, at=2, priority="low")]
    assert say(decide([node("n", 8)], units)) == ["small gets n"]


def test_protected_unit_does_not_pass_a_blocked_one() -> None:
    protected = pod("small", 1, at=2, priority="low", is_protected=True)
    units = [runs("r", 1, "n", priority="high"), pod("large", 8, at=1), protected]
    assert say(decide([node("n", 8)], units)) == []


def test_equal_unit_passes_on_a_cell_that_the_blocked_one_cannot_use() -> None:
    units = [runs("r", 1, "n", priority="high"), pod("large", 8, at=1), pod("small", 1, at=2)]
    assert say(decide([node("n", 8), node("m", 4)], units)) == ["small gets m"]


def test_equal_unit_does_not_preempt_where_one_ahead_waits() -> None:
    # "large" has no use for the end of "low" alone; "small" must not have it evicted.
    units = [
        runs("keep", 4, "n", priority="high"),
        runs("low", 4, "n", priority="low"),
        pod("large", 8, at=1),
        pod("small", 4, at=2),
    ]
    assert say(decide([node("n", 8)], units)) == []


def test_unit_that_can_never_run_closes_nothing() -> None:
    made = decide([node("n", 4)], [pod("huge", 8, at=1), pod("small", 1, at=2)])
    assert say(made) == ["small gets n"]
    assert made.blocked["huge"].feasible == 0


def test_nothing_passes_where_a_unit_is_soon_old_enough_to_be_evicted() -> None:
    units = [
        runs("young", 4, "n", priority="low", evictable_since=NOW - 100),
        pod("large", 8, at=1),
        pod("small", 1, at=2, priority="batch"),
    ]
    made = decide([node("n", 8)], units)
    assert say(made) == []
    assert made.again_seconds == 200


def test_unit_starts_despite_endless_churn_of_equal_and_lower_ones() -> None:
    """I5 without aging: within a priority only the time in the queue counts, and lower units are kept from one cell."""
    for priority in ("normal", "low"):
        cells = [node("m", 4), node("n", 4)]
        running = [
            runs(f"{cell}-{index}", 1, cell, priority=priority, evictable_since=NOW - 50.0 * index)
            for cell in "mn"
            for index in range(4)
        ]
        large, now = pod("large", 4, at=1), NOW
        for number in range(100):
            now += 50.0
            ended = running.pop(0)
            waiting = [large, pod(f"next-{number}", at=now, priority=priority)]
            free = [subtract_units(cell, running) for cell in cells]
            made = plan(free, [*running, *waiting], RULES, now)
            if any(action.unit is large for action in made.actions if not isinstance(action, EvictUnit)):
                break
            running += [
                msgspec.structs.replace(action.unit, state="running", cells=action.cells, evictable_since=now)
                for action in made.actions
                if isinstance(action, Admit)
            ]
            if not running:
                running = [ended]
        else:
            pytest.fail(f"units of priority {priority} keep the large one waiting for ever")


def test_units_beyond_the_considered_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CONSIDERED", 2)
    made = decide([node("n", 8)], [pod(f"u{number}", at=number) for number in range(4)])
    assert say(made) == ["u0 gets n", "u1 gets n"]
    assert len(made.queue) == 4


def test_blocked_units_of_one_pool_do_not_use_up_the_round_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CONSIDERED", 2)
    many = [pod(f"u{number}", gpus(1 + number % 4), at=number) for number in range(8)]
    made = decide([node("n", 0, total={GPU: 8}, free={GPU: 0}), host("h")], [*many, process("p", at=9)])
    assert say(made) == ["p gets h"]


def test_units_that_are_like_a_blocked_one_do_not_count_as_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CONSIDERED", 2)
    many = [pod(f"u{number}", 8, at=number) for number in range(8)]
    made = decide([node("n", 8), node("m", 4)], [runs("r", 1, "n"), *many, pod("small", 1, at=9)])
    assert say(made) == ["small gets m"]


def test_nothing_passes_a_unit_that_is_not_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CONSIDERED", 1)
    units = [pod("a", at=1), pod("b", at=2), pod("c", at=3, pools=("amd", "nvidia"))]
    assert say(decide([node("n", 8)], units)) == ["a gets n"]


def test_nominated_unit_is_always_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CONSIDERED", 0)
    assert say(decide([node("n", 8)], [nominated(pod("a"), "n", "gone")])) == ["a gets n"]


@pytest.mark.parametrize(("lasting", "expected"), [(0, []), (1, ["small gets n"])])
def test_one_that_waits_for_what_may_never_end_closes_no_cell(lasting: int, expected: list[str]) -> None:
    """A pod of a DaemonSet has one CPU, and the first pod wants all: it would keep the node from others for ever."""
    cell = node("n")
    taken = gpus(0, cpu=lasting or 1)
    cell = msgspec.structs.replace(cell, free=subtract_amounts(cell.total, taken), lasting=taken if lasting else {})
    whole = pod("whole", gpus(1, cpu=64))
    assert say(decide([cell], [whole, pod("small", at=1)])) == expected
