"""A process is measured only while its host has nothing else to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.metalprocess import Artifact, FurtherArtifact, MetalProcessSpec
from devices.pressure import PressureLevel
from metal_agent.benchmarks.benchmark_policy import (
    IDLE_SECONDS,
    find_load_seconds,
    find_wait,
    is_calm,
    is_measurable_engine,
    is_measurable_spec,
    pause_seconds,
    pick_process,
)
from metal_agent.engine_health import Suspicion
from metal_agent.lifecycle import ProcessState
from metal_agent.process_events import Held

SPEC = MetalProcessSpec(
    service_name="chat",
    model_name="tiny",
    runtime="llama.cpp",
    artifact=Artifact(source="hf://a/b/c.gguf", revision="r", sha256="a" * 64),
    memory_bytes=1000,
    token_secret="chat-token",
)
READY = ProcessState("Ready", exists=True, pid=7, ready_since=0.0)


def test_text_without_companions_is_measured() -> None:
    assert is_measurable_spec(SPEC)
    assert not is_measurable_spec(structs.replace(SPEC, mode="embeddings"))
    draft = FurtherArtifact(role="draft", artifact=SPEC.artifact)
    assert not is_measurable_spec(structs.replace(SPEC, further_artifacts=[draft]))


@pytest.mark.parametrize(
    "state",
    [
        ProcessState("Starting", exists=True, pid=7),
        ProcessState("Ready", exists=True, pid=None),
        ProcessState("Ready", exists=True, pid=7, suspicion=Suspicion("Slow", "")),
        ProcessState("Ready", exists=True, pid=7, hold=Held("MemoryPressure", "")),
        ProcessState("Stopping", exists=True, pid=7),
    ],
    ids=["loads", "is-in-a-daemon", "is-suspect", "is-held", "stops"],
)
def test_process_that_is_not_sound_is_not_measured(state: ProcessState) -> None:
    assert is_measurable_engine(READY)
    assert not is_measurable_engine(state)


@pytest.mark.parametrize("level", ["normal", None, "warn", "critical"])
def test_nothing_is_measured_under_pressure_hold_or_load(level: PressureLevel | None) -> None:
    assert is_calm(level, is_held=False, is_loading=False) == (level in {"normal", None})
    assert not is_calm(level, is_held=True, is_loading=False)
    assert not is_calm(level, is_held=False, is_loading=True)


@given(
    ready=st.floats(0, 100),
    idle=st.dictionaries(st.sampled_from(["u1", "u2", "u3"]), st.none() | st.floats(0, 100)),
)
def test_host_is_idle_once_all_its_processes_are(ready: float, idle: dict[str, float | None]) -> None:
    wait = find_wait("u1", ready, idle)
    if "u1" not in idle:
        assert wait is None
        return
    later = {
        uid: seconds + wait if seconds is not None and wait is not None else seconds for uid, seconds in idle.items()
    }
    assert wait is not None
    assert all(seconds is None or seconds >= IDLE_SECONDS - 1e-6 for seconds in (ready + wait, *later.values()))
    assert not wait or min(seconds for seconds in (ready, *idle.values()) if seconds is not None) < IDLE_SECONDS


def test_process_whose_requests_are_unknown_holds_up_no_other() -> None:
    assert pick_process({"u1": 100.0, "u2": 100.0}, {"u2": 50.0}) == ("u2", 0.0)
    assert pick_process({"u1": 5.0, "u2": 100.0}, {"u1": None, "u2": None}) == ("u2", 0.0)
    assert pick_process({"u1": 5.0, "u2": 20.0}, {"u1": None, "u2": None}) == ("u2", IDLE_SECONDS - 20)
    assert pick_process({"u1": 100.0}, {}) is None
    assert pick_process({}, {"u1": 100.0}) is None


@pytest.mark.parametrize(
    ("started_at", "ready_at", "seconds"),
    [
        ("2026-11-27T12:00:00Z", "2026-11-27T12:00:42Z", 42.0),
        ("2026-11-27T12:00:00Z", None, None),
        ("2026-11-27T12:00:00Z", "2026-11-27T11:59:59Z", None),
        ("1970-01-01T00:00:00Z", "2026-11-27T12:00:00Z", None),
    ],
    ids=["known", "not-ready", "clock-was-set-back", "clock-was-set"],
)
def test_time_of_load_is_unknown_if_clock_was_set(started_at: str, ready_at: str | None, seconds: float | None) -> None:
    assert find_load_seconds(started_at, ready_at) == seconds


def test_pause_doubles_up_to_an_hour() -> None:
    assert [pause_seconds(times) for times in (1, 2, 3, 50)] == [60, 120, 240, 3600]
