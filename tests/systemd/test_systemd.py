"""The agent as a unit of a real systemd: started again, or not, by its exit codes; engines outlive it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchd.service_definition import UNIT, ServiceDefinition
from launchd.systemd import render_unit
from metal_agent.exit_codes import load_exit
from metal_agent.native.log_files import AGENT_LOG
from tests.hosts.test_agent_service import ServedHost
from tests.support.eventually import eventually
from tests.systemd.nested_systemd import ADDRESS, NestedSystemd, find_obstacle

POMONA = Path(sys.prefix) / "bin" / "pomona"


def pomona(systemd: NestedSystemd, *words: str) -> subprocess.CompletedProcess[str]:
    return systemd.run(str(POMONA), "agent", *words)


def show(systemd: NestedSystemd, name: str) -> str:
    return systemd.run("systemctl", "show", UNIT, f"--property={name}", "--value").stdout.strip()


async def test_unit_keeps_the_agent_and_not_what_no_restart_mends(systemd: NestedSystemd, tmp_path: Path) -> None:
    host = ServedHost(tmp_path)
    host.assign()
    options = [ADDRESS if word == "127.0.0.1" else word for word in host.options]
    installed = pomona(systemd, "install", "--run-as", "root", *options)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert show(systemd, "NeedDaemonReload") == "no"
    await host.ready()
    engines = host.engines()
    assert engines

    kill_agent(systemd, signal.SIGKILL)
    await eventually(lambda: show(systemd, "NRestarts") == "1")
    await host.ready()
    restarted = pomona(systemd, "restart")
    assert restarted.returncode == 0, restarted.stderr
    await host.ready()
    assert host.engines() == engines, "the engine outlived two agents"
    changed = pomona(systemd, "install", "--run-as", "root", *options, "--port-range", "18000-18900")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert (show(systemd, "NeedDaemonReload"), show(systemd, "UnitFileState")) == ("no", "enabled")
    await host.ready()
    assert host.engines() == engines, "the engine outlived another unit"
    shown = pomona(systemd, "status")
    assert f"{UNIT} is running" in shown.stdout
    assert (shown.returncode, "unreachable since" in shown.stdout) == (1, True), "there is no API server"

    stopped = pomona(systemd, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert host.engines() == []
    await eventually(lambda: show(systemd, "ActiveState") == "inactive")
    assert pomona(systemd, "status").returncode == 1
    assert show(systemd, "ActiveState") == "inactive", "it stays down"

    host.kubeconfig.rename(tmp_path / "elsewhere")
    failed = pomona(systemd, "restart")
    assert failed.returncode == 1
    assert "no such file" in failed.stderr
    await eventually(lambda: show(systemd, "ActiveState") == "failed")
    assert show(systemd, "ExecMainStatus") == "78"
    (tmp_path / "elsewhere").rename(host.kubeconfig)

    assert pomona(systemd, "restart").returncode == 0
    await host.ready()
    kill_agent(systemd, signal.SIGTERM)
    await eventually(lambda: show(systemd, "NRestarts") != "0")
    await host.ready()
    assert load_exit(host.folder) is None
    removed = pomona(systemd, "uninstall")
    assert removed.returncode == 0, removed.stderr
    assert host.engines() == []
    assert show(systemd, "LoadState") == "not-found"


async def test_agent_tells_a_shutdown_from_a_restart_and_comes_back_after_the_start(
    systemd: NestedSystemd, tmp_path: Path
) -> None:
    host = ServedHost(tmp_path)
    host.assign()
    options = [ADDRESS if word == "127.0.0.1" else word for word in host.options]
    installed = pomona(systemd, "install", "--run-as", "root", *options)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    await host.ready()
    engines = host.engines()
    assert pomona(systemd, "restart").returncode == 0
    await host.ready()
    kill_agent(systemd, signal.SIGTERM)
    await eventually(lambda: show(systemd, "NRestarts") != "0")
    await host.ready()
    log = host.folder / "logs" / AGENT_LOG
    assert "machine_shuts_down" not in log.read_text()

    # As every way to power off or restart does; the stubs of the units go no further.
    started = systemd.run("systemctl", "start", "shutdown.target")
    assert started.returncode == 0, started.stderr
    assert show(systemd, "ActiveState") == "inactive"
    assert "machine_shuts_down" in log.read_text()
    assert host.engines() == engines, "they answer until systemd ends what is left"
    systemd.run("systemctl", "stop", "multi-user.target")
    systemd.run("systemctl", "start", "multi-user.target")
    await host.ready()
    assert pomona(systemd, "stop").returncode == 0


def kill_agent(systemd: NestedSystemd, number: signal.Signals) -> None:
    """Signal the agent from within its namespaces: its pid means another process in each other one."""
    done = systemd.run("sh", "-c", 'kill -s "$0" "$1"', number.name.removeprefix("SIG"), show(systemd, "MainPID"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("user", ["root", None])
def test_systemd_accepts_the_unit(tmp_path: Path, user: str | None) -> None:
    assert find_obstacle() == ""
    program = tmp_path / "a program with 100%"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    arguments = (str(program), "--state-dir", "/state $HOME", "100%")
    path = tmp_path / UNIT
    path.write_bytes(render_unit(ServiceDefinition(arguments, user, tmp_path, tmp_path / "output")))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--system" if user else "--user", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT in line]) == (0, [])
