"""Strangers attack each port that a process of the product opens: it stays small, lives, and answers a probe in time.

The ports are found by the sockets of the processes. The API server is away, which opens no port less: preflight alone
needs it, for its certificate (`tests/cluster/preflight`).
"""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import yaml

from metal_agent.native.process import OWNER_VARIABLE, kill_strays
from tests.controlplane.process import Process
from tests.hosts.test_agent_service import ServedHost, agent
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports
from tests.support.open_ports import OpenPort, check_attacked_ports, find_ports, list_processes
from tests.support.tiny_models import tiny_gguf

Start = Callable[..., Process]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start `pomona` with these arguments and, as {kubeconfig}, an API server that is away."""
    ports = find_free_ports()
    content = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{next(ports)}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(content))
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        rendered = [word.format(kubeconfig=kubeconfig, port=next(ports)) if "{" in word else word for word in arguments]
        process = Process(arguments[0], [sys.executable, "-m", "cli.main", *rendered], tmp_path / f"{arguments[0]}.log")
        started.append(process)
        process.start()
        return process

    yield begin
    for process in started:
        await process.kill()


COMMANDS = (
    (
        *("controller", "--kubeconfig={kubeconfig}", "--no-leader-elect"),
        *("--metrics-bind-address=:{port}", "--health-probe-bind-address=127.0.0.1:{port}"),
    ),
    ("node-agent", "--kubeconfig={kubeconfig}", "--node-name=n", "--metrics-port={port}", "--port={port}"),
    (
        *("console", "api", "--kubeconfig={kubeconfig}"),
        *("--address=0.0.0.0:{port}", "--metrics-address=0.0.0.0:{port}"),
    ),
    (
        *("extender", "--kubeconfig={kubeconfig}", "--address=0.0.0.0"),
        *("--port={port}", "--metrics-address=0.0.0.0:{port}"),
    ),
)
"""The commands that open two ports each in pods."""


async def await_ports(process: Process, count: int) -> list[OpenPort]:
    def found() -> list[OpenPort]:
        if not process.running:
            raise RuntimeError(process.tail(20))
        ports = find_ports([process.pid])
        return ports if len(ports) >= count else []

    ports = await eventually(found)
    assert len(ports) == count, ports
    return ports


async def test_strangers_neither_end_a_process_nor_keep_probes_out(start: Start) -> None:
    processes = [start(*command) for command in COMMANDS]
    ports = [port for process in processes for port in await await_ports(process, 2)]
    # They share the processors, so that each is attacked less than one alone, and may grow less.
    await check_attacked_ports(ports, count=90, most_growth_bytes=10 << 20)
    assert all(process.running for process in processes)


async def test_strangers_neither_end_an_agent_or_its_proxy_nor_keep_clients_out(
    tmp_path: Path, served_host: ServedHost
) -> None:
    served_host.assign()
    metrics = f"--metrics-address=127.0.0.1:{next(find_free_ports())}"
    process = agent(served_host, tmp_path, *served_host.options, metrics)
    process.start()
    try:
        await served_host.served()
        pids = list_own_processes(served_host.folder, process.pid)
        # Its metrics, the port by which the controller finds it, and that of its service.
        ports = await eventually(lambda: found if len(found := find_ports(pids)) >= 3 else [])
        await check_attacked_ports(ports, seconds=2.5)
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        await process.kill()


@pytest.mark.long
async def test_ten_thousand_connections_cost_proxy_and_agent_little(tmp_path: Path, served_host: ServedHost) -> None:
    served_host.assign()
    process = agent(served_host, tmp_path)
    process.start()
    try:
        await served_host.served()
        pids = list_own_processes(served_host.folder, process.pid)
        for port in await eventually(lambda: found if len(found := find_ports(pids)) >= 2 else []):
            # Kept whole, their heads would take 140 MB. It grows by 13 to 25 MiB, as the C library splits its heap.
            growth = 32 << 20
            await check_attacked_ports(
                [port], seconds=20, count=10_000, kinds=("drip_head", "stay_idle"), most_growth_bytes=growth
            )
    finally:
        await process.kill()


async def test_strangers_neither_end_pomona_up_nor_keep_clients_out(tmp_path: Path, start: Start) -> None:
    weights = tmp_path / "tiny.gguf"
    tiny_gguf.write(weights)
    state = tmp_path / "state"
    process = start("up", "--model", str(weights), f"--state-dir={state}", "--port=0")
    try:
        await eventually(lambda: "OpenAI endpoint: " in process.tail(50))
        pids = list_own_processes(state, process.pid)
        await check_attacked_ports(find_ports(pids), seconds=2.5)
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        await process.kill()
        await kill_strays(state, ())


def list_own_processes(state: Path, pid: int) -> list[int]:
    """Return the processes of the product itself; engines listen on loopback only, with a key of their own."""
    pids = {pid}
    for child in list_processes(OWNER_VARIABLE, str(state)):
        if any("runtimes" in word for word in psutil.Process(child).cmdline()):
            assert all(port.host == "127.0.0.1" for port in find_ports([child]))
        else:
            pids.add(child)
    return sorted(pids)


@pytest.fixture
async def served_host(tmp_path: Path) -> AsyncIterator[ServedHost]:
    host = ServedHost(tmp_path)
    yield host
    await kill_strays(host.folder, ())
