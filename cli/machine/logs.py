"""`pomona logs` about a service of a running `pomona up`: the logs of its engines, which are files of this machine."""

import contextlib
import sys
from pathlib import Path

import click

from cli.log_lines import follow_logs, read_last_lines
from cli.machine.instance import Instance
from cli.output import show_raw


def print_logs_here(instance: Instance, name: str, replica: str | None, *, follow: bool, tail: int | None) -> None:
    """Print the logs of the engines of a service, or of one of them; of a model that is not loaded, those of its last.

    Args:
        instance: the running `pomona up`.
        name: the service.
        replica: number of one replica; None: all.
        follow: go on until Ctrl-C.
        tail: how many last lines of each; None: all.

    Raises:
        click.ClickException: there is no such service or replica, or its log cannot be read.
    """
    service = instance.find_service(name)
    instance.say_asked()
    paths = [Path(engine.log) for engine in service.engines]
    if replica is not None:
        if replica not in map(str, range(len(paths))):
            numbers = ", ".join(map(str, range(len(paths)))) or "none yet"
            raise click.ClickException(f"{name} has no replica {replica}: there are {numbers}")
        paths = [paths[int(replica)]]

    prefixes = {path: f"[{path.stem}] " if len(paths) > 1 else "" for path in paths}
    try:
        for path, prefix in prefixes.items():
            _print_log(name, path, prefix, tail)
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                follow_logs(prefixes)
    except OSError as error:
        if error.filename is None:  # the output cannot be written, such as to `head`
            raise
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error


def _print_log(name: str, path: Path, prefix: str, tail: int | None) -> None:
    """Print the last lines of one log, each with the prefix. Raises OSError."""
    try:
        lines = read_last_lines(path, tail)
    except FileNotFoundError:
        print(f"{prefix}{name} was not loaded yet, and has no log", file=sys.stderr)
        return
    for line in lines:
        click.echo(prefix + show_raw(line), nl=False)
