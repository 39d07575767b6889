"""Remembered peaks raise reservations, never lower them, and are found again by what decides about memory."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.metalprocess import Artifact, FurtherArtifact, MetalProcessSpec
from metal_agent.memory.peaks import RUNS, Peaks, identify_serving

SPEC = MetalProcessSpec(
    service_name="chat",
    model_name="tiny",
    runtime="llama.cpp",
    artifact=Artifact(source="hf://a/b/c.gguf", revision="r", sha256="a" * 64),
    memory_bytes=1000,
    token_secret="chat-token",
)


def test_reservation_is_highest_recent_peak_and_at_least_the_estimate(tmp_path: Path) -> None:
    peaks = Peaks(tmp_path / "peaks.json")
    assert peaks.needed_bytes(SPEC) == 1000
    peaks.observe({"u/1": (SPEC, 900)})
    assert peaks.needed_bytes(SPEC) == 1000
    peaks.observe({"u/1": (SPEC, 1500), "v/1": (SPEC, 1400)})
    peaks.observe({"u/1": (SPEC, 200)})
    assert peaks.needed_bytes(SPEC) == 1500
    assert Peaks(tmp_path / "peaks.json").needed_bytes(SPEC) == 1500
    assert Peaks(tmp_path / "elsewhere.json").needed_bytes(SPEC) == 1000


def test_leaked_run_is_forgotten_after_better_ones() -> None:
    peaks = Peaks()
    peaks.observe({"leaked": (SPEC, 9000)})
    for run in range(RUNS - 1):
        peaks.observe({str(run): (SPEC, 1200)})
        assert peaks.needed_bytes(SPEC) == 9000
    peaks.observe({"last": (SPEC, 1100)})
    assert peaks.needed_bytes(SPEC) == 1200


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000)), max_size=60))
def test_reservation_is_never_below_estimate_or_present_run(seen: list[tuple[int, int]]) -> None:
    peaks = Peaks()
    for run, used in seen:
        peaks.observe({str(run): (SPEC, used)})
        assert peaks.needed_bytes(SPEC) >= max(SPEC.memory_bytes, int(used / 1.01))


@pytest.mark.parametrize(
    "changes",
    [
        {"context_length": 8192},
        {"parallel": 2},
        {"cache_type_k": "q8_0"},
        {"mode": "embeddings"},
        {"runtime": "ollama"},
        {"prompt_cache": "1Gi"},
        {"extra_args": ["--swa-full"]},
        {"artifact": structs.replace(SPEC.artifact, sha256="b" * 64)},
        {"further_artifacts": [FurtherArtifact(role="draft", artifact=SPEC.artifact)]},
    ],
)
def test_options_that_memory_depends_on_change_the_key(changes: dict[str, Any]) -> None:
    assert identify_serving(structs.replace(SPEC, **changes)) != identify_serving(SPEC)


def test_service_and_source_do_not_change_the_key() -> None:
    mirrored = structs.replace(SPEC.artifact, source="https://mirror.example/c.gguf", revision="")
    other = structs.replace(SPEC, service_name="other", memory_bytes=7, priority="high", artifact=mirrored)
    assert identify_serving(other) == identify_serving(SPEC)


def test_peak_that_cannot_be_written_is_kept_in_memory(tmp_path: Path) -> None:
    peaks = Peaks(tmp_path / "peaks.json")
    (tmp_path / ".peaks.json.new").mkdir()
    peaks.observe({"u/1": (SPEC, 1500)})
    assert peaks.needed_bytes(SPEC) == 1500
