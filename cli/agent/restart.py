"""`pomona agent restart`: start the installed agent anew, or start it after `pomona agent stop`."""

import os
import signal
from pathlib import Path

import click

from cli.agent.agent_service import await_agent, explain_failure, find_folder, find_installed, read_status, require_root
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.control.agent_status import AgentStatus
from metal_agent.exit_codes import forget_exit


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
        status = restart_agent(manager, find_folder(manager, None))
    except ServiceError as error:
        raise click.ClickException(str(error)) from error
    print(f"agent {status.host} runs as process {status.pid}, version {status.version}")


def restart_agent(manager: ServiceManager, folder: Path) -> AgentStatus:
    """Restart the agent, and wait until it answers; the owner of a service of the system needs no root for it.

    Raises ServiceError, and click.ClickException if it does not answer.
    """
    before = read_status(folder)
    if before and manager.needs_root and os.geteuid():
        # Under a service manager it ends with a code after which it is started again.
        os.kill(before.pid, signal.SIGTERM)
    else:
        require_root(manager)
        forget_exit(folder)
        try:
            manager.restart()
        except ServiceError as error:
            raise click.ClickException(explain_failure(error, folder)) from error
    return await_agent(folder, manager, before=before.pid if before else None)
