"""Memory pressure with llama.cpp's real server: the order of evictions, and the return of all processes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from artifacts import durable
from metal_agent.memory import pressure_policy
from metal_agent.memory.pressure_policy import (
    CancelDisplacement,
    Displace,
    Evict,
    Hold,
    PressureAction,
    Release,
    Return,
)
from metal_agent.memory.pressure_watchdog import PressureRecord
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, phase, ready


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of the pressure policy, most of them to a hundredth."""
    monkeypatch.setattr(pressure_policy, "SAMPLE_SECONDS", 0.02)
    for name in ("WARN", "CRITICAL", "DISPLACE_AFTER", "CRITICAL_DISPLACEMENT", "SETTLE", "CALM", "RETURN"):
        seconds = getattr(pressure_policy, f"{name}_SECONDS")
        monkeypatch.setattr(pressure_policy, f"{name}_SECONDS", seconds / 100)


def evicted(machine: Machine) -> list[PressureAction]:
    return [step for step in machine.steps if isinstance(step, Evict)]


async def test_critical_pressure_evicts_one_at_a_time_and_calm_returns_them(
    machine: Machine, assignment: MakeAssignment
) -> None:
    machine.supervisor.assign([assignment("low", priority="low"), assignment("top", priority="critical")])
    pids = {uid: await ready(machine, uid) for uid in ("low", "top")}

    machine.level = "critical"
    await phase(machine, "Pending", "MemoryPressure", "low")
    assert not psutil.pid_exists(pids["low"])
    assert machine.exposure.calls[:2] == [("withdraw", True), ("drain", True)], "before its engine was ended"
    await phase(machine, "Pending", "MemoryPressure", "top")
    assert engines(machine) == []
    assert machine.steps == [Hold(), Displace("low"), Evict("low"), Displace("top"), Evict("top")]
    assert machine.ledger.reserved.keys() == {"low", "top"}, "their places are kept"
    target = machine.gate.displacement_condition(machine.runners["low"])
    assert target
    assert (target["type"], target["status"], target["reason"]) == ("DisruptionTarget", "True", "MemoryPressure")
    assert machine.watchdog.pressure_condition()["status"] == "True"

    machine.level = "normal"
    assert await ready(machine, "low") not in pids.values()
    await ready(machine, "top")
    assert machine.steps[5:] == [Release(), Return("top"), Return("low")]
    assert machine.watchdog.pressure_condition()["status"] == "False"
    assert machine.gate.displacement_condition(machine.runners["low"]) is None


async def test_longest_idle_process_is_displaced_first(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is evicted before the level is unknown; then the time for it is over at once.
    monkeypatch.setattr(pressure_policy, "CRITICAL_DISPLACEMENT_SECONDS", 3600.0)
    machine.supervisor.assign([assignment(uid) for uid in ("busy", "idle", "unasked")])
    for uid in machine.runners:
        await ready(machine, uid)
    machine.idle = {"busy": 0.0, "idle": 900.0, "unasked": None}
    machine.level = "critical"
    await eventually(lambda: machine.steps[1:2] == [Displace("idle")])
    machine.level = None
    await eventually(lambda: machine.watchdog.level is None)
    monkeypatch.setattr(pressure_policy, "CRITICAL_DISPLACEMENT_SECONDS", 0.0)
    await machine.watchdog.sample()
    assert evicted(machine) == [], "what is not known ends nothing"


async def test_nothing_is_started_while_the_host_is_short_of_memory(
    machine: Machine, assignment: MakeAssignment
) -> None:
    machine.level = "warn"
    await eventually(lambda: machine.watchdog.state.is_under_pressure)
    machine.supervisor.assign([assignment()])
    assert "short of memory" in await phase(machine, "Pending", "MemoryPressure")
    assert engines(machine) == []
    assert machine.gate.displacement_condition(machine.runners["u1"]), "it could start elsewhere"
    machine.level = "normal"
    await ready(machine)


async def test_evicted_process_stays_evicted_under_the_next_agent_and_returns(
    machine: Machine, assignment: MakeAssignment
) -> None:
    machine.supervisor.assign([assignment()])
    await ready(machine)
    machine.level = "critical"
    await phase(machine, "Pending", "MemoryPressure")
    await machine.stop()

    machine.level = None
    await machine.start()
    machine.supervisor.assign([assignment()])
    await phase(machine, "Pending", "MemoryPressure")
    assert machine.watchdog.state.evicted == ("u1",)
    machine.level = "normal"
    await ready(machine)
    assert machine.steps == [Release(), Return("u1")]


async def test_eviction_that_was_only_recorded_is_performed_by_the_next_agent(
    machine: Machine, assignment: MakeAssignment
) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    durable.write(machine.folder / "pressure.json", PressureRecord(is_under_pressure=True, evicted=("u1",)))

    machine.level = "warn"
    await machine.start()
    await phase(machine, "Pending", "MemoryPressure")
    assert not psutil.pid_exists(pid)


async def test_next_agent_continues_a_displacement(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    machine.level = "warn"
    await eventually(lambda: machine.steps == [Hold(), Displace("u1")])
    await machine.stop()

    machine.level = None
    await machine.start()
    assert machine.gate.displacement_condition(machine.runners["u1"])
    machine.level = "normal"
    await eventually(lambda: machine.steps == [CancelDisplacement("u1"), Release()])
    assert machine.gate.displacement_condition(machine.runners["u1"]) is None
    assert await ready(machine) == pid


async def test_process_removed_while_it_is_evicted_is_forgotten(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    await ready(machine)
    machine.level = "critical"
    await phase(machine, "Pending", "MemoryPressure")
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.watchdog.retain(set())
    path = machine.folder / "pressure.json"
    await eventually(lambda: msgspec.json.decode(path.read_bytes(), type=PressureRecord).evicted == ())
    assert machine.ledger.reserved == {}


async def test_full_disk_does_not_prevent_an_eviction(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _value: object) -> None:
        raise OSError(28, "No space left on device")

    machine.supervisor.assign([assignment()])
    await ready(machine)
    monkeypatch.setattr(durable, "write", full)
    machine.level = "critical"
    await phase(machine, "Pending", "MemoryPressure")


async def test_failed_sample_is_not_the_last(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.Event()

    async def broken() -> dict[str, float | None]:
        failed.set()
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(machine.watchdog, "_inputs", replace(machine.watchdog._inputs, idle_seconds=broken))
        machine.level = "warn"
        await failed.wait()
    await eventually(lambda: machine.watchdog.state.is_under_pressure)
