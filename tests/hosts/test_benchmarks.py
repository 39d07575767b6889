"""The agent measures real engines of its host: once, while the host is idle, and never in the way of a client."""

from collections.abc import Callable

import pytest
import structlog

from artifacts import durable
from crds.performance import BenchmarkOptions
from fitness.bench import measurement
from fitness.bench.measurement import BenchPlan
from metal_agent.benchmarks import benchmark_policy
from metal_agent.benchmarks.measurements import MeasurementsFile
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, ready


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_policy, "IDLE_SECONDS", 0.0)


async def serve(machine: Machine, assignment: MakeAssignment) -> None:
    """Serve the tiny model, which no client has asked yet."""
    machine.supervisor.assign([assignment()])
    await ready(machine)
    machine.idle["u1"] = None


async def measured(machine: Machine) -> str:
    """Wait for a measurement, and return its speed and time."""

    def found() -> str:
        performance = machine.runners["u1"].build_status(None).performance
        assert performance is not None
        return f"{performance.tokens_per_second} at {performance.measured_at}"

    return await eventually(found)


async def count_tries(machine: Machine) -> Callable[[], int | None]:
    """Return a function that counts the tries to measure the process."""
    spec = machine.runners["u1"].assignment.spec
    (version,) = (await machine.benchmarks._list_unmeasured()).values()

    def count() -> int | None:
        return machine.host.measurements.count_tries(spec, version)

    return count


async def test_engine_is_measured_once_over_restarts_of_the_agent(machine: Machine, assignment: MakeAssignment) -> None:
    await serve(machine, assignment)
    async with running(machine.benchmarks.run()):
        first = await measured(machine)
    performance = machine.runners["u1"].build_status(None).performance
    assert performance is not None
    assert float(performance.tokens_per_second) > 0
    assert float(performance.prompt_tokens_per_second) > 0
    assert float(performance.inter_token_latency_ms) > 0
    assert (performance.time_to_first_token_ms is None, performance.load_seconds is None) == (False, False)
    await machine.stop()
    await machine.start()
    assert machine.runners["u1"].state.phase == "Ready"
    assert await measured(machine) == first
    assert await machine.benchmarks._list_unmeasured() == {}


async def test_extent_is_that_of_the_service(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment(benchmark=BenchmarkOptions(warmup_iterations=1, runs=2))])
    await ready(machine)
    machine.idle["u1"] = None
    async with running(machine.benchmarks.run()):
        await measured(machine)
    kept = durable.read(machine.folder / "measurements.json", MeasurementsFile)
    assert kept is not None
    (measurement,) = kept.measurements.values()
    assert measurement.performance is not None
    assert (len(measurement.performance.runs), measurement.performance.warmup) == (2, 1)


async def test_measurement_gives_way_to_a_request_at_once_and_is_made_later(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "plan_one_stream", lambda *_: BenchPlan(runs=100, most_seconds=600))
    monkeypatch.setattr(benchmark_policy, "pause_seconds", lambda _times: 0.1)
    await serve(machine, assignment)
    tries = await count_tries(machine)
    async with running(machine.benchmarks.run()):
        await eventually(lambda: tries() == 1)
        machine.idle.clear()
        machine.exposure.asked.set()
        await eventually(lambda: tries() == 0)
        assert machine.runners["u1"].build_status(None).performance is None
        assert machine.runners["u1"].state.phase == "Ready"
        machine.exposure.asked.clear()
        machine.idle["u1"] = None
        machine.benchmarks.wake()
        monkeypatch.setattr(measurement, "plan_one_stream", lambda *_: BenchPlan(runs=1))
        await measured(machine)


@pytest.mark.parametrize("cause", ["pressure", "load", "removal"])
async def test_measurement_ends_when_the_host_has_something_else_to_do(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(measurement, "plan_one_stream", lambda *_: BenchPlan(runs=100, most_seconds=600))
    await serve(machine, assignment)
    tries = await count_tries(machine)
    async with running(machine.benchmarks.run()):
        await eventually(lambda: tries() == 1)
        machine.idle.clear()
        match cause:
            case "pressure":
                machine.level = "warn"
            case "load":
                machine.host.loads.occupy("another")
            case _:
                machine.supervisor.assign([])
        await eventually(lambda: tries() == 0)


async def test_host_under_pressure_or_with_a_load_is_not_measured(machine: Machine, assignment: MakeAssignment) -> None:
    await serve(machine, assignment)
    machine.level = "warn"
    await eventually(lambda: machine.watchdog.level == "warn")
    assert not machine.benchmarks._is_calm()
    machine.level = "normal"
    await eventually(machine.benchmarks._is_calm)
    machine.host.loads.occupy("another")
    assert not machine.benchmarks._is_calm()
    machine.host.loads.release("another")
    assert machine.benchmarks._is_calm()


async def test_engine_that_cannot_be_measured_is_tried_three_times(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No prompt of this length has room in the context.
    monkeypatch.setattr(measurement, "plan_one_stream", lambda *_: BenchPlan(prompt_tokens=5000))
    monkeypatch.setattr(benchmark_policy, "pause_seconds", lambda _times: 0.01)
    await serve(machine, assignment)
    tries = await count_tries(machine)
    engine = await machine.runners["u1"].find_engine()
    with structlog.testing.capture_logs() as logs:
        async with running(machine.benchmarks.run()):
            await eventually(lambda: [log["event"] for log in logs].count("benchmark_failed") == 3)
    assert engine is not None
    assert engine.token
    assert engine.token not in str(logs)
    async with running(machine.benchmarks.run()):
        await eventually(lambda: tries() == 3)

        async def is_over() -> bool:
            return await machine.benchmarks._list_unmeasured() == {}

        await eventually(is_over)
    await machine.stop()
    await machine.start()
    assert await machine.benchmarks._list_unmeasured() == {}
    assert machine.runners["u1"].state.phase == "Ready"
