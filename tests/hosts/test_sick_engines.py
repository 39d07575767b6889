"""An engine that only fails or hangs is started again, and its status says what it answered; a sound one is kept.

The engine is a stand-in that gets sick on command; in the last test the real proxy suspects it.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from metal_agent import engine_health
from metal_agent.engine_health import BUSY_SHARE, Suspicion, Verdict, judge_check
from metal_agent.native.process import kill_strays
from metal_agent.process_events import Suspected
from metal_agent.supervise import engine_checks
from runtimes.probe import ProbeResult
from tests.support.api_objects import GIB
from tests.support.daemons.host_daemons import Served, library, ollama, omlx, served, watch_often
from tests.support.daemons.omlx import OmlxStandIn
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.local_host import Machine, MakeAssignment, phase, ready
from tests.support.ollama.server import OllamaServer
from tests.support.sick_engine import make_sick, write_program
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import Up, ask

__all__ = ["library", "ollama", "omlx", "served", "watch_often"]

FAILING = Suspicion("Failing", "the last 3 requests failed: 500, 500, 500")
SLOW = Suspicion("Slow", "no answer for 121 s, and none before")
SILENT = Suspicion("Silent", "no data for 12 s within a stream; the longest pause before was 0.1 s")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "CHECK_AGAIN_SECONDS", 0.05)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a suspect engine little time, which only one that hangs may get: a busy machine may not run a sound one."""
    monkeypatch.setattr(engine_health, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(engine_health, "BUSY_SECONDS", 2.0)
    monkeypatch.setattr(engine_health, "BUSY_SHARE", 0.2)  # in so short a time a request of the agent's counts much
    monkeypatch.setattr(engine_checks, "ANSWER_SECONDS", 0.3)


@pytest.fixture
def engine(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of an engine that gets sick on command."""
    monkeypatch.setenv("LLAMA_SERVER_BIN", str(write_program(tmp_path)))
    return model


async def test_poisoned_engine_is_started_again_and_its_answer_is_in_the_status(
    machine: Machine, assignment: MakeAssignment, engine: Path
) -> None:
    machine.supervisor.assign([assignment()])
    first = await ready(machine)
    make_sick(engine, "failing")
    machine.runners["u1"].notify(Suspected(FAILING))
    message = await phase(machine, "Failed", "EngineFailing")
    assert "answered 500: Compute error." in message
    assert machine.exposure.calls == [("withdraw", True), ("drain", True)]
    assert await ready(machine) != first
    assert machine.runners["u1"].build_status(None).message == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("suspicion", [SILENT, SLOW])
async def test_hung_engine_whose_health_page_answers_is_started_again(
    machine: Machine, assignment: MakeAssignment, engine: Path, suspicion: Suspicion
) -> None:
    machine.supervisor.assign([assignment()])
    first = await ready(machine)
    make_sick(engine, "hung")
    machine.runners["u1"].notify(Suspected(suspicion))
    assert "no answer with a token" in await phase(machine, "Failed", "EngineHung")
    assert [call for call, _ in machine.exposure.calls] == ["withdraw"], "nothing that it was asked is answered"
    assert await ready(machine) != first


async def test_sound_engine_that_is_suspect_serves_on(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    runner = machine.runners["u1"]
    runner.notify(Suspected(FAILING))
    await eventually(lambda: [call for call, _ in machine.exposure.calls] == ["clear"])
    await eventually(lambda: runner.state.suspicion is None)
    assert (runner.state.phase, runner.state.reason, runner.state.pid) == ("Ready", "", pid)


@pytest.mark.usefixtures("impatient")
async def test_slow_engine_that_works_on_a_long_request_is_kept(
    machine: Machine, assignment: MakeAssignment, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only slot is taken, so it answers none of the agent's requests; but it uses the processor."""
    monkeypatch.setattr(engine_health, "BUSY_SHARE", BUSY_SHARE)
    verdicts: list[tuple[float, Verdict]] = []

    def judge(suspicion: Suspicion, found: ProbeResult, waited_seconds: float, *, is_busy: bool | None) -> Verdict:
        verdict = judge_check(suspicion, found, waited_seconds, is_busy=is_busy)
        verdicts.append((waited_seconds, verdict))
        return verdict

    monkeypatch.setattr(engine_health, "judge_check", judge)
    tiny_gguf.write(model, loop=True, n_ctx=65536)
    machine.supervisor.assign([assignment(context_length=61000, parallel=1, memory_bytes=GIB)])
    pid = await ready(machine)
    runner = machine.runners["u1"]
    headers = {"Authorization": f"Bearer {runner.api_key}"}
    long = {"stream": True, "max_tokens": 60000, "messages": [{"role": "user", "content": "Hi"}]}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{runner.url}/v1/chat/completions", json=long) as stream,
    ):
        await stream.content.readline()
        runner.notify(Suspected(SLOW))
        await eventually(lambda: any(seconds > 2 * engine_health.BUSY_SECONDS for seconds, _ in verdicts))
        assert {verdict for _, verdict in verdicts} == {"undecided"}
        assert (runner.state.phase, runner.state.pid, runner.state.is_drained) == ("Ready", pid, False)
    await eventually(lambda: runner.state.suspicion is None)
    assert (runner.state.phase, runner.state.pid) == ("Ready", pid)


async def test_answer_of_a_starting_engine_is_shown_and_a_lasting_error_ends_it(
    machine: Machine, assignment: MakeAssignment, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sick(engine, "failing")
    machine.supervisor.assign([assignment()])
    runner = machine.runners["u1"]
    await eventually(lambda: runner.state.phase == "Starting" and "500: Compute error." in runner.state.message)
    monkeypatch.setattr(engine_health, "START_FAILURE_SECONDS", 0.0)
    assert "answered 500: Compute error." in await phase(machine, "Failed", "EngineBroken")
    await ready(machine)


async def test_failing_model_of_a_daemon_is_unloaded_and_loaded_again(omlx: Served) -> None:
    """Ollama replaces an engine that has ended by itself."""
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    machine.supervisor.assign([make("u1"), make("u2")])
    model = await omlx.ready("u1")
    assert await omlx.ready("u2") == model, "both share it"
    daemon.sick.add(model)
    machine.runners["u1"].notify(Suspected(FAILING))
    assert "answered 500: Compute error." in await phase(machine, "Failed", "EngineFailing")
    assert await omlx.ready("u1") == await omlx.ready("u2") == model
    assert daemon.sick == set(), "it was unloaded"


@pytest.mark.usefixtures("impatient")
async def test_hung_model_of_a_daemon_is_unloaded_and_loaded_again(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make("u1"), make("u2")])
    model = await served.ready("u1")
    assert await served.ready("u2") == model, "both share it"
    hung = daemon.hang(model)
    machine.runners["u1"].notify(Suspected(SILENT))
    assert "no answer with a token" in await phase(machine, "Failed", "EngineHung")
    assert await served.ready("u1") == await served.ready("u2") == model
    assert hung(), "it was unloaded"


async def test_engine_of_ollama_that_ends_is_replaced(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    (engine,) = daemon.engines()
    engine.kill()
    await eventually(lambda: not is_alive(engine))
    machine.runners["u1"].notify(Suspected(FAILING))
    await eventually(lambda: daemon.names() == {model} and daemon.engines() not in ([], [engine]))
    assert await ollama.ready() == model


@pytest.fixture
async def served_model(tmp_path: Path, engine: Path) -> AsyncIterator[tuple[Up, str]]:
    """`pomona up` with the model Ready, and its URL."""
    up = Up(tmp_path, f"--model={engine}", "--port=0")
    try:
        url = await up.url()
        await up.says("tiny: Ready")
        yield up, url
    finally:
        if up.process.running:
            await up.process.kill()
        await kill_strays(tmp_path / "state", ())


async def test_proxy_finds_the_poisoned_engine_of_pomona_up_and_it_is_replaced(
    engine: Path, served_model: tuple[Up, str]
) -> None:
    up, url = served_model
    make_sick(engine, "failing")
    asked = [await ask(url, "tiny", seed=number) for number in range(3)]
    assert [status for status, _ in asked] == [500, 500, 500]
    await up.says("answered 500: Compute error.")
    await eventually(lambda: _answers(url))


async def test_engine_that_fails_all_requests_of_one_client_serves_another(
    engine: Path, served_model: tuple[Up, str]
) -> None:
    """No table knows the error, so the agent asks the engine itself; it stays, and is never withdrawn."""
    up, url = served_model
    make_sick(engine, "picky")
    for number in range(5):
        wrong = [await ask(url, "tiny", seed=3 * number + seed) for seed in range(3)]
        assert [status for status, _ in wrong] == [500, 500, 500]
        assert (await ask(url, "tiny"))[0] == 200
    await up.says("checking the engine: the last 3 requests failed")
    assert "Failed" not in up.said


async def _answers(url: str) -> bool:
    return (await ask(url, "tiny"))[0] == 200
