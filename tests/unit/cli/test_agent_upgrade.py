"""`pomona agent upgrade`: what an interrupted or failed upgrade leaves; service manager and installer are stand-ins."""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner, Result

from cli.agent import agent_service, restart, trial_environment
from cli.agent import upgrade as upgrade_command
from cli.agent.agent_service import ServiceManagers
from cli.agent.trial_environment import TrialEnvironment, exchange_folders
from launchd.service_definition import ServiceDefinition
from launchd.service_manager import ServicePhase, ServiceState
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import PERMANENT, AgentExit, save_exit
from tests.unit.cli.test_agent_service import ManagerStandIn, status

Upgrade = Callable[..., Result]
STEPS = (
    (os, ("chmod", "kill", "link", "mkdir", "rename", "replace", "rmdir", "sync", "unlink")),
    (Path, ("touch", "write_bytes", "write_text")),
    (shutil, ("copy2",)),
    (trial_environment, ("exchange_folders",)),
)
"""Each call that changes the disk, and the signal that restarts the agent."""


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment with two modules and a script of one version."""
    folder = tmp_path / "environment"
    (folder / "lib" / "packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").touch()
    write(folder, "good")
    return folder


def write(prefix: Path, content: str) -> None:
    """Replace the modules and the script, as installers do: they never change a file in place."""
    for name in ("lib/packages/pomona.py", "lib/packages/dependency.py"):
        (prefix / name).unlink(missing_ok=True)
        (prefix / name).write_text(content)
    script = prefix / "bin" / "pomona"
    script.unlink(missing_ok=True)
    script.write_text(f"#!{prefix}/bin/python\n{content}")
    script.chmod(0o755)


def read(prefix: Path) -> str:
    """Return the version in the environment, which must be there as a whole."""
    found = {(prefix / "lib" / "packages" / name).read_text() for name in ("pomona.py", "dependency.py")}
    assert len(found) == 1, "half of a version"
    script = prefix / "bin" / "pomona"
    assert script.read_text().startswith(f"#!{prefix}/bin/python\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    return found.pop()


def list_folders(prefix: Path) -> set[str]:
    """Return the names in all folders of the environment."""
    return {path.name for path in prefix.rglob("*")}


COMPLETE = {"lib", "packages", "pomona.py", "dependency.py", "bin", "pomona", "pyvenv.cfg"}


@pytest.fixture
def upgrade(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upgrade:
    """Run the command with an installer that writes "bad", then calls `after_install` with the environment."""
    arguments = (str(tmp_path / "pomona"), "agent", "--state-dir", str(tmp_path / "state"))
    monkeypatch.setattr(upgrade_command, "find_environment", lambda: (prefix, prefix / "lib" / "packages"))
    monkeypatch.setattr(upgrade_command, "refuse_environment", lambda _: None)
    write_program(tmp_path, "exit 2")  # a version that has no definition to update

    def run(
        manager: ManagerStandIn, after_install: Callable[[Path], None] = lambda _: None, program: str = arguments[0]
    ) -> Result:
        def install(_source: str, environment: Path) -> None:
            write(environment, "bad")
            after_install(environment)

        monkeypatch.setattr(upgrade_command, "install_version", install)
        manager.definition = ServiceDefinition((program, *arguments[1:]), None, tmp_path, tmp_path / "output")
        managers = ServiceManagers(manager, ManagerStandIn(tmp_path), Path(arguments[0]))
        return CliRunner().invoke(upgrade_command.command, ["--from", "x"], obj=managers)

    return run


def write_program(folder: Path, script: str) -> None:
    """Write the program that the upgrade leaves."""
    program = folder / "pomona"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_version_that_was_taken_is_undone(prefix: Path) -> None:
    trial = TrialEnvironment(prefix, prefix / "lib" / "packages")
    trial.make_copy()
    write(trial.copy, "bad")
    (trial.copy / "lib" / "packages" / "other.py").touch()
    assert read(prefix) == "good"
    trial.take_copy()
    assert read(prefix) == "bad"
    trial.undo()
    assert read(prefix) == "good"
    assert list_folders(prefix) == COMPLETE


def test_long_program_is_linked_and_a_short_one_is_not_changed_in_place(prefix: Path) -> None:
    program = prefix / "bin" / "long"
    program.write_bytes(b"x" * 2_000_000)
    trial = TrialEnvironment(prefix, prefix / "lib" / "packages")
    trial.make_copy()
    assert (trial.copy / "bin" / "long").samefile(program)
    assert not (trial.copy / "bin" / "pomona").samefile(prefix / "bin" / "pomona")


def test_file_that_may_not_be_linked_is_copied(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_source: str, _target: str) -> None:
        raise PermissionError("a file of root's, where protected_hardlinks is set")

    monkeypatch.setattr(os, "link", refuse)
    trial = TrialEnvironment(prefix, prefix / "lib" / "packages")
    trial.make_copy()
    trial.take_copy()
    assert read(prefix) == "good"


def test_file_system_that_cannot_exchange_folders_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot exchange it with"):
        exchange_folders(tmp_path, tmp_path / "none")


def test_interrupted_installer_leaves_the_previous_version(upgrade: Upgrade, prefix: Path, tmp_path: Path) -> None:
    def interrupt(_environment: Path) -> None:
        raise KeyboardInterrupt

    assert upgrade(ManagerStandIn(tmp_path), interrupt).exit_code == 1
    assert read(prefix) == "good"


def test_two_upgrades_at_once_are_refused(upgrade: Upgrade, prefix: Path, tmp_path: Path) -> None:
    descriptor = os.open(prefix / "lib", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        result = upgrade(ManagerStandIn(tmp_path))
    finally:
        os.close(descriptor)
    assert "another upgrade" in result.output
    assert read(prefix) == "good"


@pytest.mark.parametrize(
    ("platform", "function", "working_folder"), [("darwin", "renameatx_np", -2), ("linux", "renameat2", -100)]
)
def test_folders_are_exchanged_by_the_call_of_the_system(
    platform: str, function: str, working_folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RENAME_SWAP of macOS has the value of RENAME_EXCHANGE, and AT_FDCWD another one."""
    library = mock.Mock(**{f"{function}.return_value": 0})
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        exchange_folders(Path("/a"), Path("/b"))
    assert library.mock_calls == [getattr(mock.call, function)(working_folder, b"/a", working_folder, b"/b", 2)]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, ""),
        ({"base": "/venv"}, "is not an environment of Pomona's own"),
        ({"uid": 501}, "run this command as"),
        ({"is_writable": False}, "run this command as"),
        ({"origin": '{"url": "file:///pomona", "dir_info": {"editable": true}}'}, "out of the checkout file:///pomona"),
    ],
)
def test_environment_that_cannot_be_upgraded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], refusal: str
) -> None:
    given = {"base": "/usr", "uid": os.geteuid(), "is_writable": True, "origin": None} | changes
    monkeypatch.setattr(sys, "prefix", "/venv")
    monkeypatch.setattr(sys, "base_prefix", given["base"])
    monkeypatch.setattr(os, "geteuid", lambda: given["uid"])
    monkeypatch.setattr(os, "access", lambda *_: given["is_writable"])
    monkeypatch.setattr(metadata, "distribution", lambda _: mock.Mock(**{"read_text.return_value": given["origin"]}))
    with pytest.raises(click.ClickException, match=refusal) if refusal else contextlib.nullcontext():
        upgrade_command.refuse_environment(tmp_path)


def test_agent_of_another_installation_is_upgraded_by_its_own_program(upgrade: Upgrade, tmp_path: Path) -> None:
    program = f"{tmp_path}/other/pomona"
    result = upgrade(ManagerStandIn(tmp_path), program=program)
    assert f"upgrade with `{program} agent upgrade`" in result.output


class SimulatedService(ManagerStandIn):
    """A service of the system: the agent ends at SIGTERM, and its manager starts what is installed then."""

    def __init__(self, folder: Path, prefix: Path) -> None:
        super().__init__(folder, needs_root=True)
        self._prefix = prefix
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
        self.runs, self.version, self.phase = self.runs + 1, read(self._prefix), "running"
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
        return status(pid=self.pid, version=self.version, ready=self.version != "bad") if self.pid else None


@pytest.fixture
def service(tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedService:
    simulated = SimulatedService(tmp_path, prefix)
    for module in (agent_service, restart):
        monkeypatch.setattr(module, "read_status", simulated.read_status)
    monkeypatch.setattr(agent_service, "time", simulated)
    monkeypatch.setattr(upgrade_command, "find_folder", lambda *_: tmp_path)
    monkeypatch.setattr(os, "kill", simulated.kill)
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    return simulated


def test_agent_of_another_user_is_not_restarted(service: SimulatedService, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(click.ClickException, match="process 100 is the agent of another user"):
        restart.restart_agent(service, service.definition_path.parent)


def test_rollback_of_a_system_service_that_stays_down_says_why_and_what_to_do(
    upgrade: Upgrade, service: SimulatedService, prefix: Path
) -> None:
    result = upgrade(service)
    assert "the agent ended: option X is gone" in result.output
    assert "agent restart`" in result.output
    assert "run `sudo " in result.output
    assert read(prefix) == "good"


def test_agent_that_its_version_stopped_is_upgraded_for_root_to_start(
    upgrade: Upgrade, service: SimulatedService, prefix: Path
) -> None:
    service.pid, service.phase = None, "stopped"
    result = upgrade(service, lambda environment: write(environment, "new"))
    assert result.exit_code == 0, result.output
    assert "the version is installed: the agent is stopped" in result.output
    assert "run `sudo " in result.output
    assert read(prefix) == "new"
    assert list_folders(prefix) == COMPLETE


@pytest.mark.parametrize(("bad", "reason"), [("crash", "the agent ended"), ("never ready", "is not ready within 20 s")])
def test_rollback_of_a_system_service_is_done_before_the_lease_expires(
    upgrade: Upgrade, service: SimulatedService, prefix: Path, bad: str, reason: str
) -> None:
    service.bad = bad
    result = upgrade(service)
    assert reason in result.output
    assert "version good is restored, and runs as process" in result.output
    assert service.version == "good"
    assert read(prefix) == "good"


def test_version_that_crashes_after_it_was_ready_is_undone(
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
    assert "version good is restored" in result.output


def test_good_version_is_taken(upgrade: Upgrade, service: SimulatedService, prefix: Path) -> None:
    result = upgrade(service, lambda environment: write(environment, "good"))
    assert result.exit_code == 0, result.output
    assert "runs as process 101" in result.output
    assert read(prefix) == "good"
    assert list_folders(prefix) == COMPLETE


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("echo $@ is written anew", 0, "agent upgrade is written anew\n"),
        ("echo Error: no room >&2; exit 1", 1, "its definition of the service is not: no room\n"),
        ("exit 2", 0, ""),
    ],
)
def test_definition_is_updated_by_the_version_that_was_installed(
    upgrade: Upgrade, service: SimulatedService, script: str, code: int, expected: str
) -> None:
    def install(environment: Path) -> None:
        write(environment, "new")
        write_program(service.definition_path.parent, script)

    result = upgrade(service, install)
    assert (result.exit_code, service.version) == (code, "new"), result.output
    assert "runs as process 101" in result.output
    assert expected in result.output


def update(service: ManagerStandIn, tmp_path: Path) -> Result:
    program = tmp_path / "pomona"
    service.definition = ServiceDefinition(
        (str(program), "agent", "--state-dir", str(tmp_path)), None, tmp_path, tmp_path / "output"
    )
    managers = ServiceManagers(service, ManagerStandIn(tmp_path), program)
    return CliRunner().invoke(upgrade_command.command, [], obj=managers)


@pytest.mark.parametrize(
    ("is_outdated", "expected"),
    [(False, "is up to date"), (True, "agent.plist is of another version of Pomona: run `sudo ")],
)
def test_definition_of_the_system_is_left_to_root(
    service: SimulatedService, tmp_path: Path, *, is_outdated: bool, expected: str
) -> None:
    service.is_outdated = is_outdated
    result = update(service, tmp_path)
    assert result.exit_code == 0, result.output
    assert expected in result.output
    assert f"`sudo {tmp_path}/pomona agent upgrade`" in result.output or not is_outdated
    assert service.runs == 1, "nothing was written"


def fail_on_the_disk(_trial: TrialEnvironment) -> None:
    raise OSError(28, "No space left on device")


def test_previous_version_that_cannot_be_removed_is_named_and_the_new_one_runs(
    upgrade: Upgrade, service: SimulatedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialEnvironment, "confirm", fail_on_the_disk)
    result = upgrade(service, lambda environment: write(environment, "good"))
    assert (result.exit_code, "runs as process 101" in result.output) == (0, True)
    assert "the previous version stays in" in result.stderr


def test_previous_version_that_cannot_be_restored_is_reported(
    upgrade: Upgrade, service: SimulatedService, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_environment: Path) -> None:
        monkeypatch.setattr(TrialEnvironment, "undo", fail_on_the_disk)
        raise click.ClickException("no such wheel")

    result = upgrade(service, refuse)
    assert (result.exit_code, "cannot restore the previous version: [Errno 28]" in result.output) == (1, True)
    assert read(prefix) == "good"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_closed_terminal_interrupts_no_upgrade_and_a_request_to_end_undoes_it(
    upgrade: Upgrade, service: SimulatedService, prefix: Path, number: signal.Signals
) -> None:
    def install(environment: Path) -> None:
        write(environment, "new")
        signal.raise_signal(number)

    before = signal.getsignal(number)
    result = upgrade(service, install)
    assert (result.exit_code, read(prefix)) == ((0, "new") if number == signal.SIGHUP else (1, "good")), result.output
    assert list_folders(prefix) == COMPLETE
    assert signal.getsignal(number) is before


class DeathError(BaseException):
    """The process is dead: nothing that it would do after this has an effect."""


class Mortality:
    """A process that dies before its step `last`, a change of the disk or a signal."""

    def __init__(self, last: int) -> None:
        self._left = last

    def wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def step(*arguments: object, **named: object) -> object:
            self._left -= 1
            if self._left <= 0:
                raise DeathError
            return function(*arguments, **named)

        return step


def test_upgrade_that_is_killed_before_any_step_leaves_a_whole_version_and_the_next_one_mends_it(
    upgrade: Upgrade, service: SimulatedService, prefix: Path
) -> None:
    left: list[str] = []
    for last in itertools.count(1):
        version, again = f"{last}", f"{last} again"
        mortality = Mortality(last)
        before = read(prefix)
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in STEPS:
                for name in names:
                    patch.setattr(owner, name, mortality.wrap(getattr(owner, name)))
            try:
                done = upgrade(service, lambda environment, version=version: write(environment, version))
            except DeathError:
                done = None
        left.append(read(prefix))
        assert left[-1] in {before, version}
        if done:
            assert done.exit_code == 0, done.output
            break
        if service.phase == "starting":
            service.start()
        mended = upgrade(service, lambda environment, again=again: write(environment, again))
        assert mended.exit_code == 0, mended.output
        assert read(prefix) == again
        assert (prefix / "bin" / "pomona").read_text().endswith(again)
        assert list_folders(prefix) == COMPLETE
    assert len(left) > 20
    assert {version.endswith("again") for version in left[1:]} == {True, False}, "killed before and after the exchange"
