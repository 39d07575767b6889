"""Remembered peaks raise reservations, never lower them, and are found again by the keys of earlier versions."""

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
        {"extra_args": ["-kvu"]},
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


def test_keys_of_the_file_are_those_of_earlier_versions() -> None:
    options = {
        "context_length": 8192,
        "parallel": 4,
        "mode": "embeddings",
        "cache_type_k": "q8_0",
        "cache_type_v": "q4_0",
        "extra_args": ["-fa", "on"],
        "chat_template": "{{ x }}",
    }
    draft = Artifact(source="hf://a/b/d.gguf", revision="r2", size_bytes=7)
    further = {"further_artifacts": [FurtherArtifact(role="draft", artifact=draft)], "draft_max_tokens": 4}
    assert [identify_serving(structs.replace(SPEC, **changes)) for changes in ({}, options, further)] == [
        "319596bceb9038ec011651e7d973c0c5a854c4f81a635e960a68e03921554f35",
        "b0ce1a0bec90f1ce389a58c3ff337bb13581a6460d65205f9512c9f94b506247",
        "3222b229a7e6e0c0d5174ed09b440272c0bb036d29988a43a4b987b060a16e8c",
    ]
