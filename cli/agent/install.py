"""`pomona agent install`: make the agent a service of this machine, which starts with it."""

import os
import pwd
from pathlib import Path
from typing import Any

import click

from cli.agent.agent_options import AgentArguments, agent_options
from cli.agent.agent_service import (
    await_agent,
    explain_failure,
    find_managers,
    find_owner,
    read_status,
    require_root,
)
from cli.options import state_folder_in
from launchd.service_definition import ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.exit_codes import forget_exit
from metal_agent.native.log_files import AGENT_LOG, START_LOG
from metal_agent.options import OptionsError


@click.command("install")
@click.option(
    "--user",
    "as_user",
    is_flag=True,
    help="Without root: the agent runs from your login on, instead of from the start.",
)
@agent_options
@click.pass_context
def command(ctx: click.Context, /, *, as_user: bool, **given: Any) -> None:
    """Keep the agent running: from the start of this machine on, and after a crash.

    The other options are those of `pomona agent`, and are kept. On macOS the agent becomes a LaunchDaemon that runs as
    the user who called sudo (with --user: a LaunchAgent), on Linux a unit of systemd. Run it again with all options to
    change one: an option that is left out goes back to its default.

    \b
    Examples:
      sudo ~/.pomona/bin/pomona agent install
      pomona agent install --user --quiet-hours 'Mon-Fri 09:00-17:00 Europe/Berlin'
      pomona agent install --user --name studio-1 --kubeconfig ~/.pomona/kubeconfig
    """
    managers = find_managers(ctx)
    manager, other = (managers.user, managers.system) if as_user else (managers.system, managers.user)
    arguments = AgentArguments(**given)
    require_root(manager)
    owner = _find_service_owner(as_user=as_user)
    folder = (arguments.state_dir or state_folder_in(Path(owner.pw_dir))).absolute()
    try:
        arguments.read_options(folder, arguments.read_identity(folder))
    except OptionsError as error:
        raise click.ClickException(str(error)) from error
    try:
        if other.read_arguments() is not None:
            raise click.ClickException(f"an agent is installed in {other.definition_path}: uninstall it first")
        definition = _build_definition(managers.program, arguments, folder, None if as_user else owner)
        _refuse_other_agent(folder, manager)
        _prepare_folder(folder, owner)
        forget_exit(folder)
        manager.install(definition)
        status = await_agent(folder, manager)
    except ServiceError as error:
        raise click.ClickException(explain_failure(error, folder)) from error
    print(f"agent {status.host} runs as process {status.pid}, version {status.version}")
    print(f"service:      {manager.definition_path}")
    print(f"state folder: {folder}")
    print(f"log:          {folder / 'logs' / AGENT_LOG}, also by `pomona agent logs -f`")
    print("next:         `pomona agent status` shows what it serves")


def _find_service_owner(*, as_user: bool) -> pwd.struct_passwd:
    if as_user and os.geteuid() == 0 and "SUDO_USER" in os.environ:
        raise click.UsageError("--user installs for the user who calls it: leave out sudo")
    return find_owner()


def _build_definition(
    program: Path, arguments: AgentArguments, folder: Path, owner: pwd.struct_passwd | None
) -> ServiceDefinition:
    """Return the definition of the service; `owner` is the user of a service of the system."""
    if not program.exists():
        raise click.ClickException(f"there is no {program} to start: install Pomona into an environment, not by path")
    return ServiceDefinition(
        arguments=(str(program), "agent", *arguments.render(folder)),
        user=owner.pw_name if owner else None,
        home=Path(owner.pw_dir) if owner else Path.home(),
        output=folder / "logs" / START_LOG,
    )


def _refuse_other_agent(folder: Path, manager: ServiceManager) -> None:
    """Raise click.ClickException if an agent of a terminal uses the state folder: the service would wait for it."""
    status = read_status(folder)
    if status and manager.read_state().pid != status.pid:
        raise click.ClickException(
            f"an agent runs already as process {status.pid} with {folder}: end it first; its engines keep running"
        )


def _prepare_folder(folder: Path, owner: pwd.struct_passwd) -> None:
    """Make the folders and the file of the service's output, as their owner's. Raises click.ClickException."""
    try:
        output = folder / "logs" / START_LOG
        made = [path for path in (folder / "logs", *(folder / "logs").parents) if not path.exists()]
        for path in reversed(made):
            path.mkdir(mode=0o700)
        if not output.exists():
            output.touch(mode=0o600)
            made.append(output)
        for path in made if os.geteuid() == 0 else ():
            os.chown(path, owner.pw_uid, owner.pw_gid)
    except OSError as error:
        raise click.ClickException(f"cannot prepare --state-dir {folder}: {error}") from error
