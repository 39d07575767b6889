"""`pomona node-agent` measures the bandwidth before it imports what the agent needs, and reads stated folders."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli import node_agent
from devices.node_hardware import NodeRoots
from node_agent.options import NodeAgentOptions

PROGRAM = """
import sys
import cli.node_agent
import devices.node.memory_bandwidth

def show_modules():
    print(*sys.modules)
    sys.exit(0)

cli.node_agent.measure_memory_bandwidth = show_modules
cli.node_agent.command(["--node-name=gpu-1"])
"""
LARGE = {"aiohttp", "kube.client", "node_agent.agent", "node_agent.run", "prometheus_client", "structlog"}


def test_bandwidth_is_measured_before_large_imports() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    modules = set(output.split())
    assert "click" in modules
    assert not LARGE & modules


def test_hardware_is_read_at_the_stated_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[NodeAgentOptions] = []

    async def keep(_credentials: Any, options: NodeAgentOptions, _memory_bandwidth: Any) -> None:
        started.append(options)

    monkeypatch.setattr(node_agent, "measure_memory_bandwidth", lambda: None)
    monkeypatch.setattr("node_agent.run.run", keep)
    monkeypatch.setattr("kube.credentials.load", lambda _kubeconfig: None)
    monkeypatch.setattr("cli.log.configure", lambda **_: None)
    roots = {name: tmp_path / name for name in ("proc", "sys", "disk")}
    for root in roots.values():
        root.mkdir()
    said = CliRunner().invoke(
        node_agent.command, ["--node-name=gpu-1", *(f"--{name}-root={path}" for name, path in roots.items())]
    )
    assert said.exit_code == 0, said.output
    assert [agent_options.roots for agent_options in started] == [NodeRoots(**roots)]
