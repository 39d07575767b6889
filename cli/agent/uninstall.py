"""`pomona agent uninstall`: stop everything, and remove the agent from the services of this machine."""

import click

from cli.agent.agent_service import find_folder, find_installed, require_root, stop_everything
from launchd.service_manager import ServiceError


@click.command("uninstall")
@click.option("--keep-serving", is_flag=True, help="Leave the engines running, for an agent in a terminal to adopt.")
@click.pass_context
def command(ctx: click.Context, *, keep_serving: bool) -> None:
    """Stop everything as `pomona agent stop` does, and remove the service.

    The state folder stays, with weights, logs and identity.

    \b
    Examples, for a service of the user, and for one of the system:
      pomona agent uninstall
      sudo ~/.pomona/bin/pomona agent uninstall
    """
    manager = find_installed(ctx)
    require_root(manager)
    try:
        folder = find_folder(manager, None)
        stopped = not keep_serving and stop_everything(folder, print)
        manager.uninstall()
    except ServiceError as error:
        raise click.ClickException(str(error)) from error
    if stopped:
        print("everything is stopped")
    else:
        print("the agent is gone; engines that it had started keep running: `pomona agent` adopts them")
    print(f"removed {manager.definition_path}")
    print(f"the state folder stays, with weights, logs and identity: {folder}")
