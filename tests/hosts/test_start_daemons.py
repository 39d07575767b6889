"""`pomona up --start-daemons` with a real Ollama, which is installed and does not run."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.ollama.program import ensure_ollama
from tests.support.ollama.server import OllamaServer, build_environment
from tests.support.on_demand_up import write_models
from tests.support.up_command import Start, Up, ask

ANSWER = (200, "one speaks.")


@pytest.fixture
def port(tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of Ollama, whose program is on PATH."""
    monkeypatch.setenv("PATH", f"{ensure_ollama().parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in build_environment(tmp_path / "ollama", f"127.0.0.1:{unused_tcp_port}").items():
        if name.startswith("OLLAMA_"):
            monkeypatch.setenv(name, value)
    return unused_tcp_port


def find_ollama(port: int) -> psutil.Process:
    """Return the process that listens at a port."""
    connections = psutil.net_connections("tcp")
    (pid,) = {found.pid for found in connections if found.laddr and found.laddr[1] == port and found.status == "LISTEN"}
    return psutil.Process(pid)


def write_model(folder: Path) -> str:
    return write_models(folder, "one", runtime="ollama", extraArgs=[])


async def test_daemon_is_started_when_it_is_needed_and_ends_with_up(start: Start, tmp_path: Path, port: int) -> None:
    up = start(write_model(tmp_path), "--start-daemons")
    url = await up.url()
    await up.says("one: Idle")
    with pytest.raises(ValueError, match="not enough values"):
        find_ollama(port)
    assert await ask(url, "one") == ANSWER
    first = find_ollama(port)
    assert first.cmdline()[1:] == ["serve"]

    os.killpg(first.pid, signal.SIGKILL)
    await eventually(lambda: not is_alive(first))
    await eventually_answers(url)
    second = find_ollama(port)
    assert second.pid != first.pid
    assert "Listening on" in (up.state / "logs" / "ollama.log").read_text()
    assert await up.process.stop() == 0
    assert not is_alive(second)


async def eventually_answers(url: str) -> None:
    async def answers() -> bool:
        return await ask(url, "one") == ANSWER

    await eventually(answers)


async def test_daemon_is_adopted_after_a_kill(start: Start, tmp_path: Path, port: int) -> None:
    up: Up = start(write_model(tmp_path), "--start-daemons")
    assert await ask(await up.url(), "one") == ANSWER
    daemon = find_ollama(port)
    await up.process.kill()
    assert is_alive(daemon)
    up.process.log.write_text("")
    assert await ask(await up.url(), "one") == ANSWER
    assert find_ollama(port) == daemon
    assert await up.process.stop() == 0
    assert not is_alive(daemon)


async def test_daemon_of_the_owner_is_used_and_goes_on(start: Start, tmp_path: Path, port: int) -> None:
    async with OllamaServer(tmp_path / "ollama", port):
        daemon = find_ollama(port)
        up = start(write_model(tmp_path), "--start-daemons")
        assert await ask(await up.url(), "one") == ANSWER
        assert await up.process.stop() == 0
        assert find_ollama(port) == daemon


@pytest.mark.usefixtures("port")
async def test_message_names_the_option(start: Start, tmp_path: Path) -> None:
    status, said = await ask(await start(write_model(tmp_path)).url(), "one")
    assert status == 503
    assert "start it with `ollama serve`, or open the Ollama app, or by `pomona up --start-daemons`" in said
