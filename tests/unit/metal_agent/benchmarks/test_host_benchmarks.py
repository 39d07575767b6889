"""The shell around the policy: no process holds up another, and none that goes meanwhile is a defect."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from msgspec import structs

from crds.metalprocess import MetalProcessSpec
from fitness.bench import measurement
from fitness.performance import MeasuredPerformance
from metal_agent.assignments import Assignment
from metal_agent.benchmarks.host_benchmarks import LOOK_SECONDS, HostBenchmarks
from metal_agent.benchmarks.measurements import Measurements
from metal_agent.holds.hold_gate import HoldGate
from metal_agent.native import engine_command
from metal_agent.supervise.records import Record
from metal_agent.supervise.runner import Runner
from tests.unit.metal_agent.benchmarks.test_benchmark_policy import READY, SPEC

ENGINE = SimpleNamespace(url="http://127.0.0.1:1", model="chat", token="")


class Serving:
    """A stand-in of a runner whose process is Ready, and whose engine cannot be found unless it is given."""

    def __init__(self, uid: str, engine: object = None, spec: MetalProcessSpec = SPEC) -> None:
        self.state = READY
        self.assignment = Assignment(uid, "team-a", f"chat-{uid}", spec)
        self.record = Record(uid, "team-a", f"chat-{uid}", spec, None, started_at="2026-11-27T12:00:00Z")
        self.times_found = 0
        self._engine = engine

    async def find_engine(self) -> object:
        self.times_found += 1
        return self._engine


def benchmarks_of(
    runners: Mapping[str, Serving], idle: Mapping[str, float | None], changed: list[str] | None = None
) -> HostBenchmarks:
    async def idle_seconds() -> Mapping[str, float | None]:
        return idle

    async def wait_request(_seconds: float) -> bool:
        await asyncio.Event().wait()
        return True

    noted = [] if changed is None else changed

    def note_change(runner: Runner) -> None:
        noted.append(runner.assignment.uid)

    return HostBenchmarks(
        cast("Mapping[str, Runner]", runners),
        Measurements(),
        HoldGate({}),
        read_level=lambda: "normal",
        idle_seconds=idle_seconds,
        wait_request=wait_request,
        changed=note_change,
    )


async def test_process_whose_requests_are_unknown_holds_up_no_other() -> None:
    runners = {"u1": Serving("u1"), "u2": Serving("u2")}
    assert await benchmarks_of(runners, {"u2": None})._measure_due() == LOOK_SECONDS
    assert [runner.times_found for runner in runners.values()] == [0, 1]


async def test_process_that_goes_during_a_look_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = {"u1": Serving("u1"), "u2": Serving("u2")}
    looks = 0

    def identify(_spec: Any) -> str:
        nonlocal looks
        looks += 1
        if looks == 2:
            del runners["u1"]
        return "b1"

    monkeypatch.setattr(engine_command, "identify_engine", identify)
    with structlog.testing.capture_logs() as logs:
        assert await benchmarks_of(runners, {"u1": None, "u2": None})._measure_due() == LOOK_SECONDS
    assert runners["u2"].times_found == 1
    assert logs == []


async def test_all_processes_of_the_measured_model_report_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: Any) -> MeasuredPerformance:
        return MeasuredPerformance(tokens_per_second=52.1)

    monkeypatch.setattr(measurement, "measure_engine", measure)
    runners = {uid: Serving(uid, engine=ENGINE) for uid in ("u1", "u2")}
    runners["u3"] = Serving("u3", engine=ENGINE, spec=structs.replace(SPEC, context_length=16384))
    changed: list[str] = []
    benchmarks = benchmarks_of(runners, dict.fromkeys(runners), changed)
    assert await benchmarks._measure_due() == 0
    assert changed == ["u1", "u2"]
    assert list(await benchmarks._list_unmeasured()) == ["u3"]
