"""The commands about an installed agent: what they pass on, refuse and print; the service manager is a stand-in."""

import asyncio
import contextlib
import os
import pwd
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cli.agent import install
from cli.agent import status as status_command
from cli.agent.agent_options import AgentArguments, agent_options
from cli.agent.agent_service import ServiceManagers, find_agent_state_folder, require_root
from cli.agent.install import prepare_output
from cli.agent.status import AgentReport, format_report
from cli.log_lines import read_last_lines
from cli.main import main
from gateway.http import control_listener
from gateway.http.control_client import ControlUnreachableError
from launchd.property_list import read_plist, render_plist
from launchd.service_definition import SUPERVISOR_VARIABLE, ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager, ServiceState
from metal_agent.control import agent_control
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import AgentProcessStatus, AgentStatus, ConnectionStatus, IdentityStatus
from metal_agent.exit_codes import PERMANENT, AgentExit, exit_status, load_exit, read_supervisor, save_exit
from metal_agent.native.log_files import previous_log_path
from tests.support.api_objects import GIB


class ManagerStandIn(ServiceManager):
    """A service manager that remembers its definition."""

    parse = staticmethod(read_plist)
    render = staticmethod(render_plist)

    def __init__(self, folder: Path, *, needs_root: bool = False, pid: int | None = None) -> None:
        super().__init__(folder / "agent.plist", needs_root=needs_root)
        self.definition: ServiceDefinition | None = None
        self.pid = pid
        self.is_outdated = False

    def find_outdated(self) -> ServiceDefinition | None:
        return self.definition if self.is_outdated else None

    def read_arguments(self) -> tuple[str, ...] | None:
        return self.definition.arguments if self.definition else None

    def install(self, definition: ServiceDefinition) -> None:
        self.definition = definition
        raise ServiceError("launchctl ended with 5")

    def uninstall(self) -> None:
        self.definition = None

    def restart(self) -> None:
        pass

    def read_state(self) -> ServiceState:
        return ServiceState("launchd", "user/501/x", str(self.definition_path), "stopped", self.pid, 7, "0")


@pytest.fixture
def managers(tmp_path: Path) -> ServiceManagers:
    program = tmp_path / "pomona"
    program.touch()
    return ServiceManagers(ManagerStandIn(tmp_path, needs_root=True), ManagerStandIn(tmp_path), program)


def status(**changes: object) -> AgentStatus:
    fields = {
        "host": "studio-1",
        "version": "0.1.0+12345678",
        "pid": 7,
        "started_at": "2026-11-23T12:00:00Z",
        "address": "10.0.0.7",
        "server": "https://cluster.example:6443",
        "connection": ConnectionStatus("connected", "2026-11-23T12:00:01Z"),
        "ready": True,
        "stopping": False,
        "budget_bytes": 64 * GIB,
        "available_bytes": 24 * GIB,
        "processes": [],
    }
    return AgentStatus(**(fields | changes))  # type: ignore[arg-type]  # a table of fields


def read_arguments(*words: str) -> AgentArguments:
    taken: list[AgentArguments] = []

    @click.command()
    @agent_options
    def take(**given: object) -> None:
        taken.append(AgentArguments(**given))  # type: ignore[arg-type]  # the options are its fields

    result = CliRunner().invoke(take, words)
    assert result.exit_code == 0, result.output
    return taken[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--name", "a"],
        ["--name", "a", "--metrics-address", "[::1]:90", "--memory-budget", "12GiB", "--port-range", "1-9"],
        ["--name", "a", "--quiet-hours", "Mon-Fri 09:00-17:00 Europe/Berlin", "--pause-when-active", "10"],
        ["--name", "a", "--pause-on-battery", "--pause-when-hot", "--pause-critical", "--no-keep-awake"],
        ["--name", "a", "--no-benchmarks"],
        ["--name", "a", "--pause-on-battery", "40", "--quiet-hours", "Sat 10:00-12:00 UTC"],
        ["--name", "a", "--metrics-address", "off", "--allow-private-sources", "10.0.0.0/8", "--file-root", "/a b"],
        ["--name", "a", "--tls-certificate", "/c", "--tls-key", "/k", "--address", "10.0.0.7", "--kubeconfig", "/x"],
    ],
)
def test_options_that_are_passed_on_mean_the_same(words: list[str]) -> None:
    given = read_arguments(*words, "--state-dir", "/state")
    assert read_arguments(*given.render(Path("/state"))) == given
    assert given.read_options(Path("/state"), None).name == "a"


def test_relative_paths_are_passed_on_as_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given = read_arguments("--name", "a", "--kubeconfig", "here")
    assert str(tmp_path / "here") in given.render(Path("/state"))


def test_install_fails_with_the_words_of_the_service_manager(tmp_path: Path, managers: ServiceManagers) -> None:
    folder = tmp_path / "state"
    words = ["agent", "install", "--user", "--name", "a", "--state-dir", str(folder)]
    save_exit(folder, AgentExit(PERMANENT, "of an earlier start", "2026-11-23T12:00:00Z"))
    result = CliRunner().invoke(main, words, obj=managers)
    assert (result.exit_code, "launchctl ended with 5" in result.output) == (1, True)
    assert "of an earlier start" not in result.output
    assert find_agent_state_folder(managers.user) == folder
    assert (folder / "logs" / "agent-start.log").stat().st_mode & 0o777 == 0o600


def test_user_of_a_system_service_reaches_its_log_whatever_the_umask_of_root_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchd opens the log as the user of the service, and ends with EX_CONFIG if it cannot."""
    given: list[int] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda _descriptor, *owner: given.extend(owner))
    owner, path = pwd.getpwall()[-1], tmp_path / "Logs" / "agent-start.log"
    for folder_mode in (None, 0o700):
        if folder_mode:
            path.parent.chmod(folder_mode)
        before = os.umask(0o077)
        try:
            prepare_output(path, owner)
        finally:
            os.umask(before)
        assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o755, 0o600)
    assert given == [owner.pw_uid, owner.pw_gid] * 2


def test_installed_agent_asks_the_mirror_of_the_hub(tmp_path: Path, managers: ServiceManagers) -> None:
    words = ["agent", "install", "--user", "--name", "a", "--state-dir", str(tmp_path / "state")]
    mirror = {"HF_ENDPOINT": "https://hub.example.com", "HF_TOKEN": "hf_secret"}
    CliRunner(env=mirror).invoke(main, words, obj=managers)
    assert isinstance(managers.user, ManagerStandIn)
    assert managers.user.definition
    assert managers.user.definition.environment["HF_ENDPOINT"] == "https://hub.example.com"
    assert "HF_TOKEN" not in managers.user.definition.environment
    refused = CliRunner(env={"HF_ENDPOINT": "https://me:secret@hub.example.com"}).invoke(main, words, obj=managers)
    assert (refused.exit_code, "secret" in refused.output) == (1, False)
    assert "HF_ENDPOINT has a user or a password, which every user of this machine could read: leave" in refused.output


def test_service_of_the_system_needs_root(managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    result = CliRunner().invoke(main, ["agent", "install", "--name", "a"], obj=managers)
    assert (result.exit_code, "run `sudo " in result.output) == (1, True)


@pytest.mark.parametrize("words", [["restart"], ["uninstall"], ["status"], ["stop"], ["logs"], ["doctor"]])
def test_root_by_sudo_leaves_the_service_of_a_user_to_the_user(
    words: list[str], managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its domain is not root's; sudo of macOS keeps HOME, so that root would load the plist of the user as its own."""
    caller = next(account for account in pwd.getpwall() if account.pw_uid)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", caller.pw_name)
    assert isinstance(managers.user, ManagerStandIn)
    managers.user.definition = ServiceDefinition(("/x", "--state-dir", str(tmp_path)), None, tmp_path, tmp_path)
    result = CliRunner().invoke(main, ["agent", *words], obj=managers)
    assert (result.exit_code, f"{caller.pw_name}'s own: run this command without sudo" in result.output) == (1, True)
    assert managers.user.read_arguments() is not None


def test_program_that_is_not_there_is_not_installed(tmp_path: Path, managers: ServiceManagers) -> None:
    managers.program.unlink()
    words = ["agent", "install", "--user", "--name", "a", "--state-dir", str(tmp_path / "state")]
    result = CliRunner().invoke(main, words, obj=managers)
    assert f"there is no {managers.program} to start" in result.output
    assert managers.user.read_arguments() is None


def test_two_services_for_one_agent_are_refused(
    tmp_path: Path, managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["agent", "install", "--name", "a", "--state-dir", str(tmp_path / "state")]
    CliRunner().invoke(main, [*words, "--user"], obj=managers)
    assert managers.user.read_arguments() is not None
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", next(account.pw_name for account in pwd.getpwall() if account.pw_uid))
    assert "uninstall it first" in CliRunner().invoke(main, words, obj=managers).output
    assert managers.system.read_arguments() is None


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--user"], "leave out sudo"),
        (["--user", "--run-as", "ada"], "leave out sudo"),
        (["--run-as", "no such user"], "there is no such user"),
    ],
)
def test_user_of_the_service_is_not_ambiguous(
    words: list[str], refusal: str, managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = ["agent", "install", "--name", "a", *words]
    if "--user" in words:
        assert "leave out --user" in CliRunner().invoke(main, [*install, "--run-as", "ada"], obj=managers).output
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", next(account.pw_name for account in pwd.getpwall() if account.pw_uid))
    assert refusal in CliRunner().invoke(main, install, obj=managers).output


def test_agent_of_root_is_installed_only_on_request(managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for caller in ("", "root", "no such user"):
        monkeypatch.setenv("SUDO_USER", caller)
        result = CliRunner().invoke(main, ["agent", "install", "--name", "a"], obj=managers)
        assert "give --run-as USER" in result.output


def test_service_of_the_user_is_that_of_the_caller_of_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = next(account for account in pwd.getpwall() if account.pw_uid)
    monkeypatch.setenv("HOME", "/nowhere")
    for uid, name, home in ((0, caller.pw_name, caller.pw_dir), (0, "unknown", "/nowhere"), (501, "x", "/nowhere")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        monkeypatch.setenv("SUDO_USER", name)
        assert ServiceManagers.of_this_machine().user.definition_path.is_relative_to(home)


def test_log_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "agent-start.log"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(click.ClickException, match="cannot prepare the log"):
        prepare_output(path, pwd.getpwall()[-1])
    assert not (tmp_path / "elsewhere").exists()


def test_agent_of_a_terminal_is_not_replaced(
    tmp_path: Path, managers: ServiceManagers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "read_status", lambda _: status(pid=8))
    words = ["agent", "install", "--user", "--name", "a", "--state-dir", str(tmp_path / "state")]
    result = CliRunner().invoke(main, words, obj=managers)
    assert "an agent runs already as process 8" in result.output
    assert managers.user.read_arguments() is None


def test_state_folder_that_cannot_be_used_is_named(tmp_path: Path, managers: ServiceManagers) -> None:
    (tmp_path / "last-exit.json").mkdir()
    result = CliRunner().invoke(main, ["agent", "status", "--state-dir", str(tmp_path)], obj=managers)
    assert f"cannot use the state folder {tmp_path}: " in result.output
    assert "mend that, or run this command as its owner" in " ".join(result.output.split())


@pytest.mark.parametrize("words", [["restart"], ["uninstall"]])
def test_command_without_an_installed_agent_says_so(words: list[str], managers: ServiceManagers) -> None:
    result = CliRunner().invoke(main, ["agent", *words], obj=managers)
    assert (result.exit_code, "run `pomona agent install`" in result.output) == (1, True)


def test_report_fits_a_terminal() -> None:
    process = AgentProcessStatus("team-a", "chat", "qwen3-8b", "llama.cpp", "Failed", 8 * GIB, "it crashed")
    service = ServiceState("launchd", "system/dev.pomona.agent", "/Library/LaunchDaemons/x.plist", "running", 7, 3)
    text = format_report(
        AgentReport("/Users/ada/Library/Application Support/Pomona", service, status(processes=[process])), 80
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "system/dev.pomona.agent is running, process 7, started 3 times" in text
    assert "team-a/chat: it crashed" in text
    assert "24.0 GiB of 64.0 GiB are free" in text


def test_report_says_why_the_token_was_not_renewed() -> None:
    refused = IdentityStatus("2026-12-23T12:00:00Z", "2026-11-24T12:00:00Z", "403 Forbidden: run `pomona host join`")
    text = format_report(AgentReport("/x", agent=status(identity=refused)), 200)
    assert "expires 2026-12-23T12:00:00Z; it could not be renewed: 403 Forbidden: run `pomona host join`" in text


@pytest.mark.parametrize("state", ["refused", "unreachable"])
def test_agent_that_the_cluster_does_not_accept_is_not_well_and_says_why(state: str) -> None:
    connection = ConnectionStatus(state, "2026-11-23T12:00:01Z", "the API server does not accept the token (401): join")
    report = AgentReport("/x", agent=status(connection=connection))
    assert not report.is_well
    shown = " ".join(format_report(report, 200).split())
    assert f"{state} since 2026-11-23T12:00:01Z the API server does not accept the token (401): join" in shown


def test_report_of_an_agent_that_ended_has_the_reason(tmp_path: Path, managers: ServiceManagers) -> None:
    save_exit(tmp_path, AgentExit(PERMANENT, "kubeconfig /x: no such file", "2026-11-23T12:00:00Z"))
    result = CliRunner().invoke(main, ["agent", "status", "--state-dir", str(tmp_path)], obj=managers)
    assert result.exit_code == 1
    assert "ended:        2026-11-23T12:00:00Z, kubeconfig /x: no such file" in result.output
    assert not AgentReport("/x", agent=status(stopping=True)).is_well
    assert not AgentReport("/x", agent=status(ready=False)).is_well
    assert "studio-1, starting as process 7" in format_report(AgentReport("/x", agent=status(ready=False)), 80)
    assert status_command.AgentReport("/x", agent=status()).is_well


def test_launchd_gets_success_for_what_no_restart_mends() -> None:
    assert [exit_status(PERMANENT, supervisor) for supervisor in (None, "systemd", "launchd")] == [78, 78, 0]
    assert exit_status(75, "launchd") == 75
    assert [read_supervisor({"POMONA_SUPERVISOR": supervisor}) for supervisor in ("launchd", "other")] == [
        "launchd",
        None,
    ]


@pytest.mark.parametrize(("uid", "trusted"), [(0, True), (os.geteuid(), True), (12345, False)])
def test_only_owner_and_root_are_answered(uid: int, *, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_listener, "unix_peer_uid", lambda _: uid)
    with socket.socket(socket.AF_UNIX) as client:
        assert control_listener.is_trusted(client) == trusted


@pytest.mark.parametrize("uid", [12345, os.geteuid()])
async def test_process_of_another_user_cannot_stop_the_agent(
    tmp_path: Path, uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_listener, "unix_peer_uid", lambda _: uid)
    stop, is_other = asyncio.Event(), uid == 12345
    refused = pytest.raises(ControlUnreachableError) if is_other else contextlib.nullcontext()
    with agent_control.serve_control(tmp_path, status, stop), refused:
        await AgentClient(tmp_path).stop()
    assert stop.is_set() != is_other


def test_last_lines_go_back_to_before_the_log_was_shortened(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    path.write_text("3\n4\n")
    assert read_last_lines(path, 3) == ["3\n", "4\n"]
    previous_log_path(path).write_text("1\n2\n")
    assert read_last_lines(path, 3) == ["2\n", "3\n", "4\n"]


@pytest.mark.parametrize(("supervisor", "status"), [("", 2), ("launchd", 0), ("systemd", PERMANENT)])
@pytest.mark.parametrize("argument", ["--of-another-version", "of-another-version"])
def test_arguments_of_another_version_start_the_agent_only_once(
    tmp_path: Path, supervisor: str, status: int, argument: str
) -> None:
    """launchd would start it again every 10 seconds: it knows success and failure only."""
    words = ["agent", "--state-dir", str(tmp_path), argument]
    ended = CliRunner(env={SUPERVISOR_VARIABLE: supervisor}).invoke(main, words)
    assert (ended.exit_code, "No such " in ended.stderr) == (status, True), ended.stderr
    last = load_exit(tmp_path)
    assert (last is not None and argument in last.message) == bool(supervisor)


def test_command_for_sudo_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/pomona", "agent", "install", "--quiet-hours", "Mon-Fri 9:00-17:00"])
    monkeypatch.setattr("os.geteuid", lambda: 501)
    with pytest.raises(
        click.ClickException, match=r"`sudo /opt/pomona agent install --quiet-hours 'Mon-Fri 9:00-17:00'`"
    ):
        require_root(ManagerStandIn(tmp_path, needs_root=True))


def test_log_that_is_no_file_is_not_read(tmp_path: Path, managers: ServiceManagers) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "logs"
    secret.write_text("of another")
    folder.mkdir()
    words = ["agent", "logs", "--state-dir", str(tmp_path)]
    for make in (lambda path: path.symlink_to(secret), os.mkfifo):
        make(folder / "agent.log")
        result = CliRunner().invoke(main, words, obj=managers)
        assert (result.exit_code, "of another" in result.output) == (1, False), result.output
        assert "agent.log" in result.output
        (folder / "agent.log").unlink()
