"""The agent as a service of this machine: which service manager has it, where its state is, and whether it answers."""

import asyncio
import os
import pwd
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import psutil

from cli.options import STATE_FOLDER_TEXT, default_state_folder
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from launchd.launchctl import system_launchd, user_launchd
from launchd.service_definition import SYSTEM_LOGS, find_state_folder
from launchd.service_manager import ServiceError, ServiceManager
from launchd.systemctl import system_systemd, user_systemd
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import load_exit
from metal_agent.native.log_files import START_LOG

ANSWER_SECONDS: Final = 60.0
"""Time for a started agent to answer; it adopts its engines first."""
_PAUSE_SECONDS: Final = 0.2
_LINE_SECONDS: Final = 15.0
"""Interval between two lines about what is waited for."""

state_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help=f"State folder of the agent. Default: that of the installed agent, else {STATE_FOLDER_TEXT}.",
)


@dataclass(frozen=True, slots=True)
class ServiceManagers:
    """The service managers that may have the agent, of the system and of the user, and the program that they start."""

    system: ServiceManager
    user: ServiceManager
    program: Path = Path(sys.prefix) / "bin" / "pomona"

    @classmethod
    def of_this_machine(cls) -> "ServiceManagers":
        """Return launchd on macOS, systemd elsewhere."""
        if sys.platform == "darwin":
            return cls(system_launchd(), user_launchd(Path.home()))
        return cls(system_systemd(), user_systemd(Path.home()))

    def find_installed(self) -> ServiceManager | None:
        """Return the service manager that has an agent; that of the system comes first. Raises ServiceError."""
        return next((each for each in (self.system, self.user) if each.read_arguments() is not None), None)


def find_managers(ctx: click.Context) -> ServiceManagers:
    """Return the service managers of this machine, or those that the caller of the command gave."""
    return ctx.find_object(ServiceManagers) or ServiceManagers.of_this_machine()


def find_installed(ctx: click.Context) -> ServiceManager:
    """Return the service manager that has the agent. Raises click.ClickException: none has."""
    try:
        found = find_managers(ctx).find_installed()
    except ServiceError as error:
        raise click.ClickException(str(error)) from error
    if found is None:
        raise click.ClickException("no agent is installed as a service: run `pomona agent install`")
    return found


def find_folder(manager: ServiceManager | None, given: Path | None) -> Path:
    """Return the state folder: the one that was given, that of the installed agent, or the default."""
    if given:
        return given.absolute()
    arguments = manager.read_arguments() if manager else None
    try:
        return find_state_folder(arguments) if arguments else default_state_folder().absolute()
    except (ValueError, IndexError):
        return default_state_folder().absolute()


def find_start_log(folder: Path, *, is_of_system: bool) -> Path:
    """Return the file with the output of the service, for what the agent says before it can log."""
    return (SYSTEM_LOGS if is_of_system else folder / "logs") / START_LOG


def require_root(manager: ServiceManager) -> None:
    """Raise click.ClickException if the service is one of the system, and this user is not root."""
    if manager.needs_root and os.geteuid():
        words = " ".join([str(Path(sys.argv[0]).absolute()), *sys.argv[1:]])
        raise click.ClickException(f"the service of the system is root's: run `sudo {words}`")


def find_owner() -> pwd.struct_passwd:
    """Return the user who runs this command, also with sudo."""
    name = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    return pwd.getpwnam(name) if name else pwd.getpwuid(os.geteuid())


def read_status(folder: Path) -> AgentStatus | None:
    """Return the status of the agent of `folder`; None if none answers. Raises click.ClickException: it refuses."""
    try:
        return asyncio.run(AgentClient(folder).status())
    except ControlUnreachableError as error:
        if isinstance(error.__cause__, PermissionError):
            owner = folder.owner() if folder.exists() else "its owner"
            raise click.ClickException(f"{error}: run this command as {owner}, or with sudo") from error
        return None
    except ControlRefusedError as error:
        raise click.ClickException(str(error)) from error


def await_agent(folder: Path, manager: ServiceManager, *, before: int | None = None) -> AgentStatus:
    """Wait until the agent of the service answers, as another process than `before`.

    Raises click.ClickException: it does not, with the reason if that is known.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        status = read_status(folder)
        if status and status.pid != before:
            return status
        if (ended := load_exit(folder)) and manager.read_state().phase != "running":
            raise click.ClickException(f"the agent ended: {ended.message}")
        time.sleep(_PAUSE_SECONDS)
    raise click.ClickException(f"the agent does not answer within {ANSWER_SECONDS:.0f} s: see `pomona agent logs`")


def explain_failure(error: ServiceError, folder: Path) -> str:
    """Return the reason why the service did not start: the agent's own, if it had the time to name it."""
    ended = load_exit(folder)
    return f"the agent ended: {ended.message} ({error})" if ended else str(error)


def stop_everything(folder: Path, say: Callable[[str], None]) -> bool:
    """Drain and stop everything by the agent, and wait for its end; return False if no agent answers.

    Raises click.ClickException: it refuses.
    """
    if read_status(folder) is None:
        return False
    try:
        pid = asyncio.run(AgentClient(folder).stop()).pid
    except (ControlUnreachableError, ControlRefusedError) as error:
        raise click.ClickException(str(error)) from error
    said = 0.0
    while psutil.pid_exists(pid):
        status = read_status(folder)
        left = [each for each in status.processes if each.phase != "Stopped"] if status else []
        if left and time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            say(f"waiting for running requests of {', '.join(f'{each.namespace}/{each.service}' for each in left)}")
        time.sleep(_PAUSE_SECONDS)
    return True
