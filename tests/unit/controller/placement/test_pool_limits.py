"""Limits of pools in the planner: quotas, nominal amounts, lending, borrowing, and rules that contradict each other."""

import msgspec
import pytest

from controller.placement.explanation import RefusalCounter
from controller.placement.planner import CONSIDERED, PlanRules
from controller.placement.pool_limits import PoolQuota, PoolRules, find_pool_problems
from controller.placement.units import Unit
from crds.size import GIB
from tests.support.queue_decisions import NOW, decide, nominated, runs, say
from tests.support.queue_units import gpus, host, node, pod, process

BOTH = ("nvidia", "amd")
CELLS = [node("n", 8), node("a", 8, pool="amd")]


def quota(devices: int | None = None, memory_bytes: int | None = None) -> PlanRules:
    return PlanRules(quotas={("team", "nvidia"): PoolQuota(devices, memory_bytes)})


def pools(**rules: PoolRules) -> PlanRules:
    return PlanRules(pools=rules)


def borrower(uid: str, need: int = 4, at: float = 0.0, **changes: object) -> Unit:
    """Return a pod at home in pool amd that may use pool nvidia, too."""
    return pod(uid, need, at=at, **{"pools": ("amd", "nvidia"), **changes})


# Quotas


def test_quota_of_devices_holds_a_unit_back() -> None:
    units = [runs("r", 2, "n"), pod("a", 2, at=1), pod("b", 2, at=2)]
    made = decide([node("n")], units, quota(devices=4))
    assert say(made) == ["a gets n"]
    assert str(made.blocked["b"].limits[0].reason) == "Quota"


def test_quota_of_each_namespace_counts_each_apart_and_yields_to_its_own() -> None:
    quotas = {("*", "nvidia"): PoolQuota(2), ("rich", "nvidia"): PoolQuota()}
    units = [pod(f"{name}-{number}", 2, namespace=name) for name in ("a", "b", "rich") for number in range(2)]
    made = decide([node("n", 16)], units, PlanRules(quotas=quotas))
    assert say(made) == [f"{name} gets n" for name in ("a-0", "b-0", "rich-0", "rich-1")]


def test_quota_counts_a_predecessor_that_runs_on_beside_its_successor() -> None:
    """A tenant that forges the mark of a template could hold any number of devices."""
    new = nominated(pod("new", 4, service="s", replaces=frozenset({"old"})), "n", "old")
    made = decide([node("n", 8)], [runs("old", 4, "n", service="s"), new], quota(devices=4))
    assert say(made) == []
    assert say(decide([node("n", 8)], [new], quota(devices=4))) == ["new gets n"]


def test_quota_of_memory_holds_a_unit_back() -> None:
    units = [pod("a", gpus(1, memory=30), at=1), pod("b", gpus(1, memory=30), at=2)]
    assert say(decide([node("n")], units, quota(memory_bytes=59))) == ["a gets n"]
    assert say(decide([node("n")], units, quota(memory_bytes=60))) == ["a gets n", "b gets n"]


def test_quota_is_of_its_namespace_and_pool_alone() -> None:
    units = [runs("r", 4, "n"), pod("a", 4, namespace="other"), pod("b", 4, pools=BOTH)]
    assert say(decide(CELLS, units, quota(devices=4))) == ["a gets n", "b gets a"]


def test_quota_below_what_runs_evicts_nothing_and_admits_nothing_more() -> None:
    assert say(decide([node("n")], [runs("r", 4, "n"), pod("a", 1)], quota(devices=2))) == []


def test_unit_that_only_a_quota_holds_back_closes_no_cell() -> None:
    units = [pod("a", 4, at=1), pod("b", 1, at=2, namespace="other")]
    assert say(decide([node("n", 4)], units, quota(devices=2))) == ["b gets n"]


def test_small_unit_does_not_pass_a_large_one_that_waits_for_the_quota() -> None:
    units = [runs("r", 2, "n"), pod("large", 4, at=1), pod("small", 1, at=2, priority="low")]
    assert say(decide([node("n")], units, quota(devices=4))) == []
    larger_than_quota = [runs("r", 2, "n"), pod("large", 5, at=1), pod("small", 1, at=2)]
    assert say(decide([node("n")], larger_than_quota, quota(devices=4))) == ["small gets n"]


def test_quota_is_kept_for_a_unit_that_waits_for_room() -> None:
    # The small one could be evicted for device and quota, but not before its minimum run time.
    cells = [node("n", 4), node("m", 1)]
    units = [
        runs("full", 4, "n", namespace="other", priority="critical"),
        pod("large", 4, at=1, priority="high"),
        pod("small", 1, at=2, priority="batch"),
    ]
    made = decide(cells, units, quota(devices=4))
    assert say(made) == []
    assert (made.blocked["large"].limits, made.limits.find_refusal(units[1], "nvidia")) == ((), None)
    assert str(made.blocked["small"].limits[0].reason) == "Quota"
    assert say(decide(cells, units, quota(devices=5))) == ["small gets m"]
    # One that can never run, or waits for a closed node, keeps nothing.
    assert say(decide([node("n", 4, closed="Cordoned"), node("m", 1)], units, quota(devices=4))) == ["small gets m"]


def test_quota_is_kept_for_each_unit_that_waits_for_room() -> None:
    cells = [node("n", 2), node("m", 1)]
    heads = [pod(f"large-{number}", 2, at=number, priority="high") for number in range(2)]
    full = runs("full", 2, "n", namespace="other", priority="critical")
    units = [full, *heads, pod("small", 1, at=9)]
    assert say(decide(cells, units, quota(devices=4))) == []
    assert say(decide(cells, units, quota(devices=5))) == ["small gets m"]
    # The first lacks room alone, in whatever order one asks.
    counter = RefusalCounter(cells, decide(cells, [full, *heads], quota(devices=3)))
    assert ["Quota" in counter.count(head) for head in reversed(heads)] == [True, False]


@pytest.mark.parametrize(("devices", "decided"), [(5, []), (6, ["small gets n"])])
def test_quota_is_kept_for_a_unit_that_another_limit_holds_back(devices: int, decided: list[str]) -> None:
    """Once the pool's own units have ended, "large" would lack the quota that "small" had taken."""
    units = [
        runs("r", 4, "n", namespace="other", priority="critical"),
        pod("large", 4, at=1, priority="critical"),
        borrower("small", 2, at=2, priority="batch"),
    ]
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=6)}, quotas={("team", "nvidia"): PoolQuota(devices)})
    made = decide([node("n", 8)], units, rules)
    assert say(made) == decided
    assert str(made.blocked["large"].limits[0].reason) == "Nominal"


def test_unit_that_its_quota_holds_back_takes_no_share_of_the_pool_from_other_namespaces() -> None:
    units = [
        runs("r", 4, "n", priority="critical"),
        *(pod(f"more-{number}", 4, at=number, priority="critical") for number in range(3)),
        pod("other", 2, at=9, namespace="other", priority="batch"),
    ]
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=6)}, quotas={("team", "nvidia"): PoolQuota(4)})
    assert say(decide([node("n", 8)], units, rules)) == ["other gets n"]


def test_successor_takes_the_quota_of_its_predecessor_though_it_is_kept_for_others() -> None:
    units = [
        runs("full", 2, "n", namespace="other", priority="critical"),
        *(pod(f"large-{number}", 2, at=number, priority="high") for number in range(3)),
        runs("old", 1, "m", at=9, priority="low"),
        pod("new", 1, at=9, priority="low", replaces=frozenset({"old"})),
    ]
    assert say(decide([node("n", 2), node("m", 1)], units, quota(devices=5))) == ["new waits on m for old"]


def test_borrowing_limit_is_kept_for_a_unit_that_waits_for_room() -> None:
    # What "small" would borrow, "large" would lack in the next round: it would close no cell, and "late" would pass.
    units = [
        runs("full", 2, "n", priority="critical"),
        borrower("large", 4, at=1, priority="critical"),
        borrower("small", 1, at=2),
        pod("late", 2, at=3, priority="critical"),
    ]
    rules = pools(amd=PoolRules(nominal=0, borrowing_limit=4))
    assert say(decide([node("n", 4)], units, rules)) == []


def test_nominated_units_count_in_the_quota() -> None:
    units = [
        *(runs(f"r{number}", 4, "n", namespace="other", priority="low") for number in range(2)),
        *(pod(f"u{number}", 4, at=number) for number in range(2)),
    ]
    made = decide([node("n")], units, quota(devices=4))
    assert say(made) == ["u0 waits on n for r0", "r0 ends for u0"]


def test_unit_that_was_nominated_before_counts_in_the_quota() -> None:
    ending = runs("r", 4, "n", namespace="other", state="ending")
    units = [ending, nominated(pod("a", 8), "n", "r"), pod("b", 4, at=1)]
    assert say(decide([node("n", 8), node("m", 4)], units, quota(devices=8))) == []
    assert say(decide([node("n", 8), node("m", 4)], units, quota(devices=12))) == ["b gets m"]


def test_unit_that_needs_more_than_any_limit_allows_holds_up_no_other() -> None:
    large = [pod(f"large-{number}", gpus(5, memory=number), at=number) for number in range(1, CONSIDERED + 9)]
    made = decide([node("n")], [*large, pod("small", 2, at=999)], quota(devices=4))
    assert say(made) == ["small gets n"]
    assert not any(blockage.can_start for blockage in made.blocked.values())


def test_unit_that_needs_more_than_any_limit_allows_lets_a_nominated_one_move() -> None:
    leaving = runs("r", 4, "n", state="ending", namespace="other")
    units = [pod("large", 5, at=-1), leaving, nominated(pod("x"), "n", "r")]
    assert say(decide([node("n", 4), node("m", 4)], units, quota(devices=4))) == ["x gets m"]


def test_unit_holds_no_limit_of_a_pool_that_could_never_run_it() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(borrowing_limit=4)}, quotas=quota(devices=8).quotas)
    units = [runs("r", 1, "n"), pod("large", 8, at=1, pools=BOTH), pod("small", 2, at=2)]
    assert say(decide([node("n", 4), node("a", 8, pool="amd")], units, rules)) == ["small gets n"]


def test_limit_that_can_never_be_kept_is_told_before_one_that_is_used() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(nominal=3)}, quotas=quota(devices=4).quotas)
    made = decide([node("n")], [runs("r", 2, "n"), pod("x", 4)], rules)
    limit = made.blocked["x"].limit
    assert limit is not None
    assert (limit.reason, limit.could_ever_fit) == ("Nominal", False)


@pytest.mark.parametrize(
    ("lending", "elastic", "can_start"), [(4, 0, True), (3, 0, False), (3, 1, False), (None, 1, True)]
)
def test_unit_that_needs_more_than_the_quota_of_one_pool_may_start_in_another(
    lending: int | None, elastic: int, *, can_start: bool
) -> None:
    rules = PlanRules(pools={"amd": PoolRules(lending_limit=lending, elastic=elastic)}, quotas=quota(devices=3).quotas)
    cells = [node("n"), node("a", 2 if elastic else 8, pool="amd", closed="Cordoned")]
    volume = msgspec.structs.replace(pod("x").requirement, volume_nodes=frozenset({"n", "a"}))
    x = pod("x", 4, pools=BOTH, requirement=volume)
    assert decide(cells, [x], rules).blocked["x"].can_start is can_start


# Pools


def test_nominal_limits_the_units_at_home() -> None:
    units = [runs("r", 2, "n"), pod("a", 2, at=1), pod("b", 2, at=2, pools=BOTH), borrower("c", 4, at=3)]
    rules = pools(nvidia=PoolRules(nominal=4), amd=PoolRules(nominal=0))
    assert say(decide(CELLS, units, rules)) == ["a gets n", "b gets a", "c gets n"]


def test_lending_limit_limits_the_units_of_other_homes() -> None:
    full = runs("full", 8, "a", pools=("amd",), priority="critical")
    units = [full, borrower("b1", 2, at=1), borrower("b2", 4, at=2), pod("own", 4, at=3)]
    assert say(decide(CELLS, units, pools(nvidia=PoolRules(lending_limit=4)))) == ["b1 gets n", "own gets n"]


def test_lending_limit_of_hosts_is_in_bytes() -> None:
    units = [process("a", 8, at=1, pools=("other", "metal")), process("b", 8, at=2, pools=("other", "metal"))]
    assert say(decide([host("h")], units, pools(metal=PoolRules(lending_limit=15)))) == ["a gets h"]


def test_borrowing_limit_limits_what_the_units_of_a_home_use_elsewhere() -> None:
    units = [borrower("b1", 3, at=1), borrower("b2", 2, at=2), pod("own", 3, at=3)]
    rules = pools(amd=PoolRules(nominal=0, borrowing_limit=3))
    assert say(decide(CELLS, units, rules)) == ["b1 gets n", "own gets n"]
    # All other pools count together, whichever of them a unit uses.
    units = [borrower("b1", 3, at=1), borrower("b2", 2, at=2, pools=("amd", "intel")), pod("own", 3, at=3)]
    assert say(decide([*CELLS, node("i", 8, pool="intel")], units, rules)) == ["b1 gets n", "own gets n"]


OWN = runs("own", 4, "n", priority="batch")
GUEST = runs("guest", 4, "n", pools=("amd", "nvidia"), priority="low")


def test_owner_takes_borrowed_victims_first() -> None:
    x = pod("x", 4, priority="high")
    assert say(decide([node("n", 8)], [OWN, GUEST, x])) == ["x waits on n for guest", "guest ends for x"]
    elsewhere = runs("own", 4, "m", priority="batch")
    made = decide([node("n", 4), node("m", 4)], [elsewhere, GUEST, x])
    assert say(made) == ["x waits on n for guest", "guest ends for x"]


def test_unit_that_borrows_evicts_units_that_borrow_and_no_owner() -> None:
    x = borrower("x", 4, priority="critical")
    assert say(decide([node("n", 8)], [OWN, GUEST, x])) == ["x waits on n for guest", "guest ends for x"]
    assert say(decide([node("n", 4)], [OWN, x])) == []
    assert say(decide([node("n", 8)], [OWN, GUEST, borrower("x", 8, priority="critical")])) == []


def test_unit_that_borrows_does_not_wait_until_an_owner_may_be_evicted() -> None:
    young = msgspec.structs.replace(OWN, evictable_since=NOW - 1)
    assert decide([node("n", 4)], [young, borrower("x", 4, priority="critical")]).again_seconds is None
    assert decide([node("n", 4)], [young, pod("x", 4, priority="critical")]).again_seconds is not None


def test_unit_that_borrows_evicts_no_owner_for_a_quota_or_by_a_nomination() -> None:
    x = borrower("x", 4, priority="critical")
    assert say(decide([node("n", 8)], [OWN, x], quota(devices=4))) == []
    assert say(decide([node("n", 4)], [OWN, nominated(x, "n", "own")])) == ["x waits for nothing"]


def test_unit_that_borrows_takes_the_room_of_an_owner_that_ends_anyway() -> None:
    leaving = msgspec.structs.replace(OWN, state="ending")
    assert say(decide([node("n", 4)], [leaving, borrower("x", 4)])) == ["x waits on n for own"]


def test_unit_that_borrows_does_not_take_what_is_evicted_for_an_owner() -> None:
    x, y = borrower("x", 4, priority="critical"), nominated(pod("y", 4), "n", "own")
    leaving = msgspec.structs.replace(OWN, state="ending")
    assert say(decide([node("n", 4)], [leaving, x, y])) == []
    assert say(decide([node("n", 4)], [x, y])) == ["y gets n"]
    assert say(decide([node("n", 4)], [x, nominated(pod("y", 5), "n", "own")])) == ["x gets n", "y waits for nothing"]
    # Beside it, there is room for both.
    beside = [borrower("x", 2, priority="critical"), nominated(pod("y", 2), "n", "own")]
    assert say(decide([node("n", 4)], beside)) == ["x gets n", "y gets n"]
    half = msgspec.structs.replace(leaving, parts=(gpus(2),))
    assert say(decide([node("n", 4)], [half, *beside])) == ["x gets n"]
    assert say(decide([node("n", 3)], [half, *beside])) == []
    guest = runs("guest", 1, "n", pools=("amd", "nvidia"), priority="low")
    made = say(decide([node("n", 4)], [half, guest, *beside]))
    assert made == ["x waits on n for guest own", "guest ends for x", "y waits on n for guest"]
    # One that is at home there, and more important, may.
    assert say(decide([node("n", 4)], [pod("x", 4, priority="critical"), y])) == ["x gets n", "y waits for nothing"]


def test_unit_that_borrows_takes_what_an_owner_leaves_of_the_room_of_another() -> None:
    units = [OWN, pod("x", 2, priority="critical"), borrower("y", 2, priority="high")]
    assert say(decide([node("n", 4)], units)) == ["x waits on n for own", "own ends for x", "y waits on n for own"]


def test_owner_evicts_where_one_that_borrows_could_not() -> None:
    guest = runs("guest", 4, "o", pools=("amd", "other"), priority="batch")
    units = [OWN, guest, borrower("x", 4, pools=("amd", "nvidia", "other")), pod("y", 4, at=1)]
    made = decide([node("n", 4), node("o", 4, pool="other")], units)
    assert say(made)[::2] == ["x waits on o for guest", "y waits on n for own"]


def test_gang_that_borrows_evicts_no_owner() -> None:
    gang = borrower("x", parts=(gpus(2), gpus(2)), priority="critical")
    assert say(decide([node("n", 8)], [OWN, runs("full", 4, "n", priority="critical"), gang])) == []
    assert say(decide([node("n", 8)], [OWN, GUEST, gang])) == ["x waits on n n for guest", "guest ends for x"]


def test_unit_that_may_use_all_pools_evicts_at_home_and_those_that_borrow_elsewhere() -> None:
    # So is one whose service names no pools.
    x = pod("x", 4, priority="critical", pools=BOTH)
    at_home, away = runs("at-home", 8, "n", pools=BOTH), runs("away", 4, "a", pools=BOTH)
    own = runs("amd-own", 4, "a", pools=("amd",), priority="batch")
    assert say(decide(CELLS, [at_home, away, own, x]))[1:] == ["at-home ends for x"]
    important = msgspec.structs.replace(at_home, priority="critical")
    assert say(decide(CELLS, [important, away, own, x]))[1:] == ["away ends for x"]
    assert say(decide(CELLS, [important, runs("full", 4, "a", pools=BOTH, priority="critical"), own, x])) == []


def test_owner_does_not_take_a_borrowed_unit_of_equal_priority() -> None:
    lent = runs("lent", 4, "n", pools=("amd", "nvidia"))
    assert say(decide([node("n", 4)], [lent, pod("x", 4)])) == []


def test_owner_spares_its_own_unit_rather_than_a_borrowed_one() -> None:
    lent = runs("lent", 4, "n", pools=("amd", "nvidia"), priority="low")
    units = [runs("own", 4, "n", priority="low"), lent, pod("x", 4, priority="high")]
    assert "lent ends for x" in say(decide([node("n", 8)], units))


# Contradictions


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (PoolRules(nominal=9), "nominal is 9 devices, but the pool has 8: lower it, or add nodes"),
        (PoolRules(lending_limit=9), "lendingLimit is 9 devices, but the pool has 8: lower it, or add nodes"),
    ],
)
def test_limit_above_what_a_pool_has_is_found(rules: PoolRules, problem: str) -> None:
    assert list_messages({"nvidia": rules}) == [problem]


def test_limit_above_the_memory_of_hosts_is_found() -> None:
    problems = find_pool_problems({"metal": PoolRules(nominal=128 * GIB)}, [host("h", 64 * GIB)])
    assert [problem.message for problem in problems] == [
        "nominal is 128.0 GiB of memory, but the pool has 64.0 GiB: lower it, or add hosts"
    ]


def list_messages(rules: dict[str, PoolRules]) -> list[str]:
    return [problem.message for problem in find_pool_problems(rules, CELLS)]


def test_pool_without_a_cell_is_found() -> None:
    assert list_messages({"gone": PoolRules()}) == [
        "pool gone has no node and no host: correct its accelerator and nodeSelector, or add one"
    ]


def test_sound_rules_have_no_problem() -> None:
    # Nominal is for units at home and lendingLimit for all others: together they may be more than the pool has.
    rules = {"nvidia": PoolRules(2, 99, 8), "metal": PoolRules(64), "later": PoolRules(nominal=99, elastic=2)}
    assert find_pool_problems(rules, [*CELLS, host("h")]) == []
