"""Placement by speed: a unit goes to the class on which it is fastest, unless other criteria outweigh that."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement.actions import Admit
from controller.placement.explanation import RefusalCounter, explain
from controller.placement.observed_units import observe_units
from controller.placement.planner import PlanRules, plan
from controller.placement.score import count_cell_points, count_unit_points, score_cell
from controller.placement.standing import WaitFacts, describe_wait, find_largest, sort_refusals
from controller.placement.units import (
    MEMORY,
    SPEED_UNKNOWN,
    TOO_SLOW,
    TOO_TIGHT,
    Cell,
    SpeedProfile,
    Unit,
)
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS
from tests.support.api_objects import NOW, service, store
from tests.support.queue_objects import deployment_of, queue_pod
from tests.support.queue_units import gpus, host, node, pod, process

H100, L4, NEW = "nvidia-h100x1", "nvidia-l4x1", "nvidia-newx1"
SPEEDS = SpeedProfile(((H100, 120.0), (L4, 24.0)))
GIB = 2**30


def place(cells: list[Cell], unit: Unit) -> str:
    """Return the cell that a unit gets; empty if none."""
    made = plan(cells, [unit], PlanRules(), 0.0)
    return next((action.cells[0] for action in made.actions if isinstance(action, Admit)), "")


def cells_of(*classes: str) -> list[Cell]:
    return [node(f"n{number}", device_class=class_name) for number, class_name in enumerate(classes)]


def test_unit_goes_to_the_fastest_class() -> None:
    assert place(cells_of(L4, H100), pod("a", speeds=SPEEDS)) == "node/n1"
    assert place(cells_of(H100, L4), pod("a", speeds=SPEEDS)) == "node/n0"


def test_unit_without_speeds_goes_where_it_went_before() -> None:
    assert place(cells_of(L4, H100), pod("a")) == place(cells_of("", ""), pod("a")) == "node/n0"


def test_class_of_unknown_speed_comes_before_a_very_slow_one_only() -> None:
    assert place(cells_of(NEW, H100), pod("a", speeds=SPEEDS)) == "node/n1"
    assert place(cells_of(NEW, L4), pod("a", speeds=SPEEDS)) == "node/n0"


def test_weights_outweigh_a_small_difference_in_speed_alone() -> None:
    for slower, expected in ((80.0, "host/g"), (60.0, "host/h")):
        speeds = SpeedProfile((("m4", slower), ("m5", 100.0)))
        cells = [host("g", device_class="m4", weights=frozenset({"w"})), host("h", device_class="m5")]
        assert place(cells, process("p", speeds=speeds, weights="w")) == expected


def test_refused_class_is_no_place_and_no_reason_to_wait_for() -> None:
    slow = msgspec.structs.replace(SPEEDS, refused=frozenset({(L4, TOO_SLOW)}))
    assert place(cells_of(L4), pod("a", speeds=slow)) == ""
    made = plan(cells_of(L4), [pod("a", speeds=slow)], PlanRules(), 0.0)
    assert made.blocked["a"].feasible == 0
    taken = [*cells_of(L4), node("full", device_class=H100, free={})]
    assert place(taken, pod("a", speeds=slow)) == ""


def test_refused_class_evicts_nobody() -> None:
    low = pod("low", 8, priority="low", cells=("node/n0",))
    slow = msgspec.structs.replace(SPEEDS, refused=frozenset({(L4, TOO_SLOW)}))
    full = [node("n0", device_class=L4, free={})]
    assert plan(full, [low, pod("a", speeds=SPEEDS)], PlanRules(), 1e6).actions
    assert plan(full, [low, pod("a", speeds=slow)], PlanRules(), 1e6).actions == ()


@pytest.mark.parametrize(
    ("reason", "words", "remedy"),
    [
        (TOO_SLOW, "has 24.0 tokens/s on device class nvidia-l4x1 of the node", "minTokensPerSecond"),
        (SPEED_UNKNOWN, "the speed of the replica on device class nvidia-l4x1 of the node is unknown", "pomona bench"),
        (TOO_TIGHT, "fits on device class nvidia-l4x1 of the node less well than minFit", "spec.placement.minFit"),
    ],
)
def test_refusal_of_a_class_is_explained_with_the_way_out(reason: str, words: str, remedy: str) -> None:
    cells, unit = cells_of(L4), pod("a", speeds=msgspec.structs.replace(SPEEDS, refused=frozenset({(L4, reason)})))
    (row,) = explain(unit, cells, plan(cells, [unit], PlanRules(), 0.0), PlanRules())
    assert row.refusal.reason == reason
    assert words in row.message
    assert remedy in row.remedy


@pytest.mark.parametrize("device_class", [L4, "nvidia-newx1"])
def test_place_that_is_no_faster_than_the_replaced_one_names_no_demand_of_the_service(device_class: str) -> None:
    cells, unit = cells_of(device_class), pod("a", speeds=msgspec.structs.replace(SPEEDS, least=57.0))
    made = plan(cells, [unit], PlanRules(), 0.0)
    (row,) = explain(unit, cells, made, PlanRules())
    assert "it replaces a slow replica" in row.message
    facts = WaitFacts(sort_refusals(RefusalCounter(cells, made).count(unit)), find_largest(unit, cells))
    waiting = describe_wait(unit, "NoSuchHardware", facts)
    assert "faster than the slow replica" in waiting
    assert "spec.placement" not in waiting + row.message + row.remedy


def test_idle_and_cheap_node_is_preferred_among_equals() -> None:
    busy = node("a", device_class=H100, utilization_percent=90)
    idle = node("b", device_class=H100, utilization_percent=0)
    assert place([busy, idle], pod("u", speeds=SPEEDS)) == "node/b"
    dear, cheap = node("a", cost_permille=1000), node("b", cost_permille=100)
    assert place([dear, cheap], pod("u")) == "node/b"


def test_score_says_speed_utilization_and_cost() -> None:
    cell = node("n", device_class=L4, utilization_percent=40, cost_permille=250)
    score = score_cell(pod("a", speeds=SPEEDS), gpus(1), cell, cell.free, siblings=0)
    assert score.explain() == (
        "no replica of the service there, 19 points, 24.0 tokens/s, 7 devices left, 40% used, 25% of the highest cost"
    )


def test_score_says_a_speed_of_a_small_model_in_full() -> None:
    fast = msgspec.structs.replace(SPEEDS, speeds=((L4, 4511.3),))
    cell = node("n", device_class=L4)
    words = score_cell(pod("a", speeds=fast), gpus(1), cell, cell.free, siblings=0).explain()
    assert ", 4511 tokens/s, " in words


@given(
    st.integers(0, 10**12),
    st.sampled_from([None, 0, 50, 100]),
    st.sampled_from([None, 0, 1000]),
    st.floats(0.1, 1e6),
    st.sampled_from(["", "w"]),
)
def test_points_are_from_0_to_100(free: int, used: int | None, cost: int | None, speed: float, weights: str) -> None:
    unit = process("p", speeds=SpeedProfile((("m", speed), ("n", 50.0))), weights="w")
    has = frozenset({weights})
    cell = host("h", device_class="m", utilization_percent=used, cost_permille=cost, weights=has)
    score = score_cell(unit, {MEMORY: 8}, cell, {MEMORY: free}, siblings=0)
    assert 0 <= score.points <= 100
    assert score.points == count_cell_points(cell, score.leftover) + count_unit_points(unit, cell)


@given(st.integers(0, 64), st.integers(0, 64))
def test_tighter_packing_never_gives_fewer_points(one: int, other: int) -> None:
    cell = node("n")
    if one <= other:
        assert count_cell_points(cell, one) >= count_cell_points(cell, other)
        assert count_cell_points(host("h"), -one * GIB) <= count_cell_points(host("h"), -other * GIB)


def observe(status: Obj, **spec: Any) -> Unit:
    """Return the unit of the only pod of a service with this status."""
    chat = service(status=status, hardware={"accelerator": "nvidia"}, **spec)
    cluster = store((INFERENCE_SERVICES, chat), (DEPLOYMENTS, deployment_of()), (PODS, queue_pod("one")))
    (unit,) = observe_units(cluster, VENDORS, NOW).units
    return unit


def test_speeds_of_a_service_are_those_of_its_status() -> None:
    listed = [
        {"deviceClass": H100, "tokensPerSecond": "120"},
        {"deviceClass": L4, "tokensPerSecond": "24.5", "refusal": "TooSlow"},
        {"deviceClass": NEW, "refusal": "SpeedUnknown"},
    ]
    unit = observe({"observedGeneration": 1, "speeds": listed})
    assert dict(unit.speeds.speeds) == {H100: 120.0, L4: 24.5}
    assert unit.speeds.refusals == {L4: TOO_SLOW, NEW: SPEED_UNKNOWN}
    assert [unit.refuse(cell) for cell in cells_of(NEW, L4, H100)] == [SPEED_UNKNOWN, TOO_SLOW, ""]


@pytest.mark.parametrize(
    ("demands", "refusal"),
    [({"minTokensPerSecond": 30}, SPEED_UNKNOWN), ({"minFit": "good"}, TOO_TIGHT), ({"minFit": "marginal"}, "")],
)
def test_class_that_is_not_listed_meets_no_demand(demands: Obj, refusal: str) -> None:
    listed = [{"deviceClass": H100, "tokensPerSecond": "120"}, {"deviceClass": L4, "tokensPerSecond": "90"}]
    unit = observe({"observedGeneration": 1, "speeds": listed}, placement=demands)
    assert [unit.refuse(cell) for cell in cells_of(H100, L4, NEW, "")] == ["", "", refusal, refusal]
    alike = pod("a", speeds=unit.speeds)
    assert place(cells_of(NEW), alike) == ("" if refusal else "node/n0")
    assert place(cells_of(NEW, L4), alike) == "node/n1"


def test_class_is_accepted_once_it_is_listed_though_its_speed_is_unknown() -> None:
    unit = observe({"observedGeneration": 1, "speeds": [{"deviceClass": NEW}]}, placement={"minFit": "good"})
    assert place(cells_of(L4, NEW), pod("a", speeds=unit.speeds)) == "node/n1"


def test_status_of_an_earlier_spec_tells_no_speeds() -> None:
    listed = [{"deviceClass": H100, "tokensPerSecond": "120", "refusal": "TooSlow"}]
    for status, is_assessed in (({"observedGeneration": 1}, True), ({"observedGeneration": 0}, False), ({}, False)):
        unit = observe({**status, "speeds": listed})
        assert (unit.is_assessed, bool(unit.speeds.speeds)) == (is_assessed, is_assessed)


def alternatives(cells: list[Cell], unit: Unit, *others: Unit) -> list[tuple[str, str, str]]:
    """Return device class, cell and refusal of the other places of an admitted unit."""
    made = plan(cells, [unit, *others], PlanRules(), 0.0)
    (admitted,) = [action for action in made.actions if isinstance(action, Admit) and action.unit is unit]
    return [(other.device_class, other.cell, other.refusal) for other in admitted.others]


def test_others_are_the_best_free_cell_of_each_class_the_best_first() -> None:
    cells = [*cells_of(L4, H100, H100, NEW), node("full", device_class="nvidia-a100x1", free={})]
    assert alternatives(cells, pod("a", speeds=SPEEDS)) == [
        (H100, "node/n2", ""),
        (NEW, "node/n3", ""),
        (L4, "node/n0", ""),
    ]


def test_class_without_a_place_is_among_the_others_with_the_reason() -> None:
    slow = msgspec.structs.replace(SPEEDS, refused=frozenset({(L4, TOO_SLOW)}))
    cells = [*cells_of(L4, H100), node("full", device_class=NEW, free={})]
    assert alternatives(cells, pod("a", speeds=slow)) == [(L4, "", TOO_SLOW), (NEW, "", "NoRoom")]


def test_class_in_two_pools_is_listed_once_with_its_best_free_cell() -> None:
    cells = [
        *cells_of(H100, L4),
        node("full", device_class=NEW, free={}),
        node("n2", pool="reserve", device_class=L4, free=gpus(1)),
        node("n3", pool="reserve", device_class=NEW),
    ]
    unit = pod("a", speeds=SPEEDS, pools=("nvidia", "reserve"))
    assert alternatives(cells, unit) == [(L4, "node/n2", ""), (NEW, "node/n3", "")]


def test_what_earlier_units_of_the_round_took_is_no_other_place() -> None:
    first, second = pod("a", 8, at=1, speeds=SPEEDS), pod("b", 8, at=2, speeds=SPEEDS)
    made = plan(cells_of(H100, H100, L4), [first, second], PlanRules(), 0.0)
    alternatives = {action.unit.uid: action.others for action in made.actions if isinstance(action, Admit)}
    assert [alternative.cell for alternative in alternatives["a"]] == ["node/n1", "node/n2"]
    assert [alternative.cell for alternative in alternatives["b"]] == ["node/n2"]


def test_score_of_another_place_is_that_which_it_would_have_had() -> None:
    made = plan(cells_of(H100, L4), [pod("a", speeds=SPEEDS)], PlanRules(), 0.0)
    (admitted,) = [action for action in made.actions if isinstance(action, Admit)]
    (other,) = admitted.others
    assert other.score is not None
    assert (admitted.scores[0].points, other.score.points) == (71, 23)
    assert other.score.tokens_per_second == 24.0
