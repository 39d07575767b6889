"""The agent as a service of this machine: which service manager has it, where its state is, and whether it answers."""

import asyncio
import contextlib
import os
import pwd
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import psutil
from msgspec import structs

from cli.options import PATH, STATE_FOLDER_TEXT, default_state_folder
from crds.text import escape_controls
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from launchd.launchctl import system_launchd, user_launchd
from launchd.service_definition import PROGRAM, SYSTEM_LOGS, find_state_folder
from launchd.service_manager import ServiceError, ServiceManager, ServiceState
from launchd.systemd import system_systemd, user_systemd
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import STOPPED, AgentExit, forget_exit, load_exit
from metal_agent.native.log_files import START_LOG

_END_SECONDS: Final = 1.0
"""Time for which an agent must have ended: for a moment after a start, a service manager shows no process."""
READY_SECONDS: Final = 60.0
"""Time for an agent to become ready; it adopts its engines first."""
_PAUSE_SECONDS: Final = 0.2
_LINE_SECONDS: Final = 15.0
"""Interval between two progress lines."""
_STOP_SECONDS: Final = 3600.0 + 180.0
"""Time for everything to stop: the longest drain, then engines, last reports and proxy for seconds each."""

state_option = click.option(
    "--state-dir",
    type=PATH,
    help=f"State folder of the agent. Default: that of the installed agent, else {STATE_FOLDER_TEXT}.",
)


@dataclass(frozen=True, slots=True)
class ServiceManagers:
    """The service managers that may have the agent, of the system and of the user, and the program that they start."""

    system: ServiceManager
    user: ServiceManager
    program: Path = PROGRAM

    @classmethod
    def of_this_machine(cls) -> "ServiceManagers":
        """Return the service managers for the whole system and for one user: launchd on macOS, systemd elsewhere.

        With sudo, the user's service is looked for in the home folder of the user who called it, not of root.
        """
        caller = find_sudo_caller()
        home = Path(caller.pw_dir) if caller else Path.home()
        if sys.platform == "darwin":
            return cls(system_launchd(), user_launchd(home))
        return cls(system_systemd(), user_systemd(home))

    def find_installed(self) -> ServiceManager | None:
        """Return the service manager in which an agent is installed, the system's first; None: in neither.

        Raises ServiceError: a service manager cannot say it, or the agent is installed for the user who called sudo;
        root cannot command the service manager of another user.
        """
        managers = (self.system, self.user)
        manager = next((manager for manager in managers if manager.read_arguments() is not None), None)
        if manager is self.user and (caller := find_sudo_caller()):
            raise ServiceError(f"{manager.definition_path} is {caller.pw_name}'s own: run this command without sudo")
        return manager


def find_managers(ctx: click.Context) -> ServiceManagers:
    """Return the service managers of this machine, or those that the caller of the command gave."""
    return ctx.find_object(ServiceManagers) or ServiceManagers.of_this_machine()


def find_installed(ctx: click.Context) -> ServiceManager:
    """Return the service manager that has the agent. Raises ServiceError, and click.ClickException: none has."""
    manager = find_managers(ctx).find_installed()
    if manager is None:
        raise click.ClickException("no agent is installed as a service: run `pomona agent install`")
    return manager


def find_agent(managers: ServiceManagers, state_dir: Path | None) -> tuple[ServiceManager | None, Path]:
    """Return the service manager in which the agent is installed, and the agent's state folder.

    The service manager is None if no agent is installed, or if --state-dir is given: that may be the folder of an agent
    in a terminal, so no service manager is asked.

    Raises:
        ServiceError: a service manager cannot say whether it has one.
    """
    if state_dir:
        return None, state_dir.absolute()
    manager = managers.find_installed()
    return manager, find_agent_state_folder(manager)


def find_agent_state_folder(manager: ServiceManager | None) -> Path:
    """Return the state folder of the installed agent; the default one if none is installed. Raises ServiceError."""
    arguments = manager.read_arguments() if manager else None
    try:
        return find_state_folder(arguments) if arguments else default_state_folder().absolute()
    except ValueError:  # the service has no --state-dir
        return default_state_folder().absolute()


def find_start_log(folder: Path, *, is_of_system: bool) -> Path:
    """Return the file to which the service manager sends the agent's output, such as errors before it can log."""
    return (SYSTEM_LOGS if is_of_system else folder / "logs") / START_LOG


def require_root(manager: ServiceManager) -> None:
    """Raise click.ClickException if the service is one of the system, and this user is not root."""
    if manager.needs_root and os.geteuid():
        words = shlex.join([str(Path(sys.argv[0]).absolute()), *sys.argv[1:]])
        raise click.ClickException(f"the service of the system is root's: run `sudo {words}`")


def find_sudo_caller() -> pwd.struct_passwd | None:
    """Return the user who runs this command with sudo; None without sudo, and if root itself does."""
    name = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    try:
        caller = pwd.getpwnam(name) if name else None
    except KeyError:
        return None
    return caller if caller and caller.pw_uid != 0 else None


def read_status(folder: Path, only_pid: int | None = None) -> AgentStatus | None:
    """Return the status that an agent states at the socket in its state folder; None if none answers there.

    Args:
        folder: the state folder.
        only_pid: the process that must be the one that answers, for a caller that would be misled by the socket of
            another process; None: any.

    Raises:
        click.ClickException: the agent refuses, another process than `only_pid` answers, or this user may not ask.
    """
    try:
        return asyncio.run(AgentClient(folder, only_pid).status())
    except ControlUnreachableError as error:
        # No agent answers, or the socket is there, and this user may not open it.
        if isinstance(error.__cause__, PermissionError):
            owner = folder.owner() if folder.exists() else "its owner"
            raise click.ClickException(f"{error}: run this command as {owner}, or with sudo") from error
        return None
    except ControlRefusedError as error:
        raise click.ClickException(str(error)) from error


def describe_agent(status: AgentStatus) -> str:
    """Return the line that a command prints about an agent that it has started."""
    return escape_controls(f"agent {status.host} runs as process {status.pid}, version {status.version}")


def await_agent(
    folder: Path,
    manager: ServiceManager,
    *,
    seconds: float = READY_SECONDS,
    previous_pid: int | None = None,
    awaited_run: int | None = None,
) -> AgentStatus:
    """Wait until the agent of the service is ready, and return its status.

    Args:
        folder: its state folder.
        manager: the service manager that has it.
        seconds: how long to wait.
        previous_pid: the process of the agent before a restart, whose status does not count.
        awaited_run: which start to wait for, by the service manager's count of starts; None: the last one so far. If
            that start ends, the wait ends, even if the service manager starts the agent once more.

    Raises:
        ServiceError: the service manager cannot say whether it runs.
        click.ClickException: it has ended or is not ready in time, with the reason if known.
    """
    # runs: how often the service manager has started the agent; None: it does not count
    awaited_run = awaited_run or manager.read_state().runs
    started = time.monotonic()
    # last_alive_at: when the agent had last not ended
    last_alive_at = started
    while True:
        # 1. Return its status once it is ready.
        status, now = read_status(folder), time.monotonic()
        is_new = status is not None and status.pid != previous_pid
        if status and is_new and status.ready:
            return status

        # 2. Give up if it has ended, and stays so for a moment.
        if not _has_ended(manager.read_state(), folder, awaited_run):
            last_alive_at = now
        elif now - last_alive_at >= _END_SECONDS:
            last_exit = read_last_exit(folder)
            reason = f": {last_exit.message}" if last_exit else ", see `pomona agent logs`"
            raise click.ClickException(f"the agent ended{reason}")

        # 3. Give up if it takes too long.
        if now - started >= seconds:
            reason = "is not ready" if is_new else "does not answer"
            because = f" ({escape_controls(status.connection.message)})" if status and status.connection.message else ""
            raise click.ClickException(f"the agent {reason} within {seconds:.0f} s{because}: see `pomona agent logs`")
        time.sleep(_PAUSE_SECONDS)


def _has_ended(state: ServiceState, folder: Path, awaited_run: int | None) -> bool:
    """Return whether the agent of the awaited start has ended.

    * The service manager counts a later start: it has.
    * An agent runs: it has not.
    * None runs: it has if the awaited start is counted already, or an agent recorded its end. Else it is still to come.

    A start that is still to come shows no process and no recorded end: the caller has removed the record of the
    last end before.

    Args:
        state: the service manager's view, with its count of starts (`runs`).
        folder: the state folder, in which an agent records its end.
        awaited_run: the number of the awaited start; None: the service manager does not count.
    """
    # was_started: the service manager has made the awaited start
    was_started = False
    if state.runs is not None and awaited_run is not None:
        if state.runs > awaited_run:
            return True
        was_started = state.runs == awaited_run

    if state.phase == "running":
        return False
    return was_started or read_last_exit(folder) is not None


def explain_failure(error: ServiceError, folder: Path) -> str:
    """Return the reason why the service did not start: the agent's own, if it had the time to name it."""
    last_exit = read_last_exit(folder)
    return f"the agent ended: {last_exit.message} ({error})" if last_exit else str(error)


def read_last_exit(folder: Path) -> AgentExit | None:
    """Return the last end of the agent, None if there was none. Raises click.ClickException."""
    try:
        last_exit = load_exit(folder)
    except OSError as error:
        raise _explain_folder_error(folder, error) from error
    return structs.replace(last_exit, message=escape_controls(last_exit.message)) if last_exit else None


def was_stopped(folder: Path) -> bool:
    """Return whether the last agent ended after it had stopped everything. Raises click.ClickException."""
    last_exit = read_last_exit(folder)
    return last_exit is not None and last_exit.code == STOPPED


def forget_last_exit(folder: Path) -> None:
    """Forget the last end of the agent, since it is started. Raises click.ClickException."""
    try:
        forget_exit(folder)
    except OSError as error:
        raise _explain_folder_error(folder, error) from error


def _explain_folder_error(folder: Path, error: OSError) -> click.ClickException:
    return click.ClickException(
        f"cannot use the state folder {folder}: {error}: mend that, or run this command as its owner"
    )


def stop_everything(folder: Path, manager: ServiceManager | None = None) -> bool:
    """Make the agent drain and stop everything, and wait for its end; return False if no agent answers.

    Args:
        folder: the state folder of the agent.
        manager: the service manager in which it is installed; None: it may run in a terminal.

    Raises:
        ServiceError: the service manager cannot say which process the agent is.
        click.ClickException: the agent refuses, does not end in time, or ends before everything is stopped.
    """
    # 1. Ask the agent to stop. The owner of the state folder could put a link to another user's agent there: root
    # therefore asks no other process than that of the service.
    only_pid = None
    if manager and manager.needs_root and os.geteuid() == 0:
        only_pid = manager.read_state().pid
        if only_pid is None:
            return False
    if read_status(folder, only_pid) is None:
        return False
    try:
        pid = asyncio.run(AgentClient(folder, only_pid).stop())
    except (ControlUnreachableError, ControlRefusedError) as error:
        raise click.ClickException(str(error)) from error

    # 2. Wait until its process ends; name what still runs now and then.
    # printed_at: when the last line was printed, in seconds since the start; at first so early that a line is due
    started, printed_at = time.monotonic(), -_LINE_SECONDS
    while psutil.pid_exists(pid):
        waited = time.monotonic() - started
        if waited >= _STOP_SECONDS:
            raise click.ClickException(
                f"process {pid} has not stopped everything within {_STOP_SECONDS:.0f} s: see `pomona agent logs`"
            )
        still_running = _list_running(folder, pid)
        if still_running and waited - printed_at >= _LINE_SECONDS:
            printed_at = waited
            print(f"waiting for running requests of {', '.join(still_running)}")
        time.sleep(_PAUSE_SECONDS)

    # 3. Check that it had stopped everything before.
    if not was_stopped(folder):
        last_exit = read_last_exit(folder)
        reason = f": {last_exit.message}" if last_exit else ""
        raise click.ClickException(
            f"the agent ended before everything was stopped{reason}; engines may still run: see `pomona agent status`"
        )
    return True


def _list_running(folder: Path, pid: int) -> list[str]:
    """Return the services that the agent still runs; none if it does not answer, or another process does."""
    status = None
    with contextlib.suppress(click.ClickException):
        status = read_status(folder, pid)
    running = [process for process in status.processes if process.phase != "Stopped"] if status else []
    return [escape_controls(f"{process_status.namespace}/{process_status.service}") for process_status in running]
