"""A command whose sub-commands are imported only when they run, so that help is quick."""

import gc
import importlib
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import click
from click.exceptions import NoSuchCommand

KUBECTL_PLUGIN: Final = "kubectl pomona"
"""Name of the command as a plugin of kubectl."""
_EXAMPLE: Final = re.compile(r"^( +)(?:kubectl )?pomona ", re.MULTILINE)
EXTRAS: Final = {"kopf": "controller", "xllamacpp": "llama"}
"""Modules that the base install lacks, and the extra that installs each."""


class LazyGroup(click.Group):
    """A group with the name of each sub-command, its line in the help, and the module that has its `command`.

    A module with several commands is named with the one that is meant: `cli.host.scheduling:drain`.
    """

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
        if cmd_name not in self._subcommands:
            return None

        # _subcommands: by name, the line in the help, and MODULE or MODULE:ATTRIBUTE; without one it is `command`
        module, _, attribute = self._subcommands[cmd_name][1].partition(":")
        try:
            command = getattr(import_without_collections(module), attribute or "command")
        except ModuleNotFoundError as error:
            # EXTRAS: modules that only an extra installs; another missing module is a defect
            if error.name not in EXTRAS:
                raise
            extra = EXTRAS[error.name]
            raise click.ClickException(
                # Pomona is on no package index: anyone could publish a package of this name there.
                f"`pomona {cmd_name}` needs the extra `{extra}`: pip install '.[{extra}]' in a checkout of Pomona"
            ) from error

        if not isinstance(command, click.Command):
            return None
        rename_examples(command, program_name(ctx))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; an error that quotes hosts, tenants or servers moves no cursor of the terminal."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            # Subclasses of ClickException go on as they are; only the plain one has messages that others have written.
            if type(error) is not click.ClickException:
                raise  # such as a usage error, which quotes what the user has typed
            from crds.text import escape_controls  # noqa: PLC0415 - not needed for --help

            raise click.ClickException(escape_controls(error.message)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name of the sub-command that the first word is, the sub-command, and the other words.

        Raises:
            NoSuchCommand: there is none; the message proposes similar names. Click itself would propose none, as
                sub-commands that are imported later are not registered with it.
        """
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            raise NoSuchCommand(error.command_name, possibilities=self._subcommands, ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show each line from the table, so that help imports nothing."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (line, _) in sorted(self._subcommands.items())])


def rename_examples(command: click.Command, name: str) -> None:
    """Write the examples in the help of a command with the program as the user calls it."""
    if command.help:
        command.help = _EXAMPLE.sub(rf"\1{name} ", command.help)


def program_name(ctx: click.Context | None = None) -> str:
    """Return the command as the user calls it: `pomona`, or `kubectl pomona` as a plugin of kubectl."""
    ctx = ctx or click.get_current_context(silent=True)
    return KUBECTL_PLUGIN if ctx and ctx.find_root().info_name == KUBECTL_PLUGIN else "pomona"


def import_without_collections(name: str) -> ModuleType:
    """Import a module, and exempt its objects from garbage collection: modules live as long as their process.

    The collector would look through some 100,000 objects of the controller's modules again and again, which is a sixth
    of the time that the import takes, and later each of its full collections would do so. The little garbage that an
    import makes stays, too.

    Raises:
        ModuleNotFoundError: it or a module that it imports is not installed.
    """
    # Nothing is imported, or somebody else has turned the collector off already.
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)

    gc.disable()
    try:
        _import_structlog()  # before a module imports it together with rich
        return importlib.import_module(name)
    finally:
        gc.freeze()  # no later collection looks at the objects that exist now
        gc.enable()


def _import_structlog() -> None:
    """Import structlog without rich, 3 MiB that it takes for tracebacks in colour, which nothing here prints."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment] # documented: an import raises ModuleNotFoundError
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
