"""systemd's view of the agent, from what `systemctl show` prints; tests/systemd has a real one."""

from pathlib import Path

import pytest

from launchd.service_definition import UNIT, ServiceDefinition
from launchd.service_manager import ServiceError, ServicePhase
from launchd.systemd import Systemd

RUNS = (
    "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\nNRestarts=2\nResult=success\nExecMainStatus=0"
)
FAILED = (
    "LoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0\nNRestarts=0\nResult=exit-code\nExecMainStatus=78"
)
WAITS = "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nMainPID=0\nNRestarts=1\nResult=exit-code"


def make_systemd(folder: Path, output: str, code: int = 0, failing: str = "") -> Systemd:
    (folder / "output").write_text(output)
    program = folder / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\ncat {folder}/output\n'
        f'test "$2" != "{failing}" || exit 1\nexit {code}\n'
    )
    program.chmod(0o755)
    return Systemd(folder, user=True, program=str(program))


@pytest.mark.parametrize(
    ("output", "phase", "pid", "runs", "last_exit"),
    [
        (RUNS, "running", 7, 3, None),
        (FAILED, "stopped", None, 1, "78 (exit-code)"),
        (WAITS, "starting", None, 2, "? (exit-code)"),
        ("LoadState=not-found\nActiveState=inactive\nMainPID=0", "absent", None, None, "? (?)"),
        ("", "absent", None, None, "? (?)"),
    ],
)
def test_state_of_the_unit_is_read(
    tmp_path: Path, *, output: str, phase: ServicePhase, pid: int | None, runs: int | None, last_exit: str | None
) -> None:
    state = make_systemd(tmp_path, output).read_state()
    assert (state.phase, state.pid, state.runs, state.last_exit) == (phase, pid, runs, last_exit)
    assert (tmp_path / "calls").read_text().startswith(f"--user show {UNIT} ")


def test_refusal_has_the_words_of_systemctl(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"restart pomona-agent\.service ended with 4: Unit not found"):
        make_systemd(tmp_path, "Unit not found.\n", 4).restart()


def test_user_without_a_session_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"No medium found: log in as this user, or call `sudo loginctl"):
        make_systemd(tmp_path, "Failed to connect to bus: No medium found\n", 1).restart()


def test_install_that_failed_is_made_good_by_the_next_one(tmp_path: Path) -> None:
    def define(name: str) -> ServiceDefinition:
        return ServiceDefinition(("/x", "--name", name), None, tmp_path, tmp_path / "output")

    def install(name: str, failing: str = "") -> list[str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        try:
            make_systemd(tmp_path, RUNS, failing=failing).install(define(name))
        except ServiceError:
            assert failing
        return [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()]

    replaced = ["show", "stop", "daemon-reload", "enable", "restart"]
    assert install("a") == replaced
    assert install("b", failing="stop") == ["show", "stop"]
    assert install("b") == replaced, "the old agent would go on with the old options"
    assert install("b") == ["show"], "nothing has changed"


def test_absent_unit_is_not_removed_twice(tmp_path: Path) -> None:
    make_systemd(tmp_path, "").uninstall()
    assert not (tmp_path / "calls").exists()
