"""The reasons why a unit waits, by cell and counted."""

from collections import Counter

import msgspec
import pytest

from controller.placement.explanation import RefusalCounter, explain
from controller.placement.planner import PlanRules
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import Cell, NodeRequirement, Unit
from tests.support.queue_decisions import NOW, decide, runs, say, subtract_units
from tests.support.queue_units import GPU, gpus, host, node, pod, process

AHEAD = pod("ahead", 8, at=-1.0)
UNIT = pod("a", 2)
BOUND = NodeRequirement("", {}, frozenset({"m"}))
LENDING = PlanRules(pools={"nvidia": PoolRules(lending_limit=1)})
QUOTA = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=1)})
CASES = {
    "OtherPool": (UNIT, host("c"), (), PlanRules(), "pool metal is not among nvidia"),
    "OtherKind": (pod("a", pools=("metal",)), host("c"), (), PlanRules(), "a pod runs on nodes"),
    "NodeRules": (pod("a", selector={"zone": "x"}), node("c"), (), PlanRules(), "do not admit the node"),
    "VolumeElsewhere": (pod("a", requirement=BOUND), node("c"), (), PlanRules(), "is bound to m"),
    "RuntimeMissing": (process("a", runtime="mlx"), host("c"), (), PlanRules(), "mlx is not installed there"),
    "OtherNamespace": (
        process("a"),
        host("c", namespaces=frozenset({"ops"})),
        (),
        PlanRules(),
        "the host is given to ops",
    ),
    f"TooSmall {GPU}": (UNIT, node("c", 1), (), PlanRules(), f"2 of {GPU} needed, 1 in all"),
    "Cordoned": (UNIT, node("c", closed="Cordoned", closed_message="by admin"), (), PlanRules(), "by admin"),
    "Avoided": (pod("a", avoid=frozenset({"node/c"})), node("c"), (), PlanRules(), "rejected or displaced"),
    f"Insufficient {GPU}": (
        UNIT,
        node("c"),
        (runs("r", 7, "c", priority="high"),),
        PlanRules(),
        f"2 of {GPU} needed, 1 left",
    ),
    "Insufficient memory": (
        process("a", 2 * 1024**3),
        host("c", 2 * 1024**3),
        (process("r", 1024**3, priority="high", cells=("host/c",)),),
        PlanRules(),
        "2.0 GiB of memory needed, 1.0 GiB left",
    ),
    "HeadOfLine": (
        UNIT,
        node("c"),
        (AHEAD, runs("r", 1, "c", priority="high")),
        PlanRules(),
        "pod team/ahead of priority normal is ahead and waits for this node",
    ),
    "Quota": (UNIT, node("c"), (), QUOTA, "the quota of namespace team in pool nvidia allows 1 device"),
    "Lending": (
        pod("a", 2, pools=("amd", "nvidia")),
        node("c"),
        (),
        LENDING,
        "lendingLimit of pool nvidia allows 1 device",
    ),
    "Nominated": (
        pod("a", 2, priority="high"),
        node("c", 2),
        (runs("r", 2, "c"),),
        PlanRules(),
        "held for it until 1 replica has ended",
    ),
}


@pytest.mark.parametrize("reason", CASES)
def test_reason_of_each_refusal_is_explained(reason: str) -> None:
    unit, cell, others, rules, message = CASES[reason]
    made = decide([cell], [unit, *others], rules)
    if reason == "Nominated":
        nomination = made.actions[0].nomination  # type: ignore[union-attr]
        unit = msgspec.structs.replace(unit, nomination=nomination)
        made = decide([cell], [unit, *others], rules)
    cells = [subtract_units(cell, others)]
    (explanation,) = explain(unit, cells, made, rules)
    assert str(explanation.refusal) == reason
    assert message in explanation.message
    assert bool(explanation.remedy) == (reason != "Nominated")
    assert RefusalCounter(cells, made).count(unit) == {reason: 1}


def test_unit_that_waits_for_a_limit_behind_another_is_explained() -> None:
    units = [runs("r", 2, "c"), pod("large", 4), pod("small", 1, at=1)]
    rules = PlanRules(quotas={("team", "nvidia"): PoolQuota(devices=4)})
    (explanation,) = explain(units[-1], [node("c")], decide([node("c")], units, rules), rules)
    assert (
        explanation.message == "the quota of namespace team in pool nvidia has room, but a replica ahead waits for it"
    )


def test_elastic_pool_is_named_in_the_remedy() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=1)})
    units = [pod("first", 8, at=-1, state="running"), pod("a", 8)]
    (explanation,) = explain(units[1], [node("c", 1)], decide([node("c", 1)], units, rules), rules)
    assert explanation.remedy.endswith("an autoscaler adds nodes for up to 1 replica at once")


@pytest.mark.parametrize(
    ("holders", "helps"),
    [
        ((runs("r", 8, "n"),), True),
        ((runs("r", 8, "n", evictable_since=NOW),), True),
        ((runs("r", 8, "n", is_protected=True),), False),
        ((runs("r", 8, "n", priority="critical"),), False),
        ((runs("r", 1, "n"), runs("p", 7, "n", is_protected=True)), False),
        ((), False),
    ],
    ids=["as important", "young", "protected", "critical", "too small", "foreign"],
)
def test_a_higher_priority_is_a_remedy_where_others_may_make_room_for_it(
    holders: tuple[Unit, ...], helps: bool
) -> None:
    cells = [node("n", total=gpus(8, 64, 64), free=gpus(8, 64, 64) if holders else gpus(0))]
    made = decide(cells, [UNIT, *holders])
    (explanation,) = explain(UNIT, cells, made, PlanRules())
    assert made.blocked["a"].priority_helps == helps
    assert ("raise spec.priority" in explanation.remedy) == helps


def test_counts_are_those_of_the_explanations() -> None:
    cells = [node("n", 8), node("m", 2), node("o", 8, closed="Cordoned"), node("p", 8, pool="amd"), host("h")]
    units: list[Unit] = [runs("r", 6, "n", priority="critical")]
    units += [
        pod(f"u{number}", gpus(1 + number % 8), at=number, priority=("normal", "low")[number % 2])
        for number in range(24)
    ]
    made = decide(cells, units)
    cells = [subtract_units(cell, units) for cell in cells]
    counter = RefusalCounter(cells, made)
    for unit in made.queue:
        explained = Counter(str(explanation.refusal) for explanation in explain(unit, cells, made, PlanRules()))
        assert counter.count(unit) == explained, unit.key
    assert say(made)


def with_free(name: str, devices: int) -> Cell:
    return node(name, 8, free={**node(name).total, GPU: devices})


def test_counts_after_another_round_are_those_of_a_new_counter() -> None:
    full = with_free("full", 0)
    cells = [node(name, 8, labels={"zone": name}) for name in ("filled", "closed", "same", "gone")]
    units: list[Unit] = [pod(f"u{number}", gpus(1 + number), at=number) for number in range(8)]
    admitted = pod("taker", 6, priority="critical", selector={"zone": "same"})
    counter = None
    changed = (full, with_free("filled", 2), node("closed", 8, closed="Cordoned"), cells[2], node("new", 8))
    for present, waiting in (
        ([full, *cells], [*units[7:], admitted]),
        (changed, units[7:]),
        ([full, *cells], [*units[7:], admitted]),
    ):
        made = decide(present, waiting)
        counter = counter or RefusalCounter(present, made)
        counter.update(present, made)
        fresh = RefusalCounter(present, made)
        assert [counter.count(unit) for unit in units] == [fresh.count(unit) for unit in units]
