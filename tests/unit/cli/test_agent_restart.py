"""`pomona agent restart` onto another version; the service manager is a stand-in, and time passes at once."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.agent import agent_service, restart
from cli.agent.agent_service import ServiceManagers
from launchd.service_definition import ServiceDefinition
from launchd.service_manager import ServicePhase, ServiceState
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import PERMANENT, AgentExit, save_exit
from tests.unit.cli.test_agent_service import ManagerStandIn, status


class SimulatedService(ManagerStandIn):
    """A service of the system whose agent of version "before" runs; `fault` is what its successor does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, needs_root=True)
        self.definition = ServiceDefinition(
            (str(folder / "pomona"), "agent", "--state-dir", str(folder)), None, folder, folder / "output"
        )
        self.now = 0.0
        self.runs = 1
        self.phase: ServicePhase = "running"
        self.pid: int | None = 100
        self.version = "before"
        self.fault = ""
        self.starts_at = 0.0
        self.written = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.phase == "starting" and self.now >= self.starts_at:
            self.start()

    def start(self) -> None:
        self.runs, self.version, self.phase = self.runs + 1, version("pomona"), "running"
        self.pid = 99 + self.runs
        if self.fault == "permanent error":
            save_exit(self.definition_path.parent, AgentExit(PERMANENT, "option X is gone", "2026-11-24T00:00:00Z"))
            self.pid, self.phase = None, "stopped"
        elif self.fault == "crash":
            self.end()

    def end(self) -> None:
        self.pid, self.phase, self.starts_at = None, "starting", self.now + 10

    def kill(self, pid: int, _number: int) -> None:
        assert pid == self.pid
        self.end()

    def install(self, definition: ServiceDefinition) -> None:
        self.definition, self.written = definition, self.written + 1
        self.start()

    def restart(self) -> None:
        self.start()

    def read_state(self) -> ServiceState:
        return ServiceState("launchd", "system/x", "/x", self.phase, self.pid, self.runs)

    def read_status(self, _folder: Path) -> AgentStatus | None:
        is_ready = self.version == "before" or self.fault != "never ready"
        return status(pid=self.pid, version=self.version, ready=is_ready) if self.pid else None


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedService:
    simulated = SimulatedService(tmp_path)
    for module in (agent_service, restart):
        monkeypatch.setattr(module, "read_status", simulated.read_status)
    monkeypatch.setattr(agent_service, "time", simulated)
    monkeypatch.setattr(os, "kill", simulated.kill)
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    return simulated


def run_restart(service: SimulatedService) -> Result:
    folder = service.definition_path.parent
    managers = ServiceManagers(service, ManagerStandIn(folder), folder / "pomona")
    return CliRunner().invoke(restart.command, [], obj=managers)


def test_owner_restarts_a_service_of_the_system(service: SimulatedService) -> None:
    result = run_restart(service)
    assert result.exit_code == 0, result.output
    assert "runs as process 101" in result.output


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("permanent error", "the agent ended: option X is gone"),
        ("crash", "the agent ended"),
        ("never ready", "is not ready within 60 s"),
    ],
)
def test_version_that_does_not_run_fails_with_the_reason_and_the_way_back(
    service: SimulatedService, fault: str, reason: str
) -> None:
    service.fault = fault
    result = run_restart(service)
    assert (result.exit_code, reason in result.output) == (1, True), result.output
    assert "`uv tool install 'pomona==before' && pomona agent restart`" in result.output


def test_same_version_has_no_way_back(service: SimulatedService) -> None:
    service.version, service.fault = f"{version('pomona')}+12345678", "permanent error"
    assert "uv tool install" not in run_restart(service).output


def test_agent_of_another_user_is_not_restarted(service: SimulatedService, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert "process 100 is the agent of another user" in run_restart(service).output


def test_stopped_service_of_the_system_is_roots_to_start(service: SimulatedService) -> None:
    service.pid, service.phase = None, "stopped"
    result = run_restart(service)
    assert (result.exit_code, "run `sudo " in result.output) == (1, True)
    assert service.runs == 1


@pytest.mark.parametrize("is_root", [True, False])
def test_definition_of_another_version_is_written_anew_or_left_to_root(
    service: SimulatedService, monkeypatch: pytest.MonkeyPatch, *, is_root: bool
) -> None:
    service.is_outdated = True
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 501)
    monkeypatch.delenv("SUDO_USER", raising=False)
    result = run_restart(service)
    assert result.exit_code == 0, result.output
    assert "runs as process 101" in result.output
    assert service.written == is_root
    hint = "agent.plist was written by another version of Pomona; to update it, run: sudo "
    assert (hint in result.output) == (not is_root)


def test_definition_of_another_installation_is_not_written(service: SimulatedService) -> None:
    service.is_outdated, service.needs_root = True, False
    assert service.definition
    other = ("/other/pomona", *service.definition.arguments[1:])
    service.definition = ServiceDefinition(other, None, Path("/"), Path("/output"))
    assert run_restart(service).exit_code == 0
    assert service.written == 0
