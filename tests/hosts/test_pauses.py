"""Pauses by the owner with llama.cpp's real server: beside memory pressure, and over the death of an agent."""

from datetime import UTC, datetime

import psutil
import pytest

from metal_agent.holds import owner_policy, pause_policy
from metal_agent.holds.owner_policy import OwnerPolicy, OwnerSample
from metal_agent.memory import pressure_policy
from metal_agent.memory.pressure_policy import HoldAction
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, phase, ready

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ACTIVE, AWAY = (OwnerSample(NOON, idle_seconds=seconds) for seconds in (0.0, 3600.0))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of both policies, most of them to a hundredth."""
    monkeypatch.setattr(owner_policy, "SAMPLE_SECONDS", 0.02)
    monkeypatch.setitem(owner_policy.BEGIN_SECONDS, "activity", 0.1)
    monkeypatch.setattr(pressure_policy, "SAMPLE_SECONDS", 0.02)
    for name in ("WARN", "CRITICAL", "DISPLACE_AFTER", "CRITICAL_DISPLACEMENT", "SETTLE", "CALM", "RETURN"):
        seconds = getattr(pressure_policy, f"{name}_SECONDS")
        monkeypatch.setattr(pressure_policy, f"{name}_SECONDS", seconds / 100)


@pytest.fixture
async def watched(machine: Machine) -> Machine:
    """A host that its owner pauses while he works at it."""
    await machine.stop()
    machine.policy = OwnerPolicy(idle_minutes=10)
    machine.sample = AWAY
    await machine.start()
    return machine


async def test_pause_stops_what_found_no_other_place_and_brings_it_back(
    watched: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.supervisor.assign([assignment("low", priority="low"), assignment("top", priority="critical")])
    pids = {uid: await ready(watched, uid) for uid in ("low", "top")}
    watched.sample = ACTIVE
    await eventually(lambda: watched.steps == [HoldAction("pause"), HoldAction("displace", "low")])
    target = watched.gate.displacement_condition(watched.runners["low"])
    assert target
    assert (target["type"], target["reason"]) == ("DisruptionTarget", "HostPaused")
    assert "serves on until its replacement" in target["message"]
    assert watched.gate.displacement_condition(watched.runners["top"]) is None
    assert watched.pauses.paused_condition()["reason"] == "OwnerActive"

    monkeypatch.setattr(pause_policy, "DISPLACEMENT_SECONDS", 0.5)
    message = await phase(watched, "Pending", "HostPaused", "low")
    assert "somebody works at it, until there is no input for 10 minutes" in message
    assert watched.exposure.calls == [("withdraw", True), ("drain", True)], "before its engine was ended"
    assert [engine.pid for engine in engines(watched)] == [pids["top"]], "it is protected"
    watched.supervisor.assign([assignment("low", priority="low"), assignment("top", priority="critical"), assignment()])
    await phase(watched, "Pending", "HostPaused")

    watched.sample = replace_idle(None)
    await eventually(lambda: watched.steps[2:] == [HoldAction("evict", "low")])
    watched.sample = AWAY
    await ready(watched, "low")
    await ready(watched)
    assert watched.steps[3:] == [HoldAction("resume")]
    assert psutil.pid_exists(pids["top"])


def replace_idle(seconds: float | None) -> OwnerSample:
    return AWAY._replace(idle_seconds=seconds)
