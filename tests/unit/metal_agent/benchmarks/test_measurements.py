"""Measurements are kept over restarts, each model with its arguments is measured once, and tries are counted."""

from pathlib import Path

import pytest
from msgspec import structs

from crds.performance import ProcessPerformance
from fitness.performance import MeasuredPerformance
from metal_agent.benchmarks.measurements import _MOST_ENTRIES, Measurements, describe_performance
from tests.unit.metal_agent.benchmarks.test_benchmark_policy import SPEC

FOUND = MeasuredPerformance(tokens_per_second=52.1, source="host", measured_at="2026-11-27T00:00:00Z")


def test_measurement_outlives_the_agent_and_belongs_to_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    Measurements(path).begin_try(SPEC, "b1")
    measurements = Measurements(path)
    assert measurements.count_tries(SPEC, "b1") == 1, "a machine that died of it has tried"
    measurements.finish(SPEC, FOUND)
    measurements = Measurements(path)
    assert measurements.count_tries(SPEC, "b1") is None
    shown = measurements.find(SPEC)
    assert shown is not None
    assert (shown.tokens_per_second, shown.measured_at) == ("52.1", "2026-11-27T00:00:00Z")
    for changed in (structs.replace(SPEC, context_length=8192), structs.replace(SPEC, extra_args=["-t", "4"])):
        assert measurements.find(changed) is None
        assert measurements.count_tries(changed, "b1") == 0
    assert measurements.find(structs.replace(SPEC, service_name="other", memory_bytes=7)) == shown


def test_another_version_of_the_engine_is_measured_anew_and_the_last_speed_is_shown_meanwhile() -> None:
    measurements = Measurements()
    measurements.begin_try(SPEC, "b1")
    measurements.finish(SPEC, FOUND)
    assert measurements.count_tries(SPEC, "b2") == 0
    measurements.begin_try(SPEC, "b2")
    assert measurements.count_tries(SPEC, "b2") == 1
    assert measurements.find(SPEC) is not None
    measurements.finish(SPEC, structs.replace(FOUND, tokens_per_second=60.0))
    assert measurements.count_tries(SPEC, "b2") is None
    assert measurements.find(SPEC) == describe_performance(structs.replace(FOUND, tokens_per_second=60.0))


def test_measurement_that_gave_way_was_no_try() -> None:
    measurements = Measurements()
    for _ in range(5):
        measurements.begin_try(SPEC, "b1")
        measurements.take_back_try(SPEC)
    assert measurements.count_tries(SPEC, "b1") == 0
    for tries in (1, 2, 3):
        measurements.begin_try(SPEC, "b1")
        assert measurements.count_tries(SPEC, "b1") == tries


def test_oldest_measurement_is_forgotten_first() -> None:
    measurements = Measurements()
    specs = [structs.replace(SPEC, context_length=1024 + number) for number in range(_MOST_ENTRIES + 1)]
    for spec in specs:
        measurements.finish(spec, FOUND)
    assert [measurements.find(spec) is None for spec in specs] == [True] + [False] * _MOST_ENTRIES


def test_file_that_cannot_be_written_keeps_the_measurement_in_memory(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match="folder"):
        Measurements(tmp_path / "folder" / "measurements.json")
    measurements = Measurements(tmp_path / "measurements.json")
    (tmp_path / ".measurements.json.new").mkdir()
    measurements.finish(SPEC, FOUND)
    assert measurements.find(SPEC) is not None


def test_status_shows_three_digits() -> None:
    performance = structs.replace(
        FOUND,
        tokens_per_second=521.34,
        prompt_tokens_per_second=3420.0,
        time_to_first_token_ms=37.4,
        inter_token_latency_ms=1.918,
        load_seconds=12.0,
    )
    assert describe_performance(performance) == ProcessPerformance(
        tokens_per_second="521",
        prompt_tokens_per_second="3420",
        time_to_first_token_ms=37,
        inter_token_latency_ms="1.9",
        load_seconds=12,
        measured_at="2026-11-27T00:00:00Z",
    )
