"""The agent as a service: its control socket, its exit codes, and the commands that install, look at and restart it.

launchd is a stand-in that runs the job as its plist says; the agent is real, and serves its last known assignments
because the API server is away.
"""

import asyncio
import json
import os
import plistlib
import shlex
import signal
import socket
import stat
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
import yaml
from click.testing import CliRunner, Result

from cli.main import main
from crds.meta import host_secret_key
from gateway.http.control_client import ControlUnreachableError
from launchd.service_definition import SUPERVISOR_VARIABLE
from metal_agent.assignments import LastKnownFile
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_control import AGENT_SOCKET
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import load_exit
from metal_agent.native.process import kill_strays
from tests.controlplane.process import CHECKOUT, Process
from tests.support.api_objects import GIB
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.launchctl_stand_in import OPEN_FILES, LaunchctlStandIn
from tests.support.live_processes import find_processes
from tests.support.pomona_with_launchd import build_managers, write_pomona
from tests.support.terminal import CTRL_C, Terminal, open_terminal
from tests.support.tiny_models import tiny_gguf

TOKEN = "host-token"
LONG = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1200, "stream": True}


class ServedHost:
    """The folders of a host with one assignment, and the ways to start its agent."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "state"
        self.model = tmp_path / "files" / "tiny.gguf"
        self.model.parent.mkdir()
        tiny_gguf.write(self.model, loop=True, n_ctx=8192)
        self.kubeconfig = tmp_path / "kubeconfig"
        entry = {
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(yaml.safe_dump(entry))
        self.options = (
            *("--name", "studio-1", "--kubeconfig", str(self.kubeconfig), "--address", "127.0.0.1"),
            *("--file-root", str(self.model.parent), "--metrics-address", "off", "--memory-budget", "8GiB"),
            *("--state-dir", str(self.folder)),
        )
        self.client = AgentClient(self.folder)

    def assign(self) -> None:
        spec = {
            "hostName": "studio-1",
            "serviceName": "chat",
            "modelName": "tiny",
            "runtime": "llama.cpp",
            "artifact": {"source": f"file://{self.model}"},
            "memoryBytes": GIB,
            "tokenSecret": "chat-token",
            "contextLength": 4096,
            "extraArgs": ["-t", "1"],
        }
        process = {"metadata": {"name": "chat-1", "namespace": "team-a", "uid": "u1"}, "spec": spec}
        secret = {host_secret_key("team-a", "chat-token"): b64encode(TOKEN.encode()).decode()}
        LastKnownFile(self.folder / "assignments.json").save([process], secret)

    def engines(self) -> list[int]:
        return [process.pid for process in find_processes(str(self.model))]

    async def status(self) -> AgentStatus:
        """Return the status of the agent as soon as one answers."""

        async def answer() -> AgentStatus:
            try:
                return await self.client.status()
            except ControlUnreachableError as error:
                raise LookupError(str(error)) from error

        return await eventually(answer)

    async def ready(self) -> None:
        """Wait until the agent says that the engine answers, also one whose network this test cannot reach."""

        async def is_ready() -> bool:
            return [process.phase for process in (await self.status()).processes] == ["Ready"]

        await eventually(is_ready)

    async def served(self) -> str:
        """Wait until the service answers, by its engine and its proxy; return its URL."""
        await self.ready()
        port = await eventually(lambda: json.loads((self.folder / "ports.json").read_text())["team-a/chat"])
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        async def is_answered() -> bool:
            with suppress(aiohttp.ClientError):
                async with session() as http, http.post(url, json=LONG | {"max_tokens": 1}) as response:
                    return response.status == 200
            return False

        await eventually(is_answered)
        return url


@pytest.fixture
async def served_host(tmp_path: Path) -> AsyncIterator[ServedHost]:
    host = ServedHost(tmp_path)
    yield host
    await kill_strays(host.folder, ())


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})


def agent(host: ServedHost, tmp_path: Path, *options: str, supervisor: str = "") -> Process:
    argv = [sys.executable, "-m", "tests.support.agent_on_loopback", "agent", *(options or host.options)]
    return Process("agent", argv, tmp_path / "terminal.log", {SUPERVISOR_VARIABLE: supervisor})


async def test_stop_finishes_requests_and_ends_engines_proxy_and_agent(served_host: ServedHost, tmp_path: Path) -> None:
    served_host.assign()
    process = agent(served_host, tmp_path)
    process.start()
    try:
        url = await served_host.served()
        path = served_host.folder / AGENT_SOCKET
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as hanging:
            hanging.connect(str(path))
            hanging.sendall(b"GET /sta")
            async with session() as http, http.post(url, json=LONG) as stream:
                assert stream.status == 200
                await stream.content.readline()
                (engine,) = served_host.engines()
                os.kill(engine, signal.SIGSTOP)  # the request lasts until the status is read, however long that takes
                assert await served_host.client.stop() == process.pid

                async def is_stopping() -> bool:
                    status = await served_host.status()
                    return status.stopping and [process.phase for process in status.processes] == ["Stopping"]

                await eventually(is_stopping)
                os.kill(engine, signal.SIGCONT)
                assert (await stream.content.read()).rstrip().endswith(b"data: [DONE]"), "it was let to its end"
        assert await process.wait() == 0
        assert served_host.engines() == []
        assert find_processes(str(served_host.folder / "proxy" / "control.sock")) == []
        assert not path.exists()
        ended = load_exit(served_host.folder)
        assert ended
        assert (ended.code, "on request" in ended.message) == (0, True)
    finally:
        if process.running:
            await process.kill()


async def test_exit_code_says_whether_a_restart_may_help(served_host: ServedHost, tmp_path: Path) -> None:
    missing = ("--name", "studio-1", "--kubeconfig", str(tmp_path / "none"), "--state-dir", str(served_host.folder))
    for supervisor, expected in (("", 78), ("systemd", 78), ("launchd", 0)):
        process = agent(served_host, tmp_path, *missing, supervisor=supervisor)
        process.start()
        assert await process.wait() == expected
        ended = load_exit(served_host.folder)
        assert ended
        assert (ended.code, "no such file" in ended.message) == (78, True)
    first = agent(served_host, tmp_path)
    first.start()
    try:
        await eventually((served_host.folder / AGENT_SOCKET).exists)
        await eventually(lambda: load_exit(served_host.folder) is None)  # it runs again
        second = agent(served_host, tmp_path)
        second.start()
        assert await second.wait() == 75
        assert "another agent" in second.tail(5)
        # The socket of an agent that was killed is replaced by the next one.
        await first.kill()
        assert (served_host.folder / AGENT_SOCKET).exists()
        third = agent(served_host, tmp_path, supervisor="systemd")
        third.start()

        first = third
        await eventually(lambda: third.running and _connects(served_host.folder / AGENT_SOCKET))
        assert (await served_host.status()).pid == third.pid
        assert await third.stop() == 143, "whoever sends SIGTERM, the service manager starts it again"
    finally:
        if first.running:
            await first.kill()


class InstalledAgent:
    """An agent that the stand-in of launchd keeps, and the commands about it."""

    def __init__(self, tmp_path: Path, host: ServedHost) -> None:
        self._managers = build_managers(tmp_path)
        self.launchctl = LaunchctlStandIn(tmp_path / "launchd")
        self.manager = self._managers.user
        self._install = ("install", "--user", *host.options)

    async def run(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, main, ["agent", *words], obj=self._managers)

    async def install(self) -> str:
        done = await self.run(*self._install)
        assert done.exit_code == 0, done.output
        return done.output


@pytest.fixture
async def installed(served_host: ServedHost, tmp_path: Path) -> AsyncIterator[InstalledAgent]:
    served_host.assign()
    agent = InstalledAgent(tmp_path, served_host)
    try:
        assert "agent studio-1 runs as process" in await agent.install()
        yield agent
    finally:
        agent.launchctl.end()


async def test_installed_agent_comes_back_with_its_engines(installed: InstalledAgent, served_host: ServedHost) -> None:
    assert "bootstrap user/501" in "\n".join(installed.launchctl.calls()), "there is no login at the screen"
    await served_host.served()
    engines, first = served_host.engines(), await served_host.status()
    limits = [psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] for pid in (first.pid, *engines)]
    assert min(limits) > OPEN_FILES, "each connection of a client takes two"
    await installed.install()
    assert (await served_host.status()).pid == first.pid, "nothing has changed"
    os.kill(first.pid, signal.SIGKILL)
    await eventually(lambda: (installed.manager.read_state().runs or 0) > 1)
    await served_host.served()
    restarted = await installed.run("restart")
    assert restarted.exit_code == 0, restarted.output
    await served_host.served()
    assert len({first.pid, (await served_host.status()).pid}) == 2
    assert served_host.engines() == engines

    shown = await installed.run("status")
    assert (shown.exit_code, "unreachable since" in shown.output) == (1, True), "there is no API server"
    assert "user/501/dev.pomona.agent is running" in shown.output
    report = json.loads((await installed.run("status", "-o", "json")).output)
    assert [process["phase"] for process in report["agent"]["processes"]] == ["Ready"]
    assert report["service"]["manager"] == "launchd"
    assert "agent_started" in (await installed.run("logs")).output
    assert "llama" in (await installed.run("logs", "--engine", "chat")).output
    assert "there are: chat-1" in (await installed.run("logs", "--engine", "other")).output


async def test_definition_of_another_version_is_written_anew_with_the_same_options(
    installed: InstalledAgent, served_host: ServedHost, tmp_path: Path
) -> None:
    await served_host.served()
    engines, first, path = served_host.engines(), await served_host.client.status(), installed.manager.definition_path
    written = path.read_bytes()
    keys = plistlib.loads(written)
    del keys["ExitTimeOut"]
    path.write_bytes(plistlib.dumps(keys))
    (tmp_path / "python3").touch()  # beside the program, as in an environment
    findings = json.loads((await installed.run("doctor", "-o", "json")).output)
    assert f"{path} was written by another version of Pomona" in [finding["found"] for finding in findings]
    restarted = await installed.run("restart")
    assert restarted.exit_code == 0, restarted.output
    assert path.read_bytes() == written
    await served_host.served()
    assert (await served_host.client.status()).pid != first.pid
    assert served_host.engines() == engines


async def test_stopped_agent_stays_down_and_uninstall_leaves_only_the_folder(
    installed: InstalledAgent, served_host: ServedHost
) -> None:
    url = await served_host.served()
    done = await installed.run("stop")
    assert done.exit_code == 0, done.output
    assert served_host.engines() == []
    stopped = await installed.run("status")
    assert (stopped.exit_code, "on request" in stopped.output) == (1, True)
    await eventually(lambda: installed.manager.read_state().phase == "stopped")
    done = await installed.run("restart")
    assert done.exit_code == 0, done.output
    assert await served_host.served() == url
    async with session() as http, http.post(url, json=LONG | {"max_tokens": 3, "stream": False}) as response:
        assert response.status == 200

    served_host.kubeconfig.rename(served_host.kubeconfig.with_suffix(".away"))
    failed = await installed.run("restart")
    assert (failed.exit_code, "no such file" in failed.output) == (1, True), failed.output
    assert installed.manager.read_state().phase == "stopped", "no restart mends it"
    assert len(served_host.engines()) == 1, "they do not need the agent"
    served_host.kubeconfig.with_suffix(".away").rename(served_host.kubeconfig)
    assert (await installed.run("restart")).exit_code == 0
    await served_host.served()

    removed = await installed.run("uninstall")
    assert removed.exit_code == 0, removed.output
    assert "everything is stopped" in removed.output
    assert served_host.engines() == []
    assert not installed.manager.definition_path.exists()
    assert installed.manager.read_state().phase == "absent"
    assert (served_host.folder / "assignments.json").exists()


async def test_commands_of_document_look_after_the_agent_word_for_word(served_host: ServedHost, tmp_path: Path) -> None:
    """Those of docs/mac.md, with the options of this host. `make test-systemd` installs as root, and restarts
    onto another version."""
    section = (CHECKOUT / "docs" / "mac.md").read_text().partition("## 5. Keep the agent running")[2]
    for_all, install, look_after, upgrade, uninstall = list_blocks(section.partition("\n## ")[0])
    assert for_all == "sudo ~/.local/bin/pomona agent install\n"
    assert upgrade.startswith("git pull && uv tool upgrade pomona && pomona agent restart")
    status, logs, restart, stop = look_after.splitlines()
    shell = HostShell(tmp_path)
    served_host.assign()
    try:
        assert "agent studio-1 runs as process" in await shell.run(
            f"{install.strip()} {shlex.join(served_host.options)}"
        )
        await served_host.served()
        engines, first = served_host.engines(), await served_host.status()
        assert "chat" in await shell.run(status, code=1), "without an API server it is not well"
        assert "Traceback" not in await shell.follow(logs, "agent_started")
        engine_log = logs.partition("# or ")[2].partition(",")[0]
        assert "llama" in await shell.run(f"pomona agent logs {engine_log}")
        await shell.run(restart)
        assert (await served_host.status()).pid != first.pid
        await served_host.served()
        assert served_host.engines() == engines
        await shell.run(stop)
        assert served_host.engines() == []
        await shell.run(restart)
        await served_host.served()
        await shell.run(uninstall)
        assert served_host.engines() == []
    finally:
        LaunchctlStandIn(tmp_path / "launchd").end()


class HostShell:
    """Commands typed on the host, whose `sudo` has nothing to do, because the service is the user's own."""

    def __init__(self, folder: Path) -> None:
        programs = folder / ".local" / "bin"
        programs.mkdir(parents=True)
        write_pomona(programs / "pomona", folder)
        (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (programs / "sudo").chmod(0o755)
        self._folder = folder
        self._environment = {**os.environ, "HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}

    async def run(self, command: str, code: int = 0) -> str:
        """Return what a command shows, after it has ended with `code`."""
        async with self._open(command) as terminal:
            assert await terminal.end() == code, terminal.output
            return terminal.output

    async def follow(self, command: str, text: str) -> str:
        """Return what a command shows that goes on until Ctrl-C, which is typed after `text`."""
        async with self._open(command) as terminal:
            await terminal.wait_for(text)
            terminal.type(CTRL_C)
            await terminal.end()
            return terminal.output

    def _open(self, command: str) -> AbstractAsyncContextManager[Terminal]:
        return open_terminal(("sh", "-c", command), self._folder, self._environment)


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
