"""`pomona agent weights`: list the weights on this host, or delete some."""

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from artifacts.source import without_secrets
from artifacts.weights_store import StoredWeights, WeightsStore
from cli.options import default_state_folder
from crds.size import size_text
from metal_agent.weights import HostWeights

_SHOWN_DIGITS = 12
_WIDEST = 4096
"""Width of the table in characters: a source is printed in full, and the terminal wraps it."""
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


@click.command("weights")
@click.option("--state-dir", type=click.Path(path_type=Path), help="State folder of the agent.")
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="DIGEST",
    help="Delete the weights with this digest; its first digits are enough. Repeatable.",
)
def command(state_dir: Path | None, *, removed: tuple[str, ...]) -> None:
    """List the weights on this host, the most recently used first, or delete some.

    Weights that an engine has open are in use, and are never deleted. Unused weights are deleted automatically when a
    download needs the disk, the least recently used first.

    \b
    Examples:
      pomona agent weights
      pomona agent weights --remove 3f9a0c
    """
    folder = (state_dir or default_state_folder()).absolute() / "weights"
    try:
        _list_or_remove(folder, removed)
    except OSError as error:
        raise click.ClickException(f"{error.filename or folder}: {error.strerror or error}") from error


def _list_or_remove(folder: Path, removed: tuple[str, ...]) -> None:
    store = HostWeights(folder, None).store
    stored = store.stored()
    if removed:
        for text in removed:
            _remove(store, _find_weights(stored, text))
        return
    if not stored:
        click.echo(f"no weights in {folder}")
        return
    Console(width=_WIDEST, markup=False).print(_table(stored))


def _table(stored: list[StoredWeights]) -> Table:
    table = Table("DIGEST", "SIZE", "LAST USED", "IN USE", "SOURCE", box=None, pad_edge=False)
    for each in stored:
        manifest = each.manifest
        table.add_row(
            manifest.digest[:_SHOWN_DIGITS],
            size_text(manifest.size_bytes),
            _format_age(time.time() - each.used_at),
            "yes" if each.in_use else "no",
            without_secrets(manifest.source),
        )
    return table


def _find_weights(stored: list[StoredWeights], text: str) -> StoredWeights:
    if not text:
        raise click.BadParameter("--remove '' names no weights: give the first digits of a digest")
    found = [each for each in stored if each.manifest.digest.startswith(text.lower())]
    if len(found) != 1:
        problem = "no weights have" if not found else f"{len(found)} weights have"
        raise click.ClickException(f"{problem} a digest that begins with {text!r}: see `pomona agent weights`")
    return found[0]


def _remove(store: WeightsStore, stored: StoredWeights) -> None:
    manifest = stored.manifest
    if not store.remove(manifest.digest):
        raise click.ClickException(
            f"{manifest.digest[:_SHOWN_DIGITS]} ({without_secrets(manifest.source)}) is in use: delete the "
            "InferenceService that serves it first"
        )
    click.echo(f"deleted {manifest.digest[:_SHOWN_DIGITS]}, {size_text(manifest.size_bytes)}")


def _format_age(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
