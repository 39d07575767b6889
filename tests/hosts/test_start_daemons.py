"""`pomona up --start-daemons` with a real Ollama, which is installed and does not run, and oMLX's stand-in."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from kube.resources import MODELS
from tests.support.api_objects import GIB
from tests.support.daemons.omlx import write_program
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.live_processes import is_alive
from tests.support.ollama.program import ensure_ollama
from tests.support.ollama.server import OllamaServer, build_environment
from tests.support.on_demand_up import write_models
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_mlx
from tests.support.up_command import Start, Up, ask, manifest, service

ANSWER = (200, "one speaks.")


@pytest.fixture
def port(tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of Ollama, whose program is on PATH."""
    monkeypatch.setenv("PATH", f"{ensure_ollama().parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in build_environment(tmp_path / "ollama", f"127.0.0.1:{unused_tcp_port}").items():
        if name.startswith("OLLAMA_"):
            monkeypatch.setenv(name, value)
    return unused_tcp_port


def find_listener(port: int) -> psutil.Process:
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
        find_listener(port)
    assert await ask(url, "one") == ANSWER
    first = find_listener(port)
    assert first.cmdline()[1:] == ["serve"]

    os.killpg(first.pid, signal.SIGKILL)
    await eventually(lambda: not is_alive(first))
    await eventually_answers(url)
    second = find_listener(port)
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
    daemon = find_listener(port)
    await up.process.kill()
    assert is_alive(daemon)
    up.process.log.write_text("")
    assert await ask(await up.url(), "one") == ANSWER
    assert find_listener(port) == daemon
    assert await up.process.stop() == 0
    assert not is_alive(daemon)


async def test_daemon_of_the_owner_is_used_and_goes_on(start: Start, tmp_path: Path, port: int) -> None:
    async with OllamaServer(tmp_path / "ollama", port):
        daemon = find_listener(port)
        up = start(write_model(tmp_path), "--start-daemons")
        assert await ask(await up.url(), "one") == ANSWER
        assert await up.process.stop() == 0
        assert find_listener(port) == daemon


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
async def test_daemon_listens_on_loopback_only(
    start: Start, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", f"{host}:{port}")
    up = start(write_model(tmp_path), "--start-daemons")
    assert await ask(await up.url(), "one") == ANSWER
    assert f"Listening on 127.0.0.1:{port}" in (up.state / "logs" / "ollama.log").read_text()
    assert await up.process.stop() == 0


@pytest.mark.usefixtures("port")
async def test_message_says_why_a_daemon_has_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "file" / "models"))
    up = start(write_model(tmp_path), "--start-daemons")
    status, said = await ask(await up.url(), "one")
    assert status == 503
    assert "it was started here and has ended: " in said
    assert "not a directory" in said
    assert str(up.state / "logs" / "ollama.log") in said


async def test_omlx_is_started_and_ends_with_up(
    start: Start, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMLX_BASE_PATH", str(tmp_path / "omlx"))
    monkeypatch.setenv("OMLX_PORT", str(unused_tcp_port))
    tiny_mlx.write(tmp_path / "hub" / "pomona" / "tiny")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = make_manifest(MODELS, name="tiny", source="hf://pomona/tiny", memoryBytes=GIB)
        of_omlx = service("tiny", "tiny", runtime="omlx", extraArgs=[])
        up = start(manifest(tmp_path / "omlx.yaml", model, of_omlx), "--start-daemons")
        url = await up.url()
        await up.says("tiny: Ready")
        assert await ask(url, "tiny") == (200, "Hello")
        daemon = find_listener(unused_tcp_port)
        assert await up.process.stop() == 0
        assert not is_alive(daemon)


@pytest.mark.usefixtures("port")
async def test_message_names_the_option(start: Start, tmp_path: Path) -> None:
    status, said = await ask(await start(write_model(tmp_path)).url(), "one")
    assert status == 503
    assert "start it with `ollama serve`, or open the Ollama app, or by `pomona up --start-daemons`" in said
