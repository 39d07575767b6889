"""`pomona agent upgrade`: what an interrupted or failed upgrade leaves; service manager and installer are stand-ins."""

import fcntl
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.agent import upgrade as upgrade_command
from cli.agent.agent_service import ServiceManagers
from cli.agent.upgrade import keep_packages, restore_packages
from launchd.service_definition import ServiceDefinition
from tests.unit.cli.test_agent_service import ManagerStandIn

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
