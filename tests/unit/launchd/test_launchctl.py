"""launchctl: its printed state as recorded, the decision after each exit code, and whole climbs on a stand-in."""

import os
import plistlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launchd.launchctl import Launchd
from launchd.launchctl_codes import CODES, explain_code
from launchd.launchctl_ladder import RULES, Climb, ClimbFailed, Goal, GoalReached, Rung, begin_climb, next_step
from launchd.print_output import JobState, read_job_state
from launchd.service_definition import LABEL, ServiceDefinition
from launchd.service_manager import CommandResult, ServiceError, is_written, run_command, write_definition
from tests.support.launchctl_stand_in import LaunchctlStandIn

FIXTURES = Path(__file__).parent / "fixtures"
PLIST = Path("/Library/LaunchDaemons/dev.pomona.agent.plist")
GUI, USER = "gui/501", "user/501"
RUNNING = "x = {\n\tstate = running\n\tpid = 7\n}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("print", JobState("running", 54109, 1, "(never exited)")),
        ("print_system_daemon_akd", JobState("running", 928, 1, "(never exited)")),
        ("print_gui_loginitem", JobState("not running", None, 1, "0")),
        ("print_crashloop_excerpt", JobState("spawn scheduled", None, 5282, "1")),
    ],
)
def test_recorded_state_is_read(name: str, expected: JobState) -> None:
    assert read_job_state((FIXTURES / f"{name}.txt").read_text()) == expected


@pytest.mark.parametrize("output", ["", "}", "{", "a = {\n}\n}\nstate = running", "\tpid = many"])
def test_unknown_output_is_unknown(output: str) -> None:
    assert not read_job_state(output).is_running


def test_signal_that_ended_the_job_is_read() -> None:
    """launchd prints it in the place of the exit code, or beside `(never exited)`: jetsam kills with 9."""
    printed = "x = {\n\tstate = spawn scheduled\n\truns = 2\n\tlast terminating signal = Killed: 9\n"
    for more in ("", "\tlast exit code = (never exited)\n"):
        assert read_job_state(f"{printed}{more}}}") == JobState("spawn scheduled", None, 2, "Killed: 9")


def test_state_of_a_nested_block_is_not_that_of_the_job() -> None:
    nested = "\tresource coalition = {\n\t\tstate = running\n\t\tpid = 9\n\t}\n"
    assert read_job_state(f"x = {{\n{nested}\tstate = not running\n}}") == JobState("not running")


def test_recorded_errors_have_a_remedy() -> None:
    rows = [line.split("\t") for line in (FIXTURES / "errors.txt").read_text().splitlines() if line[0] != "#"]
    for text, code, _ in rows:
        if code != "0":
            assert int(code) in CODES
            assert text in explain_code(int(code), text)


def climb(goal: Goal = Goal.LOAD, rung: Rung | None = None, domains: tuple[str, ...] = ("system",)) -> Climb:
    begun = begin_climb(goal, LABEL, PLIST, domains)
    return begun if rung is None else Climb(goal, LABEL, PLIST, domains, rung)


@pytest.mark.parametrize(
    ("rung", "code", "following"),
    [
        (Rung.ENABLE, 0, Rung.BOOTOUT),
        (Rung.BOOTOUT, 0, Rung.AWAIT_GONE),
        (Rung.BOOTOUT, 3, Rung.AWAIT_GONE),
        (Rung.BOOTOUT, 36, Rung.AWAIT_GONE),
        (Rung.BOOTOUT, 113, Rung.AWAIT_GONE),
        (Rung.AWAIT_GONE, 0, Rung.AWAIT_GONE),
        (Rung.AWAIT_GONE, 113, Rung.BOOTSTRAP),
        (Rung.BOOTSTRAP, 5, Rung.BOOTSTRAP),
        (Rung.BOOTSTRAP, 37, Rung.BOOTSTRAP),
        (Rung.BOOTSTRAP, 0, Rung.KICKSTART),
        (Rung.KICKSTART, 37, Rung.VERIFY),
        (Rung.RESTART, 0, Rung.VERIFY),
        (Rung.RESTART, 113, Rung.ENABLE),
    ],
)
def test_next_call_follows_from_the_exit_code(rung: Rung, code: int, following: Rung) -> None:
    step = next_step(climb(Goal.RESTART if rung is Rung.RESTART else Goal.LOAD, rung), code, "")
    assert isinstance(step, Climb)
    assert step.rung is following


@pytest.mark.parametrize(("rung", "code"), [(Rung.BOOTSTRAP, 119), (Rung.BOOTSTRAP, 122), (Rung.ENABLE, 1)])
def test_other_code_ends_the_climb_with_its_remedy(rung: Rung, code: int) -> None:
    step = next_step(climb(rung=rung), code, "said so")
    assert isinstance(step, ClimbFailed)
    assert CODES[code].remedy in step.message
    assert "said so" in step.message


@pytest.mark.parametrize("rung", [Rung.AWAIT_GONE, Rung.BOOTSTRAP, Rung.VERIFY])
def test_no_call_is_repeated_for_ever(rung: Rung) -> None:
    code = 5 if rung is Rung.BOOTSTRAP else 0
    step: Climb | GoalReached | ClimbFailed = climb(rung=rung)
    for _ in range(RULES[rung].tries):
        assert isinstance(step, Climb)
        step = next_step(step, code, "x = {\n\tstate = spawn scheduled\n\tlast exit code = 75\n}")
    assert isinstance(step, ClimbFailed)


def test_job_that_ended_for_good_is_not_waited_for() -> None:
    ended = "x = {\n\tstate = not running\n\tlast exit code = 0\n}"
    step = next_step(climb(rung=Rung.VERIFY), 0, ended)
    assert isinstance(step, Climb), "the first look may be before the start"
    assert isinstance(next_step(step, 0, ended), ClimbFailed)
    assert isinstance(next_step(step, 0, ended.replace("= 0", "= 75")), Climb), "launchd starts it again"


def test_program_that_launchd_cannot_start_is_told_from_one_that_ends() -> None:
    messages = []
    for last_exit in ("78: EX_CONFIG", "1"):
        step: Climb | GoalReached | ClimbFailed = climb(rung=Rung.VERIFY)
        while isinstance(step, Climb):
            step = next_step(step, 0, f"x = {{\n\tstate = spawn scheduled\n\tlast exit code = {last_exit}\n}}")
        assert isinstance(step, ClimbFailed)
        messages.append(step.message)
    assert "the program, the home folder or the folder of the log is missing" in messages[0]
    assert "see `pomona agent logs`" in messages[1]


def test_process_that_changes_between_two_looks_is_not_stable() -> None:
    step = next_step(climb(rung=Rung.VERIFY), 0, RUNNING)
    assert isinstance(step, Climb)
    changed = next_step(step, 0, RUNNING.replace("7", "8"))
    assert isinstance(changed, Climb)
    assert next_step(changed, 0, RUNNING.replace("7", "8")) == GoalReached("system")


def test_domain_of_the_screen_is_left_for_that_of_any_login() -> None:
    step = next_step(climb(rung=Rung.BOOTSTRAP, domains=(GUI, USER)), 125, "")
    assert isinstance(step, Climb)
    assert (step.rung, step.arguments) == (Rung.ENABLE, ("enable", f"{USER}/{LABEL}"))
    assert isinstance(next_step(climb(rung=Rung.BOOTSTRAP, domains=(USER,)), 125, ""), ClimbFailed)


def test_session_without_a_screen_is_left_also_if_its_code_is_another() -> None:
    begun = climb(rung=Rung.BOOTSTRAP, domains=(GUI, USER))
    assert next_step(begun, 134, "") == begin_climb(Goal.LOAD, LABEL, PLIST, (USER,))
    steps = list[object]([begun])
    while isinstance(last := steps[-1], Climb) and last.domains[0] == GUI:
        steps.append(next_step(last, 5, "Bootstrap failed: 5: Input/output error"))
    assert len(steps) == 7, "the job may still be ending: it is tried six times"
    assert steps[-1] == begin_climb(Goal.LOAD, LABEL, PLIST, (USER,))
    assert isinstance(next_step(climb(rung=Rung.BOOTSTRAP, domains=(USER,)), 134, ""), ClimbFailed)


def test_job_is_unloaded_from_both_domains() -> None:
    step = next_step(climb(Goal.UNLOAD, domains=(GUI, USER)), 113, "")
    assert isinstance(step, Climb)
    assert step.arguments == ("bootout", f"{USER}/{LABEL}")
    for code in (112, 113, 125):
        assert next_step(step, code, "") == GoalReached(USER)


@pytest.fixture
def launchctl(tmp_path: Path) -> Iterator[LaunchctlStandIn]:
    stand_in = LaunchctlStandIn(tmp_path / "launchd")
    yield stand_in
    stand_in.end()


@pytest.fixture
def manager(tmp_path: Path, launchctl: LaunchctlStandIn) -> Launchd:
    return Launchd((GUI, USER), tmp_path / "plists", str(launchctl.program), pause=lambda _: None)


def define(tmp_path: Path, *words: str) -> ServiceDefinition:
    arguments = (sys.executable, "-c", "import time; time.sleep(1000)", *words, "--state-dir", str(tmp_path))
    return ServiceDefinition(arguments, None, tmp_path, tmp_path / "output")


def test_job_is_loaded_replaced_and_removed(tmp_path: Path, launchctl: LaunchctlStandIn, manager: Launchd) -> None:
    launchctl.disable(f"{GUI}/{LABEL}")
    launchctl.fail_next("bootstrap", 5, 37)
    manager.install(define(tmp_path))
    first = manager.read_state()
    assert (first.phase, first.job) == ("running", f"{GUI}/{LABEL}")
    assert manager.definition_path.stat().st_mode & 0o777 == 0o644
    verbs = [call.split()[0] for call in launchctl.calls()]
    unload = ["bootout", "print"]
    assert verbs[:10] == [*unload, *unload, "enable", *unload, "bootstrap", "bootstrap", "bootstrap"]
    manager.install(define(tmp_path))
    assert manager.read_state().pid == first.pid, "nothing has changed"
    manager.install(define(tmp_path, "more"))
    assert manager.read_state().pid != first.pid
    assert plistlib.loads(manager.definition_path.read_bytes())["ProgramArguments"][3] == "more"
    manager.uninstall()
    assert manager.read_state().phase == "absent"
    assert not manager.definition_path.exists()
    assert manager.read_arguments() is None


def test_definition_of_another_owner_or_mode_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd refuses such a file with 122, whose remedy is to install it anew."""
    path = tmp_path / "agent.plist"
    assert not is_written(path, b"same")
    write_definition(path, b"same")
    assert (is_written(path, b"same"), is_written(path, b"other")) == (True, False)
    path.chmod(0o664)
    assert not is_written(path, b"same")
    write_definition(path, b"same")
    assert is_written(path, b"same")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not is_written(path, b"same")
    monkeypatch.undo()
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert not is_written(path, b"same")
    write_definition(path, b"same")
    assert not path.is_symlink()


def test_definition_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent.plist").mkdir()
    with pytest.raises(ServiceError, match="cannot write"):
        write_definition(tmp_path / "agent.plist", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["agent.plist"]


def test_job_loaded_over_ssh_is_replaced_at_the_screen(
    tmp_path: Path, launchctl: LaunchctlStandIn, manager: Launchd
) -> None:
    launchctl.be_headless()
    manager.install(define(tmp_path))
    assert manager.read_state().job == f"{USER}/{LABEL}"
    launchctl.log_in()
    manager.restart()
    assert manager.read_state().job == f"{USER}/{LABEL}", "the job that runs is meant"
    assert len(list(launchctl.folder.glob("job-*.json"))) == 1
    manager.install(define(tmp_path, "more"))
    assert manager.read_state().job == f"{GUI}/{LABEL}"
    assert len(list(launchctl.folder.glob("job-*.json"))) == 1, "two agents would fight for one state folder"


def test_of_jobs_in_both_domains_the_one_that_runs_is_meant(tmp_path: Path) -> None:
    program = tmp_path / "launchctl"
    program.write_text(
        "#!/bin/sh\n"
        f'test "$2" = {USER}/{LABEL} && printf "x = {{\\nstate = running\\npid = 7\\n}}" && exit\n'
        'printf "x = {\\nstate = spawn scheduled\\nlast exit code = 75\\n}"\n'
    )
    program.chmod(0o755)
    state = Launchd((GUI, USER), tmp_path, str(program)).read_state()
    assert (state.job, state.pid) == (f"{USER}/{LABEL}", 7)
    state = Launchd((GUI, "user/502"), tmp_path, str(program)).read_state()
    assert (state.job, state.phase) == (f"{GUI}/{LABEL}", "starting")


def test_install_that_was_interrupted_is_made_good_by_the_next_one(
    tmp_path: Path, manager: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.install(define(tmp_path))
    first = manager.read_state()

    def interrupt(argv: Sequence[str]) -> CommandResult:
        if argv[1] == "bootout":
            raise KeyboardInterrupt
        return run_command(argv)

    monkeypatch.setattr("launchd.launchctl.run_command", interrupt)
    with pytest.raises(KeyboardInterrupt):
        manager.install(define(tmp_path, "more"))
    monkeypatch.undo()
    assert manager.read_state().pid == first.pid
    manager.install(define(tmp_path, "more"))
    assert manager.read_state().pid != first.pid, "the old job would go on with the old options"


def test_job_that_ends_at_once_is_reported(tmp_path: Path, manager: Launchd) -> None:
    ends = ServiceDefinition((sys.executable, "-c", "", "--state-dir", "/x"), None, tmp_path, tmp_path / "output")
    with pytest.raises(ServiceError, match="does not stay running"):
        manager.install(ends)


def test_missing_program_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="not on PATH"):
        Launchd(("system",), tmp_path, str(tmp_path / "none")).read_state()
