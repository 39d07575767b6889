"""A command whose sub-commands are imported only when they run, so that help is quick."""

import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

EXTRAS: Final = {"kopf": "controller", "xllamacpp": "llama"}
"""Modules that the base install lacks, and the extra that installs each."""


class LazyGroup(click.Group):
    """A group with the name of each sub-command, its line in the help, and the module that has its `command`."""

    def __init__(self, *args: Any, subcommands: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names that `--help` shows."""
        del ctx
        return sorted(self._subcommands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import this sub-command only.

        Raises:
            click.ClickException: the sub-command needs an extra that is not installed.
        """
        del ctx
        if cmd_name not in self._subcommands:
            return None
        try:
            command = importlib.import_module(self._subcommands[cmd_name][1]).command
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            extra = EXTRAS[error.name]
            raise click.ClickException(
                # Pomona is on no package index: anyone could publish a package of this name there.
                f"`pomona {cmd_name}` needs the extra `{extra}`: pip install '.[{extra}]' in a checkout of Pomona"
            ) from error
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show each line from the table, so that help imports nothing."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (line, _) in sorted(self._subcommands.items())])
