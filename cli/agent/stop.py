"""`pomona agent stop`: drain and stop everything that the agent runs, then the agent itself."""

from pathlib import Path

import click

from cli.agent.agent_service import find_agent, find_managers, state_option, stop_everything


@click.command("stop")
@state_option
@click.pass_context
def command(ctx: click.Context, state_dir: Path | None) -> None:
    """Withdraw the services of this host, let running answers end, stop all engines, and end the agent.

    Answers have the drainSeconds of their service: ten minutes unless it states others. Ctrl-C ends only this command.

    An installed agent stays down until `pomona agent restart`, or until the machine starts again.

    \b
    Example:
      pomona agent stop
    """
    # manager: the service manager that has the agent; None: no agent is installed, or --state-dir is given
    manager, folder = find_agent(find_managers(ctx), state_dir)
    if not stop_everything(folder, manager):
        raise click.ClickException(f"no agent answers in {folder}: see `pomona agent status`")
    print("everything is stopped; `pomona agent restart` starts an installed agent again")
