"""The remedies for a unit that waits: the nearest first."""

import pytest

from controller.placement.planner import PlanRules
from controller.placement.remedies import WaitExplanation, explain_unit
from controller.placement.units import Cell, HostRequirement, NodeRequirement, Unit
from tests.support.queue_decisions import runs, subtract_units
from tests.support.queue_units import host, node, pod, process

NEW = pod("new", 4)


def explain_new(cells: list[Cell], units: list[Unit], unit: Unit = NEW) -> WaitExplanation:
    everything = [*units, unit]
    return explain_unit(unit, [subtract_units(cell, everything) for cell in cells], everything, PlanRules(), 10_000.0)


def test_cells_are_sorted_by_what_it_takes() -> None:
    cells = [
        host("mac"),
        node("small", 2),
        node("other", pool="amd"),
        node("full"),
        node("nearly"),
        node("rules", labels={"zone": "y"}),
        node("closed", labels={"zone": "x"}, closed="Cordoned", closed_message="node closed is cordoned"),
    ]
    for name in ("small", "full", "nearly"):
        cells[[cell.name for cell in cells].index(name)] = node(name, 2 if name == "small" else 8, labels={"zone": "x"})
    unit = pod("new", 4, selector={"zone": "x"})
    busy = [runs("a", 8, "full", priority="critical"), runs("b", 6, "nearly", priority="critical")]
    found = explain_new(cells, busy, unit)
    assert [explanation.cell.partition("/")[2] for explanation in found.cells] == [
        *("closed", "rules", "nearly", "full", "small", "mac", "other"),
    ]
    assert found.best is not None
    assert found.best.remedy == "open the node"


def test_closed_cell_without_room_is_no_better_than_a_full_one() -> None:
    cells = [node("closed", closed="Cordoned"), node("nearly")]
    busy = [runs("a", 8, "closed", priority="critical"), runs("b", 6, "nearly", priority="critical")]
    explanation = explain_new(cells, busy)
    assert [cell.cell for cell in explanation.cells] == ["node/nearly", "node/closed"]


def test_rules_that_can_be_edited_are_nearer_than_a_volume() -> None:
    requirement = NodeRequirement("", {"nodeSelector": {"zone": "x"}}, frozenset({"b"}))
    explanation = explain_new([node("a", labels={"zone": "x"}), node("b")], [], pod("new", 4, requirement=requirement))
    assert [(cell.cell, cell.refusal.reason) for cell in explanation.cells] == [
        ("node/b", "NodeRules"),
        ("node/a", "VolumeElsewhere"),
    ]


def test_unit_that_the_next_round_admits_waits_no_longer() -> None:
    explanation = explain_new([node("a")], [])
    assert explanation == WaitExplanation(("node/a",))


def test_unit_for_which_others_are_evicted_is_promised_its_cell() -> None:
    unit = pod("new", 4, priority="high")
    victim = runs("low", 8, "a", priority="low", evictable_since=0.0)
    explanation = explain_new([node("a")], [victim], unit)
    assert [evicted.uid for evicted in explanation.victims] == ["low"]
    assert [(cell.cell, cell.refusal.reason) for cell in explanation.cells] == [("node/a", "Nominated")]
    assert explanation.best is None


@pytest.mark.parametrize("cells", [[], [host("mac")]], ids=["none", "host"])
def test_cluster_without_any_node_has_no_remedy_but_the_pool(cells: list[Cell]) -> None:
    assert [cell.refusal.reason for cell in explain_new(cells, []).cells] == ["OtherPool"] * len(cells)


def test_host_that_is_closed_is_nearer_than_one_that_lacks_a_label() -> None:
    labels = frozenset({("room", "lab")})
    unit = process("new", requirement=HostRequirement("llama.cpp", "team", selector=labels))
    explanation = explain_new([host("bare"), host("closed", closed="Cordoned", labels=labels)], [], unit)
    assert [cell.refusal.reason for cell in explanation.cells] == ["Cordoned", "LabelMissing"]
