"""`pomona agent install`: make the agent a service of this machine, which starts with it."""

import os
import pwd
from pathlib import Path
from typing import Any

import click

from artifacts import durable
from cli.agent.agent_options import AgentArguments, agent_options
from cli.agent.agent_service import (
    await_agent,
    describe_agent,
    explain_failure,
    find_managers,
    find_start_log,
    find_sudo_caller,
    forget_last_exit,
    read_status,
    require_root,
)
from cli.options import SOURCE_VARIABLES, state_folder_in
from launchd.service_definition import ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.native.log_files import AGENT_LOG
from metal_agent.options import StartError


@click.command("install")
@click.option(
    "--user",
    "as_user",
    is_flag=True,
    help="Without root: the agent runs from your login on, instead of from the start.",
)
@click.option("--run-as", metavar="USER", help="User of the agent and its engines. Default: the one who called sudo.")
@agent_options
@click.pass_context
def command(ctx: click.Context, /, *, as_user: bool, run_as: str | None, **given: Any) -> None:
    """Keep the agent running: from the start of this machine on, and after a crash.

    The other options are those of `pomona agent`, and are kept; so is the environment variable HF_ENDPOINT, the URL of
    a mirror of the hub. On macOS the agent becomes a LaunchDaemon that runs as the user who called sudo (with --user: a
    LaunchAgent), on Linux a unit of systemd. Run it again with all options to change one: an option that is left out
    goes back to its default.

    \b
    Examples:
      sudo ~/.local/bin/pomona agent install
      pomona agent install --user --quiet-hours 'Mon-Fri 09:00-17:00 Europe/Berlin'
      pomona agent install --user --name studio-1 --kubeconfig ~/.pomona/kubeconfig
    """
    # 1. Check the options as the agent will.
    # manager: the service manager that gets the agent; other: the one that must not have an agent
    managers = find_managers(ctx)
    manager, other = (managers.user, managers.system) if as_user else (managers.system, managers.user)
    arguments = AgentArguments(**given)
    require_root(manager)
    owner = _find_service_owner(as_user=as_user, run_as=run_as)
    folder = (arguments.state_dir or state_folder_in(Path(owner.pw_dir))).absolute()
    try:
        arguments.read_options(folder, arguments.read_identity(folder))
    except StartError as error:
        raise click.ClickException(str(error)) from error

    # 2. Install and start the service, unless another agent is in its way.
    try:
        if other.read_arguments() is not None:
            raise click.ClickException(f"an agent is installed in {other.definition_path}: uninstall it first")
        definition = _build_definition(managers.program, arguments, folder, None if as_user else owner)
        _refuse_other_agent(folder, manager)
        prepare_output(definition.output, owner)
        forget_last_exit(folder)
        manager.install(definition)
        status = await_agent(folder, manager)
    except ServiceError as error:
        raise click.ClickException(explain_failure(error, folder)) from error

    # 3. Say where everything is.
    print(describe_agent(status))
    print(f"service:      {manager.definition_path}")
    print(f"state folder: {folder}")
    print(f"log:          {folder / 'logs' / AGENT_LOG}, also by `pomona agent logs -f`")
    print("next:         `pomona agent status` shows what it serves")


def _find_service_owner(*, as_user: bool, run_as: str | None) -> pwd.struct_passwd:
    """Return the user of the service: the named one, else the one who called sudo, else the one who calls this.

    Raises click.ClickException: the options contradict each other, there is no such user, or it is root and
    neither --run-as nor --user was given.
    """
    if as_user and find_sudo_caller():
        raise click.UsageError("--user installs for the user who calls it: leave out sudo")
    if as_user and run_as:
        raise click.UsageError("--run-as is for a service of the system: leave out --user")

    try:
        owner = pwd.getpwnam(run_as) if run_as else find_sudo_caller() or pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise click.ClickException(f"--run-as {run_as}: there is no such user: name one of this machine") from error

    # As root, all engines would run with all rights: that has to be asked for.
    if owner.pw_uid == 0 and not (as_user or run_as):
        raise click.ClickException(
            "the agent and its engines would run as root: call sudo as the user who owns them, or give --run-as USER"
        )
    return owner


def _build_definition(
    program: Path, arguments: AgentArguments, folder: Path, owner: pwd.struct_passwd | None
) -> ServiceDefinition:
    """Return the definition from which the service manager's plist or unit is written.

    Args:
        program: the program to start.
        arguments: the options of the agent.
        folder: the state folder.
        owner: the user as whom a service of the system runs; None: the service is the user's own.

    Raises:
        click.ClickException: the program does not exist, or a variable to pass on has a secret.
    """
    # output: the file of what the agent prints; sources: variables that say from where weights come
    if not program.exists():
        raise click.ClickException(f"there is no {program} to start: install Pomona into an environment, not by path")
    return ServiceDefinition(
        arguments=(str(program), "agent", *arguments.render(folder)),
        user=owner.pw_name if owner else None,
        home=Path(owner.pw_dir) if owner else Path.home(),
        output=find_start_log(folder, is_of_system=owner is not None),
        sources=_read_sources(),
    )


def _read_sources() -> dict[str, str]:
    """Return the environment variables that say from where weights are downloaded; the service gets them as well.

    Raises click.ClickException: one has a user or password, which the readable definition of the service would show.
    """
    sources = {name: value for name in SOURCE_VARIABLES if (value := os.environ.get(name))}
    for name, value in sources.items():
        if "@" in value:
            raise click.ClickException(
                f"{name} has a user or a password, which every user of this machine could read: leave it out of the URL"
            )
    return sources


def _refuse_other_agent(folder: Path, manager: ServiceManager) -> None:
    """Raise click.ClickException if an agent that the service manager has not started uses the state folder.

    Only one agent can use a folder, so the agent of the service would wait until that one ends.
    """
    status = read_status(folder)
    if status and manager.read_state().pid != status.pid:
        raise click.ClickException(
            f"an agent runs already as process {status.pid} with {folder}: end it first; its engines keep running"
        )


def prepare_output(output: Path, owner: pwd.struct_passwd) -> None:
    """Make the file of the service's output for its owner, and its folder. Raises click.ClickException."""
    try:
        durable.make_folder(output.parent)
        if os.geteuid() == 0:
            # launchd opens the file as its owner, who must reach it whatever the umask of root is.
            output.parent.chmod(0o755)
        # O_NOFOLLOW: a link that somebody else put there is refused, since root would change the owner of its target.
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.geteuid() == 0:
                os.fchown(descriptor, owner.pw_uid, owner.pw_gid)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise click.ClickException(f"cannot prepare the log of the service {output}: {error}") from error
