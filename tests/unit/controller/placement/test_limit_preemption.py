"""Preemption inside a limit: a unit that a limit holds back ends less important ones that count against it."""

import msgspec
import pytest

from controller.placement.planner import MIN_RUN_SECONDS, PlanRules
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import Unit
from tests.support.queue_decisions import NOW, decide, nominated, runs, say
from tests.support.queue_units import gpus, host, node, pod, process


def quota(devices: int) -> PlanRules:
    return PlanRules(quotas={("team", "nvidia"): PoolQuota(devices)})


QUOTA_OF_4 = quota(4)
HIGH = pod("high", 2, priority="high")


def other(uid: str, need: int, cell: str, **changes: object) -> Unit:
    """Return a pod of another namespace, which does not count in the quota, and that no unit here may evict."""
    return runs(uid, need, cell, **{"namespace": "other", "priority": "critical", **changes})


def lent(uid: str, need: int, cell: str, **changes: object) -> Unit:
    """Return a pod that runs in pool nvidia, and is at home in pool amd."""
    return runs(uid, need, cell, **{"pools": ("amd", "nvidia"), "priority": "batch", **changes})


# Each limit, and the units that count against it


def test_less_important_unit_of_the_namespace_makes_room_in_the_quota() -> None:
    units = [runs("r", 2, "n"), runs("s", 2, "n", priority="batch"), HIGH]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == ["high waits on n for s", "s ends for high"]


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "other"},
        {"priority": "high"},
        {"is_protected": True},
        {"evictable_since": NOW - MIN_RUN_SECONDS + 1},
    ],
)
def test_unit_that_is_no_victim_of_the_quota_is_not_evicted(changes: dict[str, object]) -> None:
    spared = runs("spared", 2, "n", **{"priority": "batch", **changes})
    units = [runs("r", 4, "n", priority="critical"), spared, HIGH]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == []


def test_unit_in_another_pool_is_no_victim_of_the_quota() -> None:
    units = [runs("r", 4, "n"), runs("elsewhere", 4, "a", pools=("amd",), priority="batch"), pod("x", 2)]
    assert say(decide([node("n", 8), node("a", 8, pool="amd")], units, QUOTA_OF_4)) == []


def test_quota_of_memory_makes_room_on_hosts() -> None:
    rules = PlanRules(quotas={("*", "metal"): PoolQuota(memory_bytes=48)})
    old = process("old", 32, cells=("host/h",), priority="low", evictable_since=0.0)
    made = decide([host("h"), host("i")], [old, process("new", 32, priority="high")], rules)
    assert say(made)[1:] == ["old ends for new"]


def test_less_important_unit_at_home_makes_room_below_nominal() -> None:
    units = [runs("own", 4, "n", priority="low"), lent("guest", 1, "n"), HIGH]
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=4)})
    assert say(decide([node("n", 8)], units, rules)) == ["high waits on n for own", "own ends for high"]


def test_less_important_unit_that_borrows_makes_room_in_what_a_pool_lends() -> None:
    full = runs("full", 8, "a", pools=("amd",), priority="critical")
    units = [full, runs("own", 1, "n", priority="batch"), lent("guest", 4, "n"), pod("x", 2, pools=("amd", "nvidia"))]
    made = decide(
        [node("n", 8), node("a", 8, pool="amd")], units, PlanRules(pools={"nvidia": PoolRules(lending_limit=4)})
    )
    assert say(made) == ["x waits on n for guest", "guest ends for x"]


def test_unit_of_the_same_home_makes_room_in_what_that_borrows_wherever_it_is() -> None:
    stranger = lent("stranger", 2, "o", pools=("metal", "other"))
    units = [lent("guest", 2, "o", pools=("amd", "other")), stranger, pod("x", 2, pools=("amd", "nvidia"))]
    rules = PlanRules(pools={"amd": PoolRules(borrowing_limit=2)})
    made = decide([node("n", 8), node("o", 8, pool="other")], units, rules)
    assert say(made) == ["x waits on n for guest", "guest ends for x"]


# Victims


def test_least_important_then_latest_units_are_evicted_and_no_more_than_needed() -> None:
    units = [
        runs("first", 1, "n", priority="batch", evictable_since=1.0),
        runs("last", 1, "m", priority="batch", evictable_since=2.0),
        runs("low", 1, "n", priority="low", evictable_since=3.0),
        runs("more", 1, "n", priority="low"),
        pod("x", 1, priority="high"),
    ]
    cells = [node("n", 8), node("m", 8)]
    assert say(decide(cells, units, QUOTA_OF_4))[1:] == ["last ends for x"]
    two = [*units[:4], pod("x", 2, priority="high")]
    assert sorted(say(decide(cells, two, QUOTA_OF_4))[1:]) == ["first ends for x", "last ends for x"]


def test_unit_that_a_larger_victim_makes_needless_is_spared() -> None:
    units = [
        runs("small", 1, "n", priority="batch"),
        runs("large", 3, "n", priority="low"),
        pod("x", 3, priority="high"),
    ]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == ["x waits on n for large", "large ends for x"]
    # Nor is it a reason to take its cell.
    units[:2] = [runs("small", 1, "a", priority="batch"), runs("large", 3, "b", priority="low")]
    full = [other("full-a", 5, "a"), other("full-b", 5, "b")]
    made = decide([node("a", 8), node("b", 8)], [*units, *full], QUOTA_OF_4)
    assert say(made) == ["x waits on b for large", "large ends for x"]


@pytest.mark.parametrize(("memory", "is_evicted"), [(63, True), (64, False)])
def test_nothing_is_evicted_for_a_limit_without_room_on_a_cell(memory: int, *, is_evicted: bool) -> None:
    x = pod("x", gpus(4, memory=memory), priority="high")
    made = decide([node("n", 8)], [runs("r", 4, "n", priority="batch"), other("full", 4, "n"), x], QUOTA_OF_4)
    assert say(made) == (["x waits on n for r", "r ends for x"] if is_evicted else [])


def test_nothing_is_evicted_on_a_cell_without_room_in_the_limit() -> None:
    stranger = other("stranger", 4, "n", priority="batch")
    units = [runs("r", 4, "n", priority="critical"), stranger, pod("x", 4, priority="high")]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == []


def test_victims_make_room_in_the_limit_and_on_the_cell() -> None:
    units = [
        runs("mine", 2, "n", priority="low"),
        other("full", 6, "n"),
        runs("busy", 2, "m", priority="critical"),
        other("theirs", 6, "m", priority="batch"),
        pod("x", 3, priority="high"),
    ]
    made = decide([node("n", 8), node("m", 8)], units, quota(5))
    assert say(made) == ["x waits on m for mine theirs", "mine ends for x", "theirs ends for x"]


def test_units_that_count_against_the_limit_are_evicted_rather_than_strangers() -> None:
    units = [
        runs("late", 1, "a", priority="batch", evictable_since=9.0),
        other("full-a", 6, "a"),
        other("theirs", 1, "a", priority="batch"),
        *(runs(f"mine-{number}", 1, "b", priority="batch") for number in range(3)),
        other("full-b", 5, "b"),
        HIGH,
    ]
    assert say(decide([node("a", 8), node("b", 8)], units, QUOTA_OF_4))[0] == "high waits on b for mine-1 mine-2"


def test_strangers_are_evicted_rather_than_more_important_units() -> None:
    units = [
        *(runs(f"mine-{name}", 1, name, priority="batch") for name in "ab"),
        *(other(f"theirs-{name}", 1, name, priority="batch") for name in "ab"),
        *(runs(f"low-{number}", 1, "c", priority="low") for number in range(2)),
        HIGH,
    ]
    cells = [node("a", 2), node("b", 2), node("c", 2)]
    assert say(decide(cells, units, QUOTA_OF_4))[0] == "high waits on a for mine-a mine-b theirs-a"


def test_victims_satisfy_all_limits_at_once() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=6)}, quotas=QUOTA_OF_4.quotas)
    units = [
        runs("mine", 4, "n", priority="low"),
        other("theirs", 2, "n", priority="batch"),
        pod("x", 4, priority="high"),
    ]
    assert say(decide([node("n", 16)], units, rules)) == ["x waits on n for mine", "mine ends for x"]
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=5)}, quotas=QUOTA_OF_4.quotas)
    assert say(decide([node("n", 16)], units, rules))[0] == "x waits on n for mine theirs"


def test_limit_below_what_runs_takes_as_many_victims_as_lead_below_it() -> None:
    units = [*(runs(f"r{number}", 2, "n", priority="batch") for number in range(4)), HIGH]
    made = decide([node("n", 16)], units, QUOTA_OF_4)
    assert say(made)[0] == "high waits on n for r0 r1 r2"


def test_gang_has_units_evicted_for_a_limit() -> None:
    units = [runs("r", 4, "n", priority="batch"), pod("g", parts=(gpus(2), gpus(2)), priority="high")]
    assert say(decide([node("n", 6), node("m", 2)], units, QUOTA_OF_4))[1:] == ["r ends for g"]


# Order, and the rounds that follow


def test_unit_ahead_that_waits_for_the_limit_is_not_passed() -> None:
    units = [
        runs("busy", 2, "n"),
        runs("batch", 2, "n", priority="batch"),
        pod("large", 4, at=1),
        pod("small", 2, at=2),
    ]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == []


def test_limit_that_is_kept_for_a_unit_ahead_is_not_taken() -> None:
    units = [
        other("full", 4, "a"),
        runs("batch", 2, "b", priority="batch"),
        pod("ahead", 4, at=1, selector={"zone": "a"}),
        pod("x", 5, at=2),
    ]
    cells = [node("a", 4, labels={"zone": "a"}), node("b", 5)]
    assert say(decide(cells, units, quota(8))) == []
    assert say(decide(cells, units, quota(9))) == ["x waits on b for batch", "batch ends for x"]


def test_nominated_unit_yields_the_limit_to_a_more_important_one_and_to_no_older_one() -> None:
    leaving, busy = runs("r", 2, "n", state="ending", priority="batch"), runs("busy", 2, "n", priority="critical")
    units = [busy, leaving, nominated(pod("x", 2, at=2), "n", "r")]
    assert say(decide([node("n", 8)], [*units, pod("large", 4, at=1)], QUOTA_OF_4)) == []
    large = pod("large", 4, at=3, priority="high")
    assert say(decide([node("n", 8)], [*units, large], QUOTA_OF_4)) == ["x waits for nothing"]


def test_rest_of_a_victim_is_used_before_another_one_ends() -> None:
    units = [
        runs("large", 2, "a", priority="low"),
        runs("small", 1, "b", priority="batch"),
        other("full", 7, "b"),
        pod("x", 1, at=1, selector={"zone": "a"}),
        pod("y", 1, at=2),
    ]
    made = decide([node("a", 2, labels={"zone": "a"}), node("b", 8)], units, quota(3))
    assert say(made) == ["x waits on a for large", "large ends for x", "y waits on a for large"]


def test_victims_of_two_units_are_shared_or_apart() -> None:
    units = [
        runs("one", 2, "n", priority="batch", evictable_since=1.0),
        runs("two", 2, "n", priority="batch"),
        *(pod(f"x{number}", 1, at=number) for number in range(4)),
    ]
    assert say(decide([node("n", 16)], units, QUOTA_OF_4)) == [
        "x0 waits on n for one",
        "one ends for x0",
        "x1 waits on n for one",
        "x2 waits on n for two",
        "two ends for x2",
        "x3 waits on n for two",
    ]


def test_nominated_unit_holds_cell_and_limit_until_the_victims_have_ended() -> None:
    leaving = runs("r", 4, "n", state="ending", priority="batch")
    waits, late = nominated(pod("x", 4, priority="high"), "m", "r"), pod("late", 1, at=1)
    cells = [node("n", 8), node("m", 4)]
    assert say(decide(cells, [leaving, waits, late], QUOTA_OF_4)) == []
    assert say(decide(cells, [waits, late], QUOTA_OF_4)) == ["x gets m"]
    # What the victims free is not counted twice.
    assert say(decide(cells, [leaving, waits, late], quota(5))) == ["late gets n"]
    refused = msgspec.structs.replace(leaving, state="running")
    better = runs("better", 4, "n", priority="batch", evictable_since=9.0)
    assert say(decide(cells, [refused, better, waits], quota(8))) == ["r ends for x"]


def test_nomination_whose_victims_do_not_suffice_any_more_is_decided_anew() -> None:
    units = [
        runs("r", 2, "n", state="ending", priority="batch"),
        runs("grown", 2, "n", priority="low"),
        nominated(pod("x", 4, priority="high"), "m", "r"),
    ]
    made = decide([node("n", 4), node("m", 4)], units, QUOTA_OF_4)
    assert say(made) == ["x waits on m for grown r", "grown ends for x"]


def test_unit_that_ends_anyway_is_waited_for_and_none_is_evicted() -> None:
    units = [
        runs("ends", 2, "n", state="ending", priority="critical"),
        runs("r", 2, "n", priority="batch"),
        HIGH,
    ]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == ["high waits on n for ends"]


def test_limit_is_waited_for_while_the_victims_are_too_young() -> None:
    young = runs("young", 4, "n", priority="batch", evictable_since=NOW - 100)
    made = decide([node("n", 8)], [young, HIGH, pod("late", 1, at=1)], QUOTA_OF_4)
    assert (say(made), made.again_seconds) == ([], MIN_RUN_SECONDS - 100)
    assert made.blocked["high"].limit is not None
    # The room of the cell is there: others may have it meanwhile.
    assert say(decide([node("n", 8)], [young, HIGH, pod("b", 4, namespace="other")], QUOTA_OF_4)) == ["b gets n"]


def test_limit_is_waited_for_until_the_first_victims_may_end() -> None:
    ages = {"a": 100, "b": 150, "c": 1000}
    units = [runs(name, 2, "n", priority="batch", evictable_since=NOW - age) for name, age in ages.items()]
    made = decide([node("n", 12)], [*units, pod("x", 4)], quota(6))
    assert (say(made), made.again_seconds) == ([], MIN_RUN_SECONDS - 150)


def test_successor_keeps_the_limit_of_its_predecessor_out_of_reach() -> None:
    units = [
        runs("old", 4, "n", priority="low", service="s"),
        pod("new", 4, priority="low", service="s", replaces=frozenset({"old"})),
        pod("x", 4, at=1, priority="low"),
    ]
    assert say(decide([node("n", 8)], units, QUOTA_OF_4)) == ["new waits on n for old"]


def test_unit_without_a_known_cell_makes_room_in_a_limit() -> None:
    pending = pod("pending", 4, state="running", priority="batch")
    assert say(decide([node("n", 8)], [pending, HIGH], QUOTA_OF_4)) == [
        "high waits on n for pending",
        "pending ends for high",
    ]
