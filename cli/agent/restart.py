"""`pomona agent restart`: start the installed agent anew, or start it after `pomona agent stop`."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import click

from cli.agent.agent_service import (
    ANSWER_WAIT,
    AgentWait,
    await_agent,
    describe_agent,
    explain_failure,
    find_folder,
    find_installed,
    forget_last_exit,
    read_status,
)
from launchd.service_definition import RESTART_SECONDS
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.control.agent_status import AgentStatus


@click.command("restart")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Start the installed agent anew; engines keep running, and no request fails.

    \b
    Example:
      pomona agent restart
    """
    manager = find_installed(ctx)
    try:
        status = restart_agent(manager, find_folder(manager))
    except ServiceError as error:
        raise click.ClickException(str(error)) from error
    print(describe_agent(status))


def restart_agent(manager: ServiceManager, folder: Path, wait: AgentWait = ANSWER_WAIT) -> AgentStatus:
    """Restart the agent, and wait until it is ready; the owner of a service of the system needs no root for it.

    Raises ServiceError, and click.ClickException if it does not get ready.
    """
    if not manager.needs_root or os.geteuid() == 0:
        return start_anew(manager, folder, manager.restart, wait)
    before = read_status(folder)
    if refusal := explain_stopped(manager, folder):
        raise click.ClickException(refusal)
    state = manager.read_state()
    pid = state.pid or (before.pid if before else None)
    forget_last_exit(folder)
    if pid is not None:
        # Under a service manager it ends with a code after which it is started again.
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise click.ClickException(
                f"process {pid} is the agent of another user: run this command as that user, or with sudo"
            ) from error
    if state.manager == "systemd":
        wait = wait._replace(seconds=wait.seconds + RESTART_SECONDS)
    first_run = state.runs + 1 if state.runs is not None else None
    return await_agent(folder, manager, wait, previous_pid=pid, first_run=first_run)


def start_anew(
    manager: ServiceManager, folder: Path, start: Callable[[], None], wait: AgentWait = ANSWER_WAIT
) -> AgentStatus:
    """Call `start`, by which the manager starts the agent anew, and wait until the agent is ready.

    Raises ServiceError, and click.ClickException if it is not started or does not get ready.
    """
    before = read_status(folder)
    forget_last_exit(folder)
    try:
        start()
    except ServiceError as error:
        raise click.ClickException(explain_failure(error, folder)) from error
    return await_agent(folder, manager, wait, previous_pid=before.pid if before else None)


def explain_stopped(manager: ServiceManager, folder: Path) -> str:
    """Return the message that only root can start the agent, with the command; empty if this user can restart it.

    Raises ServiceError.
    """
    state = manager.read_state()
    if not manager.needs_root or os.geteuid() == 0 or state.pid or state.phase == "starting" or read_status(folder):
        return ""
    program = Path(sys.argv[0]).absolute()
    return f"the agent is stopped, and its service is root's: run `sudo {program} agent restart`"
