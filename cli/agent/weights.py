"""`pomona agent weights`: list the weights on this host, or delete some."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from artifacts.source import without_secrets
from artifacts.weights_store import StoredWeights, WeightsStore
from cli.options import default_state_folder, state_folder_option
from cli.output import duration_text, facts_option, print_facts, render_table
from crds.size import size_text
from metal_agent.weights import HostWeights

_SHOWN_DIGITS = 12
_TITLES = ("DIGEST", "SIZE", "LAST USED", "IN USE", "SOURCE")


@click.command("weights")
@state_folder_option
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="DIGEST",
    help="Delete the weights with this digest; its first digits are enough. Repeatable.",
)
@facts_option("table")
def command(state_dir: Path | None, *, removed: tuple[str, ...], output_format: str) -> None:
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
        store = HostWeights(folder, None).store
        if removed:
            for text in removed:
                _remove(store, text)
            return
        stored = store.stored()
    except OSError as error:
        raise click.ClickException(f"{error.filename or folder}: {error.strerror or error}") from error

    if output_format != "table":
        print_facts([_describe(entry) for entry in stored], output_format)
    elif stored:
        # A source is printed in full, and the terminal wraps it.
        print(render_table(_TITLES, [_format_row(entry) for entry in stored], None, set()))
    else:
        click.echo(f"no weights in {folder}", err=True)


def _describe(weights: StoredWeights) -> dict[str, Any]:
    """Return the facts of stored weights for programs."""
    manifest = weights.manifest
    return {
        "digest": manifest.digest,
        "sizeBytes": manifest.size_bytes,
        "lastUsed": datetime.fromtimestamp(weights.used_at, UTC).isoformat(timespec="seconds"),
        "inUse": weights.in_use,
        "source": without_secrets(manifest.source),
    }


def _format_row(weights: StoredWeights) -> tuple[str, ...]:
    """Return a row of the table."""
    manifest = weights.manifest
    return (
        manifest.digest[:_SHOWN_DIGITS],
        size_text(manifest.size_bytes),
        f"{duration_text(time.time() - weights.used_at)} ago",
        "yes" if weights.in_use else "no",
        without_secrets(manifest.source),
    )


def _remove(store: WeightsStore, text: str) -> None:
    """Delete the weights whose digest begins with `text`.

    Raises click.ClickException: there are none or several such, or they are in use.
    """
    if not text:
        raise click.BadParameter("--remove '' names no weights: give the first digits of a digest")

    # matching: the manifests of the weights that `text` may mean, each with digest, size and source
    matching = [weights.manifest for weights in store.stored() if weights.manifest.digest.startswith(text.lower())]
    if len(matching) != 1:
        problem = "no weights have" if not matching else f"{len(matching)} weights have"
        raise click.ClickException(f"{problem} a digest that begins with {text!r}: see `pomona agent weights`")
    (manifest,) = matching

    # The store keeps weights that an engine has open, and returns False. Messages show the first digits of a digest.
    if not store.remove(manifest.digest):
        raise click.ClickException(
            f"{manifest.digest[:_SHOWN_DIGITS]} ({without_secrets(manifest.source)}) is in use: delete the "
            "InferenceService that serves it first"
        )
    click.echo(f"deleted {manifest.digest[:_SHOWN_DIGITS]}, {size_text(manifest.size_bytes)}")
