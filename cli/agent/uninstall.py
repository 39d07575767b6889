"""`pomona agent uninstall`: stop everything, and remove the service of the agent from this machine."""

from pathlib import Path

import click

from cli.agent.agent_service import find_agent_state_folder, find_installed, require_root, stop_everything, was_stopped
from launchd.service_manager import ServiceManager


@click.command("uninstall")
@click.option("--keep-serving", is_flag=True, help="Leave the engines running, for an agent in a terminal to adopt.")
@click.pass_context
def command(ctx: click.Context, *, keep_serving: bool) -> None:
    """Stop everything as `pomona agent stop` does, and remove the service.

    The state folder stays, with weights, logs and identity.

    \b
    Examples, for a service of the user, and for one of the system:
      pomona agent uninstall
      sudo ~/.local/bin/pomona agent uninstall
    """
    manager = find_installed(ctx)
    require_root(manager)
    folder = find_agent_state_folder(manager)

    # is_all_stopped: everything was stopped just now, or by `pomona agent stop` before
    stopped_now = not keep_serving and _stop_everything(manager, folder)
    is_all_stopped = stopped_now or was_stopped(folder)
    manager.uninstall()

    if is_all_stopped:
        print("everything is stopped")
    else:
        print("the agent is gone; engines that it had started keep running: `pomona agent` adopts them")
    print(f"removed {manager.definition_path}")
    print(f"the state folder stays, with weights, logs and identity: {folder}")


def _stop_everything(manager: ServiceManager, folder: Path) -> bool:
    """Stop everything by the agent of the service; return False if it does not run or answer.

    Raises click.ClickException with the way out, and ServiceError.
    """
    try:
        return stop_everything(folder, manager)
    except click.ClickException as error:
        raise click.ClickException(
            f"{error.message}; `pomona agent uninstall --keep-serving` removes the service all the same"
        ) from error
