"""`pomona node-agent` measures the memory bandwidth before it imports what the agent needs."""

import subprocess
import sys

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
