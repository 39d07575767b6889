"""An engine that hangs is replaced, and one that is only busy is not: both are llama.cpp's real server."""

import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from metal_agent import lifecycle
from metal_agent.supervise import engine_checks, runner
from metal_agent.supervise.engine_checks import LivenessCheck, LivenessWatch
from metal_agent.supervise.runner import Runner
from runtimes.registry import RUNTIMES
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, phase, ready
from tests.support.tiny_models import tiny_gguf

LONG = {"stream": True, "max_tokens": 60000, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(engine_checks, "TOKEN_CHECK_SECONDS", 0.2)
    # A busy machine may not run an engine for some seconds, which must not be three checks.
    monkeypatch.setattr(engine_checks, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(lifecycle, "HUNG_GRACE_SECONDS", 0.3)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[LivenessCheck]:
    """All liveness checks so far, in order."""
    taken: list[LivenessCheck] = []
    look = LivenessWatch.check_once

    async def noted(self: LivenessWatch, before: float | None) -> LivenessCheck | None:
        check = await look(self, before)
        taken.extend([check] if check else [])
        return check

    monkeypatch.setattr(LivenessWatch, "check_once", noted)
    return taken


@pytest.fixture
def _no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pulse endpoints, so that only a token proves that an engine is alive."""
    monkeypatch.setattr(
        runner, "RUNTIMES", {name: dataclasses.replace(runtime, pulse=None) for name, runtime in RUNTIMES.items()}
    )


@pytest.mark.parametrize("in_flight", [0, 1])
async def test_hung_engine_is_killed_and_replaced(machine: Machine, assignment: MakeAssignment, in_flight: int) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    machine.exposure.in_flight["u1"] = in_flight
    os.kill(pid, signal.SIGSTOP)
    assert "is stopped and started again" in await phase(machine, "Failed", "EngineHung")
    last = machine.runners["u1"].state.last_exit
    assert last
    assert last.signal == "SIGKILL", "it was too stuck to heed SIGTERM"
    assert machine.exposure.calls == [("withdraw", True)], "what it was asked is lost: nothing is drained"
    again = await ready(machine)
    assert [engine.pid for engine in engines(machine)] == [again]


async def test_engine_that_ignores_sigterm_is_stopped(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_checks, "CHECK_SECONDS", 60)
    machine.supervisor.assign([assignment()])
    os.kill(await ready(machine), signal.SIGSTOP)
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert engines(machine) == []


@pytest.mark.usefixtures("_no_pulse")
async def test_engine_too_busy_to_answer_is_left_alone(
    machine: Machine, assignment: MakeAssignment, model: Path, http: aiohttp.ClientSession, looks: list[LivenessCheck]
) -> None:
    tiny_gguf.write(model, loop=True, n_ctx=65536)
    machine.supervisor.assign([assignment(context_length=61000, parallel=1, memory_bytes=GIB)])
    pid = await ready(machine)
    async with http.post(f"{machine.runners['u1'].url}/v1/chat/completions", json=LONG, headers=key(machine)) as stream:
        await stream.content.readline()
        # This request is not counted, so the engine is probed while its only slot is taken.
        most = engine_checks.HUNG_CHECKS
        await eventually(lambda: sum(bool(look.answer and look.answer.silent) for look in looks) > most)
        assert await stream.content.readline(), "the stream goes on"
    assert machine.runners["u1"].state.pid == pid
    assert machine.runners["u1"].state.phase == "Ready"


async def test_engine_that_answers_requests_is_not_probed(
    machine: Machine, assignment: MakeAssignment, model: Path, http: aiohttp.ClientSession, looks: list[LivenessCheck]
) -> None:
    tiny_gguf.write(model, loop=True, n_ctx=65536)
    machine.supervisor.assign([assignment(context_length=61000, parallel=1, memory_bytes=GIB)])
    await ready(machine)
    async with http.post(f"{machine.runners['u1'].url}/v1/chat/completions", json=LONG, headers=key(machine)) as stream:
        await stream.content.readline()
        machine.exposure.in_flight["u1"] = 1
        await eventually(lambda: [look.answer for look in looks[-3:]] == [None] * 3)


@pytest.mark.parametrize("pulse", [True, False])
async def test_idle_engine_answers_and_stays(
    machine: Machine,
    assignment: MakeAssignment,
    looks: list[LivenessCheck],
    *,
    pulse: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not pulse:
        request.getfixturevalue("_no_pulse")
    monkeypatch.setattr(engine_checks, "ANSWER_SECONDS", 60.0)
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await eventually(lambda: len(looks) > 2 * engine_checks.HUNG_CHECKS)
    assert all(look.answer == engine_checks.LivenessAnswer() for look in looks)
    assert machine.runners["u1"].state.pid == pid


async def test_doubted_engine_is_ready_again_once_it_has_answered(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_checks, "HUNG_CHECKS", 1000)
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    doubted = machine.runners["u1"]
    await doubted.check_liveness()
    assert doubted.is_answering
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: _unproven(doubted))
    machine.changes.clear()
    os.kill(pid, signal.SIGCONT)
    await eventually(lambda: doubted.is_answering)
    assert machine.changes == [("u1", "Ready")], "its endpoint is written anew"


def key(machine: Machine) -> dict[str, str]:
    return {"Authorization": f"Bearer {machine.runners['u1'].api_key}"}


async def _unproven(doubted: Runner) -> bool:
    await doubted.check_liveness()
    return not doubted.is_answering


async def test_engine_that_ends_during_a_check_is_no_crash(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    checked = machine.runners["u1"]
    read_cpu_seconds = engine_checks.read_cpu_seconds

    async def read_of_the_dead(pid: int) -> float | None:
        os.kill(pid, signal.SIGKILL)
        await phase(machine, "Failed", "EngineExited")
        return await read_cpu_seconds(pid)

    monkeypatch.setattr(runner, "read_cpu_seconds", read_of_the_dead)
    await checked.check_liveness()
    assert await ready(machine) != pid
