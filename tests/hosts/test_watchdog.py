"""Memory pressure with llama.cpp's real server: the order of evictions, and the return of all processes."""

import psutil
import pytest

from metal_agent.memory import pressure_policy
from metal_agent.memory.pressure_policy import HoldAction
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, phase, ready


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of the pressure policy, most of them to a hundredth."""
    monkeypatch.setattr(pressure_policy, "SAMPLE_SECONDS", 0.02)
    for name in ("WARN", "CRITICAL", "DISPLACE_AFTER", "CRITICAL_DISPLACEMENT", "SETTLE", "CALM", "RETURN"):
        seconds = getattr(pressure_policy, f"{name}_SECONDS")
        monkeypatch.setattr(pressure_policy, f"{name}_SECONDS", seconds / 100)


def evicted(machine: Machine) -> list[HoldAction]:
    return [step for step in machine.steps if step.kind == "evict"]


async def test_critical_pressure_evicts_one_at_a_time_until_calm(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment("low", priority="low"), assignment("top", priority="critical")])
    pids = {uid: await ready(machine, uid) for uid in ("low", "top")}

    machine.level = "critical"
    await phase(machine, "Pending", "MemoryPressure", "low")
    assert not psutil.pid_exists(pids["low"])
    assert machine.exposure.calls[:2] == [("withdraw", True), ("drain", True)], "before its engine was ended"
    await phase(machine, "Pending", "MemoryPressure", "top")
    assert engines(machine) == []
    assert machine.steps == [
        HoldAction("hold"),
        HoldAction("displace", "low"),
        HoldAction("evict", "low"),
        HoldAction("displace", "top"),
        HoldAction("evict", "top"),
    ]
    assert machine.ledger.reserved.keys() == {"low", "top"}, "their places are kept"
    target = machine.gate.displacement_condition(machine.runners["low"])
    assert target
    assert (target["type"], target["status"], target["reason"]) == ("DisruptionTarget", "True", "MemoryPressure")
    assert machine.watchdog.pressure_condition()["status"] == "True"

    machine.level = "normal"
    assert await ready(machine, "low") not in pids.values()
    await ready(machine, "top")
    assert machine.steps[5:] == [HoldAction("release"), HoldAction("return", "top"), HoldAction("return", "low")]
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
    await eventually(lambda: machine.steps[1:2] == [HoldAction("displace", "idle")])
    machine.level = None
    await eventually(lambda: machine.watchdog.level is None)
    monkeypatch.setattr(pressure_policy, "CRITICAL_DISPLACEMENT_SECONDS", 0.0)
    await machine.watchdog.sample()
    assert evicted(machine) == [], "what is not known ends nothing"


async def test_evicted_process_stays_evicted_under_the_next_agent(machine: Machine, assignment: MakeAssignment) -> None:
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
    assert machine.steps == [HoldAction("release"), HoldAction("return", "u1")]
