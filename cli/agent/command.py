"""`pomona agent`: the metal agent of an off-cluster host."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from artifacts import durable
from cli.agent.agent_options import AgentArguments, agent_options
from cli.lazy import LazyGroup
from kube.time import rfc3339
from launchd.service_definition import STATE_OPTION, find_state_folder
from launchd.service_manager import ServiceError
from metal_agent import exit_codes
from metal_agent.exit_codes import AgentExit, ServiceManagerName
from metal_agent.options import OptionsError, StartError

SUBCOMMANDS: Final = {
    "doctor": ("find out why this host does not serve, with the way out", "cli.agent.doctor"),
    "install": ("keep the agent running, from the start of this machine on", "cli.agent.install"),
    "join": ("join a cluster with a code of its administrator", "cli.agent.join"),
    "logs": ("print the log of the agent or of an engine", "cli.agent.logs"),
    "restart": ("start the agent anew; engines keep running", "cli.agent.restart"),
    "status": ("show whether the agent runs, and what it serves", "cli.agent.status"),
    "stop": ("drain and stop everything on this host", "cli.agent.stop"),
    "uninstall": ("stop everything, and remove the service of the agent", "cli.agent.uninstall"),
}


class AgentGroup(LazyGroup):
    """The group `pomona agent`. Under a service manager a usage error ends it for ever, instead of every ten seconds.

    An installed agent has one after an upgrade to a version without one of its options.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments. Raises click.UsageError in a terminal, click.exceptions.Exit under a service manager."""
        with _prevent_restarts(tuple(args)):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the agent or a command about it. Raises click.ClickException, also if the service manager fails."""
        try:
            return super().invoke(ctx)
        except ServiceError as error:
            raise click.ClickException(str(error)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command; the value of an option that is a flag in this version is taken for one that is unknown.

        Raises as `make_context`.
        """
        with _prevent_restarts((STATE_OPTION, str(ctx.params["state_dir"])) if ctx.params.get("state_dir") else ()):
            return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _prevent_restarts(given: tuple[str, ...]) -> Iterator[None]:
    """Exit after a usage error so that a service manager does not start the agent again: it would fail for ever.

    Args:
        given: arguments of the agent; the reason is kept in the state folder that they name.

    Raises:
        click.UsageError: it happened in a terminal.
        click.exceptions.Exit: it happened under a service manager; the exit code is the one that ends restarts there.
    """
    try:
        yield
    except click.UsageError as error:
        # supervisor: launchd or systemd, which started this process; None: a person did
        supervisor = exit_codes.read_supervisor()
        if supervisor is None:
            raise

        # Keep the reason for `pomona agent status`, print it, and end for good.
        with contextlib.suppress(ValueError):  # no state folder is named in which the reason could be kept
            _save_exit(find_state_folder(given), exit_codes.PERMANENT, error.format_message())
        click.echo(f"Error: {error.format_message()}", err=True)
        raise click.exceptions.Exit(exit_codes.exit_status(exit_codes.PERMANENT, supervisor)) from error


@click.group(
    "agent", cls=AgentGroup, subcommands=SUBCOMMANDS, invoke_without_command=True, subcommand_metavar="[COMMAND]"
)
@agent_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Run the agent: this machine is a MetalHost of a cluster, and serves models as native processes.

    The agent may be stopped, killed, restarted and updated at any time: engines keep running, and the next agent adopts
    them. `pomona agent stop` stops the engines, too.

    The exit code is 0 after `pomona agent stop` and after Ctrl-C, 78 if no restart mends the error, and 75 if one may.

    \b
    Examples:
      pomona agent join pomona-join-2.eNqrV...
      pomona agent --file-root ~/models
      pomona agent --name studio-1 --kubeconfig ~/.pomona/kubeconfig
      sudo ~/.local/bin/pomona agent install
      pomona agent status
    """
    if not ctx.invoked_subcommand:
        ctx.exit(_run_agent(AgentArguments(**given)))


def _run_agent(arguments: AgentArguments) -> int:
    """Run the agent to its end; return the exit status, by which a service manager decides about another start.

    After an end on request it starts none; after a signal, which is no request to stop everything, it does.
    """
    import structlog  # noqa: PLC0415 - only an agent logs

    # supervisor: launchd or systemd, which started this process; None: a person did
    folder, supervisor = arguments.folder, exit_codes.read_supervisor()
    _configure_log(folder, supervisor)

    # The reason of an error, and a stop on request, are kept in the state folder for commands that ask later.
    try:
        stopped = asyncio.run(_run_until_signalled(arguments))
    except StartError as error:
        # PERMANENT: every start with these options fails; TEMPORARY: another start may succeed.
        code = exit_codes.PERMANENT if isinstance(error, OptionsError) else exit_codes.TEMPORARY
        _save_exit(folder, code, str(error))
        if supervisor:
            structlog.get_logger().error("agent_not_started", error=str(error), code=code)
        click.echo(f"Error: {error}", err=True)
        return exit_codes.exit_status(code, supervisor)

    if stopped:
        _save_exit(folder, exit_codes.STOPPED, "everything was stopped on request")
        return exit_codes.STOPPED

    # A signal ended it: Ctrl-C in a terminal is no failure.
    return exit_codes.TERMINATED if supervisor else 0


def _configure_log(folder: Path, supervisor: ServiceManagerName | None) -> None:
    """Log to a file that the agent keeps short by itself when a service manager runs it, else to the terminal."""
    from cli import log  # noqa: PLC0415 - not needed for --help
    from metal_agent.native.log_files import AGENT_LOG  # noqa: PLC0415 - same

    log.configure()
    if supervisor:
        with contextlib.suppress(OSError):  # then to standard error, which is a file, too
            durable.make_folder(folder / "logs")
            log.to_file(folder / "logs" / AGENT_LOG, append=True)


def _save_exit(folder: Path, code: int, message: str) -> None:
    with contextlib.suppress(OSError):  # such as a folder of another user, which may be the very error
        exit_codes.save_exit(folder, AgentExit(code, message, rfc3339(datetime.now(UTC))))


async def _run_until_signalled(arguments: AgentArguments) -> bool:
    """Run the agent until `pomona agent stop` has stopped everything, or a signal ends the agent alone.

    Return True if everything is stopped; False after SIGTERM or SIGINT: engines keep running. Raises StartError.
    """
    from kube import credentials  # noqa: PLC0415 - commands about an agent need none of this
    from kube.kubeconfig import CredentialsError  # noqa: PLC0415 - same
    from kube.public_trust import import_aiohttp_without_trust  # noqa: PLC0415 - same

    import_aiohttp_without_trust()
    from metal_agent.run import run  # noqa: PLC0415 - same

    # 1. The credentials: those of `pomona agent join`, else those of the kubeconfig.
    identity = arguments.read_identity(arguments.folder)
    options = arguments.read_options(arguments.folder, identity)
    try:
        granted = identity.credentials() if identity else credentials.load(arguments.kubeconfig)
    except CredentialsError as error:
        raise OptionsError(str(error)) from error

    # 2. A signal cancels this task, so that `run` below raises CancelledError.
    task = asyncio.current_task()
    assert task  # noqa: S101 - a coroutine that runs has one
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)

    # 3. Run until one of the two ends.
    try:
        await run(granted, options)
    except asyncio.CancelledError:
        return False
    except CredentialsError as error:
        raise StartError(str(error)) from error
    return True
