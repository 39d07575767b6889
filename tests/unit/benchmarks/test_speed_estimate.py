"""The estimates keep what they promise about measurements that they have not seen, and the page says the same."""

import functools
import re
import statistics
from collections import Counter

import pytest

from benchmarks.community_speeds import CommunityRow, read_rows
from benchmarks.llmfit_data import read_submissions
from benchmarks.peer_estimates import compare_memory, compare_speed
from benchmarks.speed_estimate import (
    BEGIN,
    END,
    HELD_BACK,
    PAGE,
    Judgement,
    estimate_row,
    judge_each_device,
    judge_held_back,
    learn,
    part_of,
    peer_ratio,
    share,
    share_by_device,
)

PROMISED = 0.8
WIDEST = 3.0


@functools.cache
def _rows() -> tuple[CommunityRow, ...]:
    return tuple(read_rows())


@functools.cache
def _held_back() -> tuple[Judgement, ...]:
    return tuple(judge_held_back(_rows()))


@functools.cache
def _each_device() -> tuple[Judgement, ...]:
    return tuple(judge_each_device(_rows()))


def _row(tag: str) -> CommunityRow:
    return next(row for row in _rows() if row.tag == tag)


def test_held_back_devices_are_about_three_tenths_and_were_not_learned() -> None:
    held = {judgement.row.device for judgement in _held_back()}
    devices = {row.device for row in _rows()}
    assert 0.15 <= len(held) / len(devices) <= 0.45
    learned = learn(row for row in _rows() if part_of(row.device) >= HELD_BACK)
    assert not held & {device for device, _ in learned.by_class}


def test_speed_is_within_its_range_for_devices_that_were_held_back() -> None:
    assert len(_held_back()) >= 100
    assert share(_held_back()) >= PROMISED + 0.1
    assert all(0 < judgement.width <= WIDEST * 1.0001 for judgement in _held_back())


def test_speed_is_within_its_range_when_each_device_is_held_back_once() -> None:
    assert len(_each_device()) == len(_rows()) >= 750
    assert share(_each_device()) >= PROMISED + 0.1
    # A device that was measured once counts as much as one that was measured a hundred times.
    assert share_by_device(_each_device()) >= PROMISED - 0.05


@pytest.mark.parametrize("group", ["amd, dense", "cpu, dense", "metal, dense", "metal, experts", "nvidia, dense"])
def test_speed_of_each_class_with_many_measurements_is_within_its_range(group: str) -> None:
    judged = [judgement for judgement in _each_device() if judgement.group == group]
    assert len(judged) > 40
    assert share(judged) >= PROMISED + 0.05
    assert 0.8 <= statistics.median(judgement.ratio for judgement in judged) <= 1.25


def test_two_terms_are_nearer_to_measurements_than_one() -> None:
    def near(ratios: list[float]) -> float:
        return sum(abs(ratio - 1) <= 0.25 for ratio in ratios) / len(ratios)

    dense = [judgement for judgement in _each_device() if not judgement.row.active_share]
    ours, theirs = (
        near([judgement.ratio for judgement in dense]),
        near([peer_ratio(judgement.row) for judgement in dense]),
    )
    assert ours >= theirs + 0.15


def test_every_row_is_used_or_dropped_for_a_reason() -> None:
    dropped = Counter[str]()
    used = sum(1 for _ in read_rows(dropped))
    assert used + dropped.total() == sum(len(submission["results"]) for submission in read_submissions())
    assert used >= 0.8 * (used + dropped.total())
    assert all(estimate_row(row) for row in _rows())


@pytest.mark.parametrize(
    ("tag", "parameters", "bits", "active"),
    [
        ("meta-llama-3.1-8b-instruct-q4_k_m", 8, 4.89, None),
        ("qwen3-30b-a3b-instruct-2507-q4_k_m", 30, 4.89, 3),
        ("gpt-oss-20b-mxfp4", 20.9, 4.5, 3.6),
        ("phi-4-q4_k_m", 14.66, 4.89, None),
        ("qwen2.5:7b", 7, 4.89, None),
        ("smollm2-135m-instruct-q4_k_m", 0.135, 4.89, None),
    ],
)
def test_tag_states_what_is_read(tag: str, parameters: float, bits: float, active: float | None) -> None:
    row = _row(tag)
    assert row.parameters == pytest.approx(parameters)
    assert row.layout.tensor_bytes == pytest.approx(parameters * bits / 8 * 1e9)
    assert row.active_share == (pytest.approx(active / parameters) if active else None)


def test_memory_is_that_of_the_peer_where_its_constant_for_the_engine_matters_little() -> None:
    compared = compare_memory()
    assert len(compared) > 4000
    assert sum(abs(memory.ratio - 1) <= 0.1 for memory in compared) / len(compared) >= PROMISED
    large = [memory for memory in compared if memory.billions >= 3]
    assert sum(abs(memory.ratio - 1) <= 0.1 for memory in large) / len(large) >= 0.95


def test_speed_differs_from_the_peer_as_the_page_says() -> None:
    speed = compare_speed("NVIDIA GeForce RTX 4090", 24_564)
    assert speed.gb_per_second == speed.peer_gb_per_second == 1008
    assert 1 <= statistics.median(speed.ratios) <= 1.25
    mistaken = compare_speed("NVIDIA H100 80GB HBM3", 81_559)
    assert (mistaken.gb_per_second, mistaken.peer_gb_per_second) == (3350, 2039)
    assert 1.2 <= statistics.median(mistaken.ratios) <= 1.7


def test_page_has_the_figures_of_the_estimates() -> None:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    tables = text.split("### ")
    for judged, table in ((_held_back(), tables[1]), (_each_device(), tables[2])):
        match = re.search(r"\| \*\*all\*\* \| (\d+) \| \d+ \| ([\d.]+) \| \d+% \| (\d+)% \|", table)
        assert match, "run python -m benchmarks.speed_estimate --write"
        assert int(match[1]) == len(judged)
        assert float(match[2]) == pytest.approx(statistics.median(judgement.ratio for judgement in judged), abs=0.02)
        assert int(match[3]) == pytest.approx(100 * share(judged), abs=1)
