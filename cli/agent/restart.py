"""`pomona agent restart`: start the installed agent anew, or start it after `pomona agent stop`."""

import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click

from cli.agent.agent_service import (
    READY_SECONDS,
    await_agent,
    describe_agent,
    explain_failure,
    find_agent_state_folder,
    find_installed,
    find_managers,
    forget_last_exit,
    read_status,
)
from launchd.service_definition import RESTART_SECONDS, ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.control.agent_status import AgentStatus


@click.command("restart")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Start the installed agent anew, with the version of Pomona that is installed now.

    Engines keep running, and no request fails. Exits with 0 once the new agent is ready.

    If this version writes another plist or unit, that is installed first, with the same options of the agent. A service
    of the system needs root for it: without root, the agent is restarted only, and the command to update is printed.

    \b
    Examples:
      pomona agent restart
      uv tool upgrade pomona && pomona agent restart
    """
    manager = find_installed(ctx)
    folder = find_agent_state_folder(manager)
    # previous: the status of the agent that runs; None: none answers
    # outdated: the definition of the service that has to be written anew; None: it is up to date
    previous = read_status(folder)
    outdated = _find_outdated_definition(manager, find_managers(ctx).program)

    try:
        status = restart_agent(manager, folder, previous, outdated)
    except click.ClickException as error:
        raise click.ClickException(f"{error.message}{_advise_downgrade(previous)}") from error

    print(describe_agent(status))
    if outdated and _lacks_root(manager):
        print(
            f"{manager.definition_path} was written by another version of Pomona; to update it, run: "
            f"sudo {_find_program()} agent restart"
        )


def restart_agent(
    manager: ServiceManager, folder: Path, previous: AgentStatus | None, outdated: ServiceDefinition | None = None
) -> AgentStatus:
    """Restart the agent, wait until it is ready, and return its status.

    A service of the system is commanded by root alone. For its owner without root the agent is ended by a signal, after
    which the service manager starts it again.

    Args:
        manager: the service manager that has it.
        folder: its state folder.
        previous: the agent that runs; None if none answers.
        outdated: the definition of the service to write anew, which also restarts it; None: it is up to date. Without
            root it is not written.

    Raises:
        ServiceError: the service manager fails.
        click.ClickException: the agent does not get ready.
    """
    if _lacks_root(manager):
        return _signal_agent(manager, folder, previous)

    # To install the service also restarts it.
    start: Callable[[], None] = manager.restart if outdated is None else lambda: manager.install(outdated)
    forget_last_exit(folder)  # so that `await_agent` takes no earlier end for that of this start
    try:
        start()
    except ServiceError as error:
        raise click.ClickException(explain_failure(error, folder)) from error

    return await_agent(folder, manager, previous_pid=previous.pid if previous else None)


def _signal_agent(manager: ServiceManager, folder: Path, previous: AgentStatus | None) -> AgentStatus:
    """Restart the agent without root: end it by a signal, after which its service manager starts it again.

    Raises as `restart_agent`, and click.ClickException if the agent is stopped or another user's.
    """
    # 1. End the process that the service manager names, else the one that answered; one that is starting has none yet.
    state = manager.read_state()
    pid = state.pid or (previous.pid if previous else None)
    if pid is None and state.phase != "starting":
        raise click.ClickException(
            f"the agent is stopped, and its service is root's: run `sudo {_find_program()} agent restart`"
        )
    forget_last_exit(folder)
    if pid is not None:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:  # it has ended already
            pass
        except PermissionError as error:
            raise click.ClickException(
                f"process {pid} is the agent of another user: run this command as that user, or with sudo"
            ) from error

    # 2. Wait for the next start, before which systemd pauses.
    seconds = READY_SECONDS + (RESTART_SECONDS if state.manager == "systemd" else 0)
    # runs: how often the service manager has started the agent; None: it does not count
    next_run = state.runs + 1 if state.runs is not None else None
    return await_agent(folder, manager, seconds=seconds, previous_pid=pid, awaited_run=next_run)


def _find_outdated_definition(manager: ServiceManager, ours: Path) -> ServiceDefinition | None:
    """Return the installed definition if this version writes it otherwise, so that it has to be written anew.

    None: it is up to date, or starts another program than `ours`. Raises ServiceError.
    """
    outdated = manager.find_outdated()
    return outdated if outdated and outdated.arguments[0] == str(ours) else None


def _advise_downgrade(previous: AgentStatus | None) -> str:
    """Return how to go back to the release that ran before, for a message; empty if it was this one or is not known."""
    # A part of the version after + names a build, which no index has: the release is what comes before.
    release = previous.version.partition("+")[0] if previous else ""
    if release in {"", version("pomona")}:
        return ""
    return (
        f"; version {release} ran before: `uv tool install 'pomona=={release}' && pomona agent restart`, with your "
        "extras, restores it"
    )


def _lacks_root(manager: ServiceManager) -> bool:
    """Return whether only root commands the service manager, and this user is not root."""
    return manager.needs_root and os.geteuid() != 0


def _find_program() -> Path:
    """Return the path of the program as this command was called."""
    return Path(sys.argv[0]).absolute()
