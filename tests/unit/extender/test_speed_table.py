"""Answers follow from speeds and nodes, are computed again only after a change, and take bounded memory."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.vendors import VENDORS
from extender.score import ScoreWeights
from extender.speed_table import MOST_BOARDS, ScoreBoard, SpeedTable
from extender.subject import ServedModel
from fitness.corrections import Corrections
from fitness.performance import MeasuredPerformance
from fitness.performance_store import PerformanceTable, build_config_map, encode_record
from fitness.serving_devices import ServingDevices
from tests.unit.extender.extender_objects import (
    GIB,
    H100_LABELS,
    HASH,
    L4_LABELS,
    MI300_LABELS,
    SERVED,
    SHARED,
    facts,
    measure,
    measured,
    subject,
)


class Estimates:
    """An estimate of 50 tokens a second for an H100, and of nothing else, that counts its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, served: ServedModel, devices: ServingDevices, _corrections: Corrections) -> float | None:
        assert served is SERVED
        self.asked.append(devices.device_class)
        return 50.0 if "h100" in devices.device_class else None


@pytest.fixture
def estimates() -> Estimates:
    return Estimates()


@pytest.fixture
def table(estimates: Estimates) -> SpeedTable:
    table = SpeedTable(VENDORS, ScoreWeights(), estimates, PerformanceTable())
    table.set_node("l4", facts(L4_LABELS))
    table.set_node("h100", facts(H100_LABELS))
    table.set_node("plain", facts({}))
    return table


def scores(board: ScoreBoard, *names: str) -> list[int]:
    entries = [json.loads(board.pieces[name]) for name in names]
    assert [entry["Host"] for entry in entries] == [*names]
    return [entry["Score"] for entry in entries]


def test_faster_class_has_the_higher_score(table: SpeedTable) -> None:
    measure(table, measured(nvidia_l4x1=20, nvidia_h100_80gb_hbm3x1=100))
    assert scores(table.find_board(subject(), SERVED), "h100", "l4", "plain", "unknown") == [10, 4, 3, 3]


def test_measurement_comes_before_the_estimate(table: SpeedTable, estimates: Estimates) -> None:
    measure(table, measured(nvidia_l4x1=100))
    assert scores(table.find_board(subject(), SERVED), "h100", "l4") == [7, 10]
    assert estimates.asked == ["nvidia-h100-80gb-hbm3x1"]


def test_measurement_of_another_number_of_devices_does_not_count(table: SpeedTable) -> None:
    measure(table, measured(nvidia_l4x2=100, nvidia_h100_80gb_hbm3x1=10))
    assert scores(table.find_board(subject(device_count=2), SERVED), "l4", "h100") == [10, 7]


def test_measurement_of_a_tenant_counts_in_its_namespace_alone(table: SpeedTable) -> None:
    record = encode_record(MeasuredPerformance(tokens_per_second=1e6))
    measure(table, build_config_map(HASH, {"nvidia-l4x1_rogue": record}))
    assert scores(table.find_board(subject(), SERVED), "l4", "h100") == [3, 10]
    forged = subject()._replace(namespace="rogue")
    assert scores(table.find_board(forged, SERVED), "l4", "h100") == [10, 3]


def test_utilization_and_cost_count_against_a_node(table: SpeedTable) -> None:
    measure(table, measured(nvidia_l4x1=20))
    table.set_node("busy", facts(L4_LABELS, {"inference.pomona.dev/gpu.util": "1"}))
    table.set_node("dear", facts(L4_LABELS, {"inference.pomona.dev/cost": "4"}))
    table.set_node("cheap", facts(L4_LABELS, {"inference.pomona.dev/cost": "1"}))
    board = table.find_board(subject(is_served=False))
    assert scores(board, "l4", "busy", "dear", "cheap") == [10, 8, 9, 10]


def test_misfits_are_rejected_and_do_not_set_the_pace(table: SpeedTable) -> None:
    table.set_node("amd", facts(MI300_LABELS))
    table.set_node(
        "full",
        facts(H100_LABELS | SHARED, memory_bytes=80 * GIB, free_bytes=GIB, device_class="nvidia-h100-80gb-hbm3x1"),
    )
    measure(table, measured(nvidia_l4x1=100, nvidia_h100_80gb_hbm3x1=50))
    board = table.find_board(subject(need_bytes=30 * GIB), SERVED)
    assert set(board.unresolvable) == {"amd", "l4"}
    assert set(board.failed) == {"full"}
    assert scores(board, "h100") == [10]


def test_answers_are_computed_again_only_after_a_change(table: SpeedTable, estimates: Estimates) -> None:
    board = table.find_board(subject(), SERVED)
    table.set_node("l4", facts(L4_LABELS))
    assert table.find_board(subject(), SERVED) is board
    table.set_node("l4", facts(L4_LABELS, {"inference.pomona.dev/cost": "1"}))
    changed = table.find_board(subject(), SERVED)
    assert changed is not board
    assert changed.pieces["h100"] is board.pieces["h100"]
    assert len(estimates.asked) == 2  # of each hardware once
    table.remove_node("h100")
    assert scores(table.find_board(subject(), SERVED), "h100") == [3]
    assert table.node_count == 2


def test_nodes_that_change_are_scored_without_the_others(table: SpeedTable) -> None:
    measure(table, measured(nvidia_l4x1=20, nvidia_h100_80gb_hbm3x1=100))
    board = table.find_board(subject(), SERVED)
    table.set_node("h100", facts(H100_LABELS, {"inference.pomona.dev/gpu.util": "1"}))
    table.set_node("new", facts(H100_LABELS))
    table.remove_node("l4")
    changed = table.find_board(subject(), SERVED)
    assert changed is board
    assert scores(changed, "h100", "new", "l4", "plain") == [8, 10, 3, 3]
    assert set(changed.pieces) == {"h100", "new", "plain"}


def test_changes_of_nodes_that_are_gone_take_bounded_memory(table: SpeedTable) -> None:
    table.find_board(subject(), SERVED)
    table.remove_node("l4")
    for number in range(1500):
        table.set_node(f"n{number}", facts(L4_LABELS))
        table.remove_node(f"n{number}")
    assert len(table._revision_of_change) < 1100
    assert "l4" not in table.find_board(subject(), SERVED).pieces


def test_hash_without_measurements_is_neutral_and_not_kept(table: SpeedTable) -> None:
    for number in range(100):
        board = table.find_board(subject(is_served=False)._replace(model_hash=f"{number:016x}"))
        assert scores(board, "h100", "l4") == [3, 3]
    assert table.board_count == 0


def test_least_recently_used_boards_are_dropped(estimates: Estimates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.speed_table.MOST_ENTRIES", 20)
    table = SpeedTable(VENDORS, ScoreWeights(), estimates, PerformanceTable())
    table.set_node("h100", facts(H100_LABELS))
    table.set_node("l4", facts(L4_LABELS))
    first = table.find_board(subject(), SERVED)
    for number in range(30):
        table.find_board(subject(need_bytes=number), SERVED)
        assert table.find_board(subject(), SERVED) is first
    assert table.board_count == 10
    assert len(table._speeds) == 10


def test_boards_of_a_small_cluster_are_bounded_too(table: SpeedTable) -> None:
    for count in range(1, MOST_BOARDS + 100):
        table.find_board(subject(device_count=count), SERVED)
    assert table.board_count == MOST_BOARDS


def test_hardware_that_is_gone_is_forgotten(table: SpeedTable) -> None:
    for number in range(50):
        table.set_node("l4", facts({**L4_LABELS, "nvidia.com/gpu.product": f"Lie-{number}"}))
        table.find_board(subject(), SERVED)
    (speeds,) = table._speeds.values()
    assert len(speeds.speeds) == len(table._groups) == 3
    for name in ("l4", "h100", "plain"):
        table.remove_node(name)
    assert (table._groups, table._pieces, table._facts) == ({}, {}, {})


LABELS = st.sampled_from([L4_LABELS, H100_LABELS, MI300_LABELS, {}, L4_LABELS | SHARED])
NODE = st.tuples(LABELS, st.sampled_from(["0", "0.5", "1", "2"]), st.sampled_from(["0", "0.25", "1", "x"]))


@given(
    st.lists(st.tuples(st.integers(0, 5), NODE | st.none()), max_size=30),
    st.dictionaries(st.sampled_from(["nvidia_l4x1", "nvidia_h100_80gb_hbm3x1"]), st.floats(1, 1e6)),
    st.none() | st.integers(1, 60),
)
def test_table_after_any_changes_is_that_of_the_last_state(
    changes: list[tuple[int, Any]], speeds: dict[str, float], need_gib: int | None
) -> None:
    asked = subject(need_bytes=need_gib and need_gib * GIB)
    changed, last = SpeedTable(VENDORS, ScoreWeights(), Estimates(), PerformanceTable()), dict[str, Any]()
    measure(changed, measured(**speeds))
    for number, node in changes:
        name = f"n{number}"
        if node is None:
            changed.remove_node(name)
            last.pop(name, None)
        else:
            labels, cost, util = node
            last[name] = facts(labels, {"inference.pomona.dev/cost": cost, "inference.pomona.dev/gpu.util": util})
            changed.set_node(name, last[name])
        changed.find_board(asked, SERVED)
    anew = SpeedTable(VENDORS, ScoreWeights(), Estimates(), PerformanceTable())
    measure(anew, measured(**speeds))
    for name, node_facts in last.items():
        anew.set_node(name, node_facts)
    one, other = changed.find_board(asked, SERVED), anew.find_board(asked, SERVED)
    assert (dict(one.pieces), one.failed, one.unresolvable) == (dict(other.pieces), other.failed, other.unresolvable)
    assert all(0 <= score <= 10 for score in scores(one, *one.pieces))
    assert set(one.failed) | set(one.unresolvable) <= set(last)
