"""`pomona agent upgrade`: what an interrupted or failed upgrade leaves; service manager and installer are stand-ins."""

import fcntl
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.agent import agent_service, restart
from cli.agent import upgrade as upgrade_command
from cli.agent.agent_service import ServiceManagers
from cli.agent.upgrade import keep_packages, restore_packages
from launchd.service_definition import ServiceDefinition
from launchd.service_manager import ServicePhase, ServiceState
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import PERMANENT, AgentExit, save_exit
from tests.unit.cli.test_agent_service import ManagerStandIn, status

Upgrade = Callable[..., Result]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    write(folder, "good")
    return folder


def write(packages: Path, content: str) -> None:
    """Replace the only module, as installers do: they never change a file in place."""
    module = packages / "pomona.py"
    module.unlink(missing_ok=True)
    module.write_text(content)


def read(packages: Path) -> str:
    return (packages / "pomona.py").read_text()


@pytest.fixture
def upgrade(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upgrade:
    """Run the command with an installer that writes "bad", then calls `after_install`."""
    program = tmp_path / "pomona"
    arguments = (str(program), "agent", "--state-dir", str(tmp_path / "state"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(packages))
    monkeypatch.setattr(upgrade_command, "refuse_environment", lambda _: None)

    def run(manager: ManagerStandIn, after_install: Callable[[], None] = lambda: None) -> Result:
        def install(_source: str) -> None:
            write(packages, "bad")
            after_install()

        monkeypatch.setattr(upgrade_command, "install_version", install)
        manager.definition = ServiceDefinition(arguments, None, tmp_path, tmp_path / "output")
        managers = ServiceManagers(manager, ManagerStandIn(tmp_path), program)
        return CliRunner().invoke(upgrade_command.command, ["--from", "x"], obj=managers)

    return run


def test_packages_that_were_kept_are_put_back(packages: Path, tmp_path: Path) -> None:
    kept = keep_packages(packages)
    write(packages, "bad")
    (packages / "other.py").touch()
    restore_packages(packages, kept)
    assert [path.name for path in packages.iterdir()] == ["pomona.py"]
    assert read(packages) == "good"
    assert list(tmp_path.iterdir()) == [packages]


def test_upgrade_after_an_interrupted_one_begins_with_the_version_before(packages: Path) -> None:
    keep_packages(packages)
    write(packages, "half of bad")  # and here the power fails
    kept = keep_packages(packages)
    assert read(packages) == "good"
    write(packages, "bad")
    restore_packages(packages, kept)
    assert read(packages) == "good"


def test_copy_that_was_interrupted_is_not_taken_for_the_version_before(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_source: str, _target: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(KeyboardInterrupt):
            keep_packages(packages)
    keep_packages(packages)
    assert read(packages) == "good"


def test_file_that_may_not_be_linked_is_copied(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_source: str, _target: str) -> None:
        raise PermissionError("a file of root's, where protected_hardlinks is set")

    monkeypatch.setattr(os, "link", refuse)
    kept = keep_packages(packages)
    write(packages, "bad")
    restore_packages(packages, kept)
    assert read(packages) == "good"


def test_version_that_could_not_be_removed_does_not_prevent_the_way_back(packages: Path) -> None:
    left = packages.with_name(f"{packages.name}.discarded")
    left.mkdir()
    (left / "file").touch()
    kept = keep_packages(packages)
    write(packages, "bad")
    restore_packages(packages, kept)
    assert read(packages) == "good"


def test_interrupted_installer_leaves_the_version_before(upgrade: Upgrade, packages: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert upgrade(ManagerStandIn(tmp_path), interrupt).exit_code == 1
    assert read(packages) == "good"


def test_two_upgrades_at_once_are_refused(upgrade: Upgrade, packages: Path, tmp_path: Path) -> None:
    descriptor = os.open(packages.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        result = upgrade(ManagerStandIn(tmp_path))
    finally:
        os.close(descriptor)
    assert "another upgrade" in result.output
    assert read(packages) == "good"


class SimulatedService(ManagerStandIn):
    """A service of the system: the agent ends at SIGTERM, and its manager starts what is installed then."""

    def __init__(self, folder: Path, packages: Path) -> None:
        super().__init__(folder, needs_root=True)
        self._packages = packages
        self.now = 0.0
        self.runs = 1
        self.phase: ServicePhase = "running"
        self.pid = 100
        self.version = "good"
        self.bad = "permanent error"
        self.starts_at = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.phase == "starting" and self.now >= self.starts_at:
            self.start()

    def start(self) -> None:
        self.runs, self.version, self.phase = self.runs + 1, read(self._packages), "running"
        self.pid = 99 + self.runs
        if self.version == "bad" and self.bad == "permanent error":
            save_exit(self.definition_path.parent, AgentExit(PERMANENT, "option X is gone", "2026-11-24T00:00:00Z"))
            self.pid, self.phase = None, "stopped"
        elif self.version == "bad" and self.bad == "crash":
            self.end()

    def end(self) -> None:
        self.pid, self.phase, self.starts_at = None, "starting", self.now + 10

    def kill(self, pid: int, _number: int) -> None:
        assert pid == self.pid
        self.end()

    def read_state(self) -> ServiceState:
        return ServiceState("launchd", "system/x", "/x", self.phase, self.pid, self.runs)

    def read_status(self, _folder: Path) -> AgentStatus | None:
        return status(pid=self.pid, version=self.version, ready=self.version == "good") if self.pid else None


@pytest.fixture
def service(tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedService:
    simulated = SimulatedService(tmp_path, packages)
    for module in (agent_service, restart):
        monkeypatch.setattr(module, "read_status", simulated.read_status)
    monkeypatch.setattr(agent_service, "time", simulated)
    monkeypatch.setattr(upgrade_command, "find_folder", lambda *_: tmp_path)
    monkeypatch.setattr(os, "kill", simulated.kill)
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    return simulated


def test_rollback_of_a_system_service_that_stays_down_says_why_and_what_to_do(
    upgrade: Upgrade, service: SimulatedService, packages: Path
) -> None:
    result = upgrade(service)
    assert "the agent ended: option X is gone" in result.output
    assert "agent restart`" in result.output
    assert "run `sudo " in result.output
    assert read(packages) == "good"


@pytest.mark.parametrize(("bad", "reason"), [("crash", "the agent ended"), ("never ready", "is not ready within 20 s")])
def test_rollback_of_a_system_service_is_done_before_the_lease_expires(
    upgrade: Upgrade, service: SimulatedService, packages: Path, bad: str, reason: str
) -> None:
    service.bad = bad
    result = upgrade(service)
    assert reason in result.output
    assert "version good is back, and runs as process" in result.output
    assert service.version == "good"
    assert read(packages) == "good"


def test_version_that_crashes_after_it_was_ready_is_taken_back(
    upgrade: Upgrade, service: SimulatedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_status(_folder: Path) -> AgentStatus | None:
        if service.version == "bad" and service.pid and service.now - service.starts_at >= 1:
            service.end()
        return status(pid=service.pid, version=service.version) if service.pid else None

    monkeypatch.setattr(agent_service, "read_status", read_status)
    service.bad = "crash later"
    result = upgrade(service)
    assert "the agent ended" in result.output
    assert "version good is back" in result.output


def test_good_version_is_taken(upgrade: Upgrade, service: SimulatedService, packages: Path, tmp_path: Path) -> None:
    result = upgrade(service, lambda: write(packages, "good"))
    assert result.exit_code == 0, result.output
    assert "runs as process 101" in result.output
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"site-packages"}
