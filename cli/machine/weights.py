"""`pomona weights`: the weights in the store of this machine, of `pomona up` or of an agent."""

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.lazy import LazyGroup
from cli.machine.instance import find_instance, locate_state_folder, run_call
from cli.options import state_folder_option
from cli.output import duration_text, facts_option, print_facts, render_table
from crds.size import size_text

if TYPE_CHECKING:
    from artifacts.weights_store import WeightsStore
    from standalone.control.up_status import WeightsFacts

_SHOWN_DIGITS = 12
_TITLES = ("DIGEST", "SIZE", "LAST USED", "IN USE", "SOURCE")


SUBCOMMANDS: Final = {
    "list": ("list the stored weights", "cli.machine.weights:list_command"),
    "delete": ("delete some that nothing uses", "cli.machine.weights:delete_command"),
}


@click.group("weights", cls=LazyGroup, subcommands=SUBCOMMANDS)
def command() -> None:
    """List the weights that are stored on this machine, or delete some.

    \b
    Examples:
      pomona weights list
      pomona weights delete 3f9a0c
    """


@click.command("list")
@state_folder_option
@facts_option("table")
def list_command(state_dir: Path | None, *, output_format: str) -> None:
    """List the weights, the most recently used first, and the services of a running `pomona up` that they are for.

    \b
    Examples:
      pomona weights list
      pomona weights list -o json
    """
    import msgspec  # noqa: PLC0415 - not needed for --help

    stored = _read_weights(state_dir)
    if output_format != "table":
        print_facts([msgspec.to_builtins(facts) for facts in stored], output_format)
    elif stored:
        # A source is printed in full, and the terminal wraps it.
        print(render_table(_TITLES, [_format_row(facts, time.time()) for facts in stored], None, set()))
    else:
        click.echo(f"no weights in {locate_state_folder(state_dir) / 'weights'}", err=True)


@click.command("delete")
@click.argument("names", nargs=-1, required=True, metavar="DIGEST...")
@state_folder_option
def delete_command(names: tuple[str, ...], state_dir: Path | None) -> None:
    """Delete the weights with each DIGEST, of which the first digits are enough; their source does, too.

    Weights that an engine has open, or that a service of a running `pomona up` will load, are in use and not deleted.
    Unused weights are deleted automatically when a download needs the disk, the least recently used first.

    \b
    Examples:
      pomona weights delete 3f9a0c
      pomona weights delete hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
    """
    from artifacts.errors import ArtifactError  # noqa: PLC0415 - not needed for --help
    from standalone.control.stored_weights import WeightsInUseError, delete_weights  # noqa: PLC0415 - same

    for name in names:
        facts = find_weights(_read_weights(state_dir), name)
        try:
            if instance := find_instance(state_dir):
                run_call(instance.client.delete_weights(facts.digest))
            else:
                delete_weights(_open_store(state_dir), facts)
        except WeightsInUseError as error:
            raise click.ClickException(str(error)) from error
        except ArtifactError as error:
            raise click.ClickException(error.message) from error
        except OSError as error:
            raise click.ClickException(f"{error.filename}: {error.strerror or error}") from error
        click.echo(f"deleted {facts.digest[:_SHOWN_DIGITS]}, {size_text(facts.size_bytes)}")


def find_weights(stored: "Sequence[WeightsFacts]", name: str) -> "WeightsFacts":
    """Return the weights whose digest begins with `name`, or that have it as their source.

    Raises click.ClickException: there are none or several such.
    """
    if not name:
        raise click.BadParameter("'' names no weights: give the first digits of a digest")
    matching = [facts for facts in stored if facts.digest.startswith(name.lower()) or facts.source == name]
    if len(matching) != 1:
        problem = "no weights have" if not matching else f"{len(matching)} weights have"
        raise click.ClickException(f"{problem} a digest that begins with {name!r}: see `pomona weights list`")
    return matching[0]


def _read_weights(state_dir: Path | None) -> "list[WeightsFacts]":
    """Return the stored weights, as the running instance or the state folder has them. Raises click.ClickException."""
    from standalone.control.stored_weights import list_weights  # noqa: PLC0415 - not needed for --help

    if instance := find_instance(state_dir):
        return instance.call(lambda client: client.list_weights())
    try:
        return list_weights(_open_store(state_dir))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror or error}") from error


def _open_store(state_dir: Path | None) -> "WeightsStore":
    from metal_agent.weights import HostWeights  # noqa: PLC0415 - not needed for --help

    return HostWeights(locate_state_folder(state_dir) / "weights", None).store


def _format_row(facts: "WeightsFacts", now: float) -> tuple[str, ...]:
    """Return a row of the table."""
    in_use = "yes" if facts.in_use else "no"
    return (
        facts.digest[:_SHOWN_DIGITS],
        size_text(facts.size_bytes),
        f"{duration_text(now - datetime.fromisoformat(facts.last_used).timestamp())} ago",
        ", ".join(facts.services) or in_use,
        facts.source,
    )
