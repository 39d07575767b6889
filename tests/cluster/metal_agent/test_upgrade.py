"""The agent of the previous version is replaced by the new one: its processes, Lease and state are taken over."""

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client
from kube.resources import EVENTS, LEASES, METAL_HOSTS
from tests.cluster.conftest import StartMetalHost
from tests.cluster.metal_agent.bound_process import GIB, BoundProcess, answers, answers_if_reachable, http
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.previous_version import PreviousVersion, marked, running_engines, state_files, unpack
from tests.support.tiny_models import tiny_gguf

__all__ = ["http"]

STATE_FILES = {
    "address.json",
    "agent.lock",
    "assignments.json",
    "identity.json",
    "keys/ID.ID",
    "logs/proxy.log",
    "logs/test-ID_chat-1.log",
    "logs/test-ID_chat-1.previous.log",
    "peaks.json",
    "ports.json",
    "pressure.json",
    "processes/ID.json",
    "proxy/control.lock",
    "proxy/control.sock",
    "proxy/handover.sock",
    "weights/access/ID.json",
    "weights/objects/ID/.manifest.json",
    "weights/objects/ID/tiny.gguf",
    "weights/sources/ID.json",
    "weights/sources/ID.json.lock",
}
"""All files that the previous version writes. A new file needs a test here of its content after an update."""
MORE_THAN_ANY_HOST_HAS = 1 << 50
NEW_BUDGET = 2 * GIB


class Update:
    """One host, the agent of the previous version and its successor."""

    def __init__(self, bound_process: BoundProcess, files: FileServer, previous: PreviousVersion, old: Process) -> None:
        self.bound_process = bound_process
        self.files = files
        self.previous = previous
        self.old = old
        self.new = bound_process.host.agent

    async def serve(self, **changes: object) -> str:
        """Start the old agent and bind `chat-1` to it; return its URL."""
        self.old.start()
        await self.bind("chat-1", **changes)
        return await self.bound_process.ready()

    async def bind(self, name: str, **changes: object) -> None:
        await self.bound_process.bind(name, artifact={"source": f"{self.files.url}/tiny.gguf"}, **changes)

    async def look(self, name: str) -> None:
        """Bind a process that never fits: the running agent measures the use of all others before it decides."""
        await self.bind(name, memoryBytes=MORE_THAN_ANY_HOST_HAS)
        await self.bound_process.phase("Rejected", "InsufficientMemory", name)

    async def replace(self) -> None:
        """Start the new agent, and wait until it has decided on the bound processes and has reported its host."""
        self.new.argv.append(f"--memory-budget={NEW_BUDGET}")
        self.new.start()
        await self.look("after")

        async def reported() -> bool:
            return bool((await self.host_status())["budgetBytes"] == NEW_BUDGET)

        await eventually(reported)

    async def host_status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.bound_process.client.get(METAL_HOSTS, self.bound_process.host.name))[
            "status"
        ]
        return status

    @property
    def processes(self) -> set[psutil.Process]:
        """The engines and the proxy of this host."""
        return marked(self.bound_process.host.state_folder)

    @property
    def engines(self) -> set[psutil.Process]:
        """The engines of this host; a new version also brings another proxy."""
        return running_engines(self.bound_process.host.state_folder)

    @property
    def state_files(self) -> set[str]:
        return state_files(self.bound_process.host.state_folder)


class Seen(NamedTuple):
    """The facts that must be the same after an update."""

    engines: set[psutil.Process]
    status: dict[str, Any]
    slice: dict[str, Any]
    host: dict[str, Any]
    holder: str


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    async with FileServer(root, address=ADDRESS) as server:
        yield server


@pytest.fixture
async def update(
    idle_host: StartMetalHost, client: Client, namespace: str, files: FileServer, watched: list[Process]
) -> AsyncIterator[Update]:
    """Neither agent runs yet. The old one gives later ports than its successor would."""
    host = await idle_host("studio-1")
    previous = unpack()
    old = previous.agent(host, "--port-range=18500-18999")
    watched.append(old)
    yield Update(BoundProcess(client, namespace, host), files, previous, old)
    watched.remove(old)
    if old.running:
        await old.kill()


PASSING = {"lastExit", "tokensPerSecond", "requestsPerMinute", "averageLatencyMs"}


async def seen(update: Update) -> Seen:
    bound_process = update.bound_process
    status = (await bound_process.object())["status"]
    endpoints = await bound_process.slice()
    host = await update.host_status()
    lease = await bound_process.client.get(LEASES, bound_process.host.name, HOSTS_NAMESPACE)
    return Seen(
        engines=update.engines,
        # The exit of the previous engine is not kept on disk, and traffic is of the last minute.
        status={field: value for field, value in status.items() if field not in PASSING},
        # The generation counts changes: that of an endpoint that was withdrawn for a moment differs.
        slice={
            "endpoints": endpoints["endpoints"],
            "ports": endpoints["ports"],
            **{field: endpoints["metadata"][field] for field in ("uid", "generation")},
        },
        host={field: host[field] for field in ("address", "processes")},
        holder=lease["spec"]["holderIdentity"],
    )


async def ask_again_and_again(http: aiohttp.ClientSession, url: str) -> None:
    while True:
        # A server may close an idle connection while the client takes it up again: nothing was sent then.
        with contextlib.suppress(aiohttp.ClientConnectionResetError):
            assert await answers(http, url)


async def restarted(bound_process: BoundProcess, restarts: int) -> None:
    """Crash the engine, and wait until it was restarted `restarts` times in all."""
    os.kill(await bound_process.pid(), signal.SIGKILL)

    async def is_back() -> bool:
        status = await bound_process.status()
        return (status.phase, status.restarts) == ("Ready", restarts)

    await eventually(is_back)
    await bound_process.url()


@pytest.mark.parametrize("end", [Process.stop, Process.kill], ids=["SIGTERM", "SIGKILL"])
async def test_update_keeps_engine_proxy_and_endpoint(
    update: Update, http: aiohttp.ClientSession, end: Callable[[Process], Awaitable[None]]
) -> None:
    bound_process = update.bound_process
    url = await update.serve()
    await restarted(bound_process, 1)
    assert url.endswith(":18500")
    await update.look("before")
    assert all(map(update.previous.runs, update.processes))
    before = await seen(update)
    downloads = update.files.bytes_sent(".gguf")

    async with running(ask_again_and_again(http, url)):
        await end(update.old)
        assert update.state_files - {"agent.sock"} == STATE_FILES - {"pressure.json"}
        await update.replace()
    assert await seen(update) == before

    await restarted(bound_process, 2)
    assert await bound_process.url() == url
    assert await answers(http, url)
    assert update.files.bytes_sent(".gguf") == downloads
    (engine,) = update.engines - before.engines
    assert not update.previous.runs(engine)

    def is_proxy_gone() -> bool:
        # The previous one ends its last requests first.
        return not any(map(update.previous.runs, update.processes - update.engines))

    await eventually(is_proxy_gone)


async def test_evicted_process_waits_and_returns_after_update(update: Update) -> None:
    bound_process, level = update.bound_process, update.bound_process.host.level
    await update.serve()
    level.write_text("critical")
    await bound_process.phase("Pending", "MemoryPressure")
    assert update.engines == set()
    await update.old.stop()
    assert "pressure.json" in update.state_files <= STATE_FILES

    # The new agent learns of the pressure only from the state file of the old one.
    level.write_text("unknown")
    await update.replace()
    await bound_process.phase("Pending", "MemoryPressure")
    conditions = {condition["type"]: condition["status"] for condition in (await update.host_status())["conditions"]}
    assert conditions["MemoryPressure"] == "True"
    assert update.engines == set()
    level.write_text("normal")
    await bound_process.ready()

    async def returned() -> bool:
        events = (await bound_process.client.list(EVENTS, bound_process.namespace)).items
        return "Returning" in {event["reason"] for event in events}

    await eventually(returned)


async def test_host_that_boots_updated_without_api_server_serves_as_before(
    update: Update, plane: ControlPlane, http: aiohttp.ClientSession
) -> None:
    host = update.bound_process.host
    url = await update.serve()
    await host.host.kill_all()
    await update.old.wait()
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, host.name)
    config = json.loads(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://cluster.invalid:6443"
    kubeconfig.write_text(json.dumps(config))
    downloads = update.files.bytes_sent(".gguf")

    update.new.start()
    await eventually(lambda: answers_if_reachable(http, url))
    assert not any(map(update.previous.runs, update.processes))
    assert update.files.bytes_sent(".gguf") == downloads


async def test_up_of_previous_version_hands_over_to_agent(update: Update, tmp_path: Path) -> None:
    bound_process, host = update.bound_process, update.bound_process.host
    command = update.previous.command("up", f"--model={update.files.url}/tiny.gguf", f"--state-dir={host.state_folder}")
    up = Process("previous up", [*host.host.exec, *command], tmp_path / "up.log")
    up.start()

    def ready_record() -> dict[str, Any]:
        path = next((host.state_folder / "processes").glob("standalone-*.json"), None)
        record: dict[str, Any] = json.loads(path.read_text()) if path else {}
        return record if record.get("ready_at") else {}

    try:
        record = await eventually(ready_record)
        engines = update.engines
        update.new.start()
        assert await up.wait() == 0
    finally:
        if up.running:
            await up.kill()
    assert len(engines) == 1
    assert update.engines == engines
    ours = {"hostName": host.name, "serviceName": "chat", "tokenSecret": "chat-token"}
    # A record leaves out what is as by default.
    await bound_process.bind(**{"extraArgs": [], **record["spec"], **ours})
    await bound_process.ready()
    assert await bound_process.pid() == record["identity"]["pid"]
    assert update.engines == engines
