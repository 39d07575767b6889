"""`pomona agent logs`: the log of the agent or of one engine."""

import contextlib
from pathlib import Path

import click

from cli.agent.agent_service import find_agent, find_managers, find_start_log, state_option
from cli.log_lines import follow_logs, read_last_lines
from cli.output import show_raw
from metal_agent.native.log_files import AGENT_LOG, read_engine_log_name


@click.command("logs")
@state_option
@click.option("-f", "--follow", is_flag=True, help="Go on printing what is added, until Ctrl-C.")
@click.option("--engine", metavar="NAME", help="The log of an engine, by the name of its MetalProcess or its service.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="Lines to begin with.")
@click.pass_context
def command(ctx: click.Context, state_dir: Path | None, *, follow: bool, engine: str | None, lines: int) -> None:
    """Print the end of the log of the installed agent, or of an engine.

    Output that the agent wrote outside of its log, such as errors at its start, is printed first if it is newer.

    \b
    Examples:
      pomona agent logs -f
      pomona agent logs --engine chat
    """
    try:
        manager, state_folder = find_agent(find_managers(ctx), state_dir)
        folder = state_folder / "logs"
        path = _find_engine_log(folder, engine) if engine else folder / AGENT_LOG

        # 1. The file to which the service manager writes what the agent prints outside of its log.
        if engine is None:
            start_log = find_start_log(state_folder, is_of_system=manager is not None and manager.needs_root)
            _print_newer_output(start_log, path, lines)

        # 2. The end of the log, and with --follow what is added to it.
        for line in read_last_lines(path, lines):
            click.echo(show_raw(line), nl=False)
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                follow_logs({path: ""})
    except FileNotFoundError as error:
        raise click.ClickException(
            f"there is no {error.filename}: an agent in a terminal logs there, an installed one after its first start"
        ) from error
    except OSError as error:
        if error.filename is None:  # the output cannot be written, such as to `head`
            raise
        raise click.ClickException(f"{error.filename}: {error.strerror}: run this command as its owner") from error


def _print_newer_output(start_log: Path, log: Path, count: int) -> None:
    """Print what an agent wrote outside of its log, such as errors at its start, if that is newer than the log.

    Args:
        start_log: the file with that output; nothing is printed if it is missing or empty.
        log: the log of the agent.
        count: the number of last lines to print.

    Raises:
        click.exceptions.Exit: there is no log, so that there is nothing more to print.
    """
    with contextlib.suppress(FileNotFoundError):  # start_log is missing
        output = start_log.stat()
        is_newer = not log.exists() or output.st_mtime > log.stat().st_mtime
        if output.st_size and is_newer:
            for line in read_last_lines(start_log, count):
                click.echo(show_raw(line), nl=False)
            if not log.exists():
                raise click.exceptions.Exit(0)


def _find_engine_log(folder: Path, name: str) -> Path:
    """Return the newest log of an engine, by the name of its MetalProcess, or of its service, with which that begins.

    Raises click.ClickException: there is none.
    """
    engines = {path: engine for path in folder.glob("*.log") if (engine := read_engine_log_name(path))}
    logs = [path for path, engine in engines.items() if engine == name or engine.startswith(f"{name}-")]
    if not logs:
        names = ", ".join(sorted(engines.values())) or "none"
        raise click.ClickException(f"no engine {name!r} has a log in {folder}; there are: {names}")
    return max(logs, key=lambda path: path.stat().st_mtime)
