"""A service in a daemon of the host's owner: it answers, and recovers after a kill of the agent or of the daemon."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster, condition
from tests.controlplane.members import MetalHost
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.ollama.program import ensure_ollama
from tests.support.ollama.server import build_environment


@pytest_asyncio.fixture
async def host(metal_host: StartMetalHost, monkeypatch: pytest.MonkeyPatch) -> MetalHost:
    """The host `studio-1`, whose owner has configured the address of Ollama."""
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:11434")
    return await metal_host("studio-1", f"--memory-budget={64 * GIB}")


@pytest_asyncio.fixture
async def ollama(host: MetalHost, tmp_path: Path) -> AsyncIterator[Process]:
    """The owner's Ollama on that host."""
    folder = tmp_path / "ollama"
    folder.mkdir()
    daemon = Process(
        "ollama",
        [*host.host.exec, str(ensure_ollama()), "serve"],
        tmp_path / "ollama.log",
        build_environment(folder, "127.0.0.1:11434"),
    )
    daemon.start()
    yield daemon
    await end(daemon)


async def end(daemon: Process) -> None:
    """Kill the daemon with its engines."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    await daemon.wait()


async def test_service_is_served_by_the_ollama_of_a_host(cluster: Cluster, host: MetalHost, ollama: Process) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal", runtime="ollama", extraArgs=[]))
    await cluster.ready("chat")
    assert await cluster.answers("chat")
    assert (await cluster.ask("chat", token="wrong")).status == 401
    process = await cluster.process("chat")
    assert (process.status.phase, process.status.pid) == ("Ready", None)

    await host.agent.kill()
    assert await cluster.answers("chat")
    host.agent.start()
    await eventually(lambda: '"event":"engine_adopted"' in host.agent.log.read_text())
    assert await cluster.answers("chat")
    assert (await cluster.process("chat")).status.started_at == process.status.started_at

    await end(ollama)

    async def says_how_to_start_it() -> bool:
        ready = condition(await cluster.get("chat"))
        return (ready.status, ready.reason) == ("False", "DaemonNotRunning") and "ollama serve" in ready.message

    async def runs_no_ollama() -> bool:
        return "ollama" not in (await cluster.host(host.name)).status.runtimes

    async def is_withdrawn() -> bool:
        return await cluster.urls("chat") == []

    await eventually(says_how_to_start_it)
    await eventually(runs_no_ollama)
    await eventually(is_withdrawn)
    ollama.start()
    await cluster.ready("chat")
    assert await cluster.answers("chat")


async def test_engine_of_hosts_for_a_service_in_pods_is_refused(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", runtime="llama-cpp-python", extraArgs=[]))
    refused = await cluster.wait_for_phase("chat", "Failed", "InvalidSpec")
    assert "set hardware.accelerator to metal, or runtime to llama.cpp" in condition(refused).message
