"""launchctl: its printed state as recorded, what follows each exit code, and whole installations on a stand-in."""

import os
import plistlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launchd.launchctl import CODES, JobState, Launchd, explain_code, read_job_state
from launchd.service_definition import LABEL, ServiceDefinition
from launchd.service_manager import ServiceError, run_command
from tests.support.launchctl_stand_in import LaunchctlStandIn, answer

FIXTURES = Path(__file__).parent / "fixtures"
GUI, USER = "gui/501", "user/501"


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


class Scripted:
    """launchctl that answers the calls of each verb with these results, the last one again and again; else with 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **results: list[int | tuple[int, str]]) -> None:
        self.calls: list[str] = []
        self._results = results
        monkeypatch.setattr("launchd.launchctl.run_command", self._answer)

    def _answer(self, argv: Sequence[str]) -> tuple[int, str]:
        self.calls.append(" ".join(argv[1:]))
        results = self._results.get(argv[1], [0])
        result = results.pop(0) if len(results) > 1 else results[0]
        return (result, "said so") if isinstance(result, int) else result


def build(tmp_path: Path, *domains: str) -> Launchd:
    return Launchd(domains or ("system",), tmp_path, pause=lambda _: None)


def printed(state: str, last_exit: str = "0", pid: int | None = None) -> tuple[int, str]:
    process = f"\tpid = {pid}\n" if pid else ""
    return 0, f"x = {{\n\tstate = {state}\n{process}\tlast exit code = {last_exit}\n}}"


GONE = 113
RUNS = printed("running", pid=7)


def test_exit_codes_for_what_is_as_it_should_be_are_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bootout in (0, 3, 36, 113):
        script = Scripted(
            monkeypatch, bootout=[bootout], print=[RUNS, GONE, RUNS], bootstrap=[5, 37, 0], kickstart=[37]
        )
        build(tmp_path)._load("system")
        verbs = [call.split()[0] for call in script.calls]
        assert verbs == ["enable", "bootout", *["print"] * 2, *["bootstrap"] * 3, "kickstart", *["print"] * 2]


@pytest.mark.parametrize(("verb", "code"), [("bootstrap", 119), ("bootstrap", 122), ("enable", 1)])
def test_other_code_is_error_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, code: int) -> None:
    results: dict[str, list[int | tuple[int, str]]] = {"print": [GONE], verb: [code]}
    Scripted(monkeypatch, **results)
    with pytest.raises(ServiceError, match="said so") as raised:
        build(tmp_path)._load("system")
    assert CODES[code].remedy in str(raised.value)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"print": [RUNS]}, "is still loaded after 70 s"),
        ({"print": [GONE], "bootstrap": [5]}, "launchctl ended with 5"),
        ({"print": [GONE, printed("spawn scheduled", "75")]}, "see `pomona agent logs`"),
        ({"print": [GONE, printed("spawn scheduled", "78: EX_CONFIG")]}, "the folder of the log is missing"),
        ({"print": [GONE, *(printed("running", pid=number) for number in range(1, 22))]}, "does not stay running"),
    ],
)
def test_no_call_is_repeated_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, list[int | tuple[int, str]]], message: str
) -> None:
    Scripted(monkeypatch, **results)
    with pytest.raises(ServiceError, match=message):
        build(tmp_path)._load("system")


def test_job_that_ended_for_good_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch, print=[printed("not running", "0")])
    with pytest.raises(ServiceError, match="does not stay running"):
        build(tmp_path)._await_stable_run("system/x")
    assert len(script.calls) == 2, "the first look may be before the start"


def test_job_that_is_not_loaded_is_loaded_by_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch, print=[GONE, GONE, RUNS], kickstart=[GONE, 0])
    build(tmp_path).restart()
    assert "bootstrap" in [call.split()[0] for call in script.calls]


@pytest.mark.parametrize(("code", "tries"), [(125, 1), (134, 1), (5, 6)])
def test_domain_of_the_screen_is_left_for_that_of_any_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, tries: int
) -> None:
    """A job may still be ending: what is not clear is tried six times."""
    script = Scripted(monkeypatch, bootstrap=[*[code] * tries, 0], print=[GONE, GONE, RUNS])
    manager = build(tmp_path, GUI, USER)
    manager._try_domains(manager._load, (GUI, USER))
    domains = [call.split()[1] for call in script.calls if call.startswith("bootstrap")]
    assert domains == [*[GUI] * tries, USER]
    Scripted(monkeypatch, bootstrap=[code], print=[GONE])
    with pytest.raises(ServiceError, match=f"launchctl ended with {code}"):
        manager._try_domains(manager._load, (USER,))


@pytest.mark.parametrize("code", [112, 113, 125])
def test_job_is_unloaded_from_both_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    script = Scripted(monkeypatch, bootout=[code], print=[GONE])
    build(tmp_path, GUI, USER).uninstall()
    assert [call for call in script.calls if "bootout" in call] == [
        f"bootout {domain}/{LABEL}" for domain in (GUI, USER)
    ]


def call_stand_in(argv: Sequence[str]) -> tuple[int, str]:
    """Call the stand-in without a process of its own, unless the call starts a job."""
    program, verb, *words = argv
    return run_command(argv) if verb == "bootstrap" else answer(Path(program).parent, verb, *words)


@pytest.fixture
def launchctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchctlStandIn]:
    stand_in = LaunchctlStandIn(tmp_path / "launchd")
    monkeypatch.setattr("launchd.launchctl.run_command", call_stand_in)
    yield stand_in
    stand_in.end()


@pytest.fixture
def manager(tmp_path: Path, launchctl: LaunchctlStandIn) -> Launchd:
    """A manager whose pauses are shorter, and long enough for a busy machine to start and end a job."""
    return Launchd((GUI, USER), tmp_path / "plists", str(launchctl.program), pause=lambda _: time.sleep(0.1))


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
    """launchd refuses such a file with 122, whose remedy is to install it again."""
    manager = build(tmp_path)
    path = manager.definition_path
    assert not manager.is_written(b"same")
    manager.write_definition(b"same")
    assert (manager.is_written(b"same"), manager.is_written(b"other")) == (True, False)
    path.chmod(0o664)
    assert not manager.is_written(b"same")
    manager.write_definition(b"same")
    assert manager.is_written(b"same")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not manager.is_written(b"same")
    monkeypatch.undo()
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert not manager.is_written(b"same")
    manager.write_definition(b"same")
    assert not path.is_symlink()


def test_definition_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    manager = build(tmp_path)
    manager.definition_path.mkdir()
    with pytest.raises(ServiceError, match="cannot write"):
        manager.write_definition(b"x")
    assert [path.name for path in tmp_path.iterdir()] == [f"{LABEL}.plist"]


def test_job_of_an_ssh_login_is_replaced_at_screen(
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

    def interrupt(argv: Sequence[str]) -> tuple[int, str]:
        if argv[1] == "bootout":
            raise KeyboardInterrupt
        return call_stand_in(argv)

    with monkeypatch.context() as patch:
        patch.setattr("launchd.launchctl.run_command", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.install(define(tmp_path, "more"))
    assert manager.read_state().pid == first.pid
    manager.install(define(tmp_path, "more"))
    assert manager.read_state().pid != first.pid, "the old job would go on with the old options"


def test_job_that_ends_at_once_is_reported(tmp_path: Path, manager: Launchd) -> None:
    ends = ServiceDefinition(("sh", "-c", "", "--state-dir", "/x"), None, tmp_path, tmp_path / "output")
    with pytest.raises(ServiceError, match="does not stay running"):
        manager.install(ends)


def test_missing_program_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="not on PATH"):
        Launchd(("system",), tmp_path, str(tmp_path / "none")).read_state()
