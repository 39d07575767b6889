"""`pomona up` beside an agent of a cluster: neither takes what the other one runs."""

import json
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from metal_agent.exit_codes import PERMANENT
from runtimes.daemon import owner_mark
from tests.controlplane.process import Process
from tests.support.api_objects import process
from tests.support.ollama.server import OllamaServer
from tests.support.up_command import Start, ask


async def test_an_agent_that_cannot_serve_takes_nothing_over(start: Start, tmp_path: Path, weights: Path) -> None:
    up = start("--model", str(weights))
    url = await up.url()
    await up.says("tiny: Ready")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    argv = ["agent", "--name=studio-1", f"--kubeconfig={kubeconfig}", f"--state-dir={up.state}"]
    agent = Process("agent", [sys.executable, "-m", "cli.main", *argv], tmp_path / "agent.log")
    agent.start()
    assert await agent.wait() == PERMANENT
    assert "the cluster cannot reach address 127.0.0.1" in agent.tail(5)
    assert (await ask(url, "tiny"))[0] == 200
    assert "handed over" not in up.said


async def test_the_engines_of_a_cluster_are_left_alone(start: Start, weights: Path) -> None:
    up = start("--model", str(weights))
    await up.url()
    await up.says("tiny: Ready")
    await up.process.kill()
    (record,) = (up.state / "processes").glob("*.json")
    content = json.loads(record.read_text())
    record.with_name("u1.json").write_text(json.dumps({**content, "uid": "u1"}))
    record.unlink()
    up.process.start()
    assert await up.ends() == 1
    assert "which a cluster has placed on this machine, still runs" in up.said
    assert "end it by `pomona agent stop`" in up.said
    assert psutil.pid_exists(content["identity"]["pid"])


async def test_models_of_a_cluster_in_a_daemon_are_left_alone(
    start: Start, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port) as daemon:
        monkeypatch.setenv("OLLAMA_HOST", daemon.url)
        up = start("--model", str(weights))
        name = f"{owner_mark(str(up.state))}/tiny:1-2"
        daemon.own(name)
        asked = daemon.changes()
        spec = process("chat-1", runtime="ollama")["spec"]
        record = {"uid": "u1", "namespace": "team-a", "name": "chat-1", "spec": spec, "identity": None}
        (up.state / "processes").mkdir(parents=True, mode=0o700)
        up.state.chmod(0o700)
        (up.state / "processes" / "u1.json").write_text(
            json.dumps({**record, "model": name, "started_at": "2026-11-21T12:00:00Z"})
        )
        up.process.start()
        assert await up.ends() == 1
        assert "the engine of team-a/chat-1, which a cluster has placed on this machine" in up.said
        assert daemon.names() == {name}
        assert daemon.changes() == asked
