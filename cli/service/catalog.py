"""`pomona catalog`: the models that `pomona deploy` knows by name, with what their memory is said to be."""

from typing import TYPE_CHECKING, Any, Literal

import click

from cli.lazy import program_name
from cli.output import TableColumn, facts_option, print_facts, render_table, terminal_width, wrap_text

if TYPE_CHECKING:
    from cli.service.catalog_entries import CatalogEntry

_NOTE = (
    "~4 BIT and BF16 are the sizes of the weights by third parties, unchecked; * assumes a lower quantization than 4 "
    "bit. POMONA is our estimate of all memory with 4,096 tokens of context, from the header of the first source; - "
    "means that no header is known here: `pomona inspect SOURCE` reads it. ON is the accelerator without "
    "--accelerator; a model with - there has no known source and needs --model SOURCE."
)


@click.command("catalog")
@facts_option("table")
def command(*, output_format: Literal["table", "json", "yaml"]) -> None:
    """List the models that `pomona deploy NAME` knows.

    \b
    Examples:
      pomona catalog
      pomona deploy qwen3-8b --accelerator metal
    """
    from cli.service.catalog_entries import load_catalog  # noqa: PLC0415 - not needed for --help

    entries = load_catalog()
    if output_format != "table":
        print_facts({name: _describe(entry) for name, entry in entries.items()}, output_format)
        return
    rows: list[dict[str, Any]] = [{"name": name, "entry": entry} for name, entry in entries.items()]
    cells = [[column.read(row) for column in _COLUMNS] for row in rows]
    width = terminal_width()
    print(render_table([column.title for column in _COLUMNS], cells, width, {0}))
    note = _NOTE.replace("`pomona ", f"`{program_name()} ")
    print("\n".join(["", *wrap_text(note, width)]))


def _format_size(gigabytes: float | None, *, is_low: bool = False) -> str:
    return f"{gigabytes:,.0f} GB{'*' if is_low else ''}" if gigabytes else "-"


def _describe(entry: "CatalogEntry") -> dict[str, Any]:
    """Return an entry for programs, with our own estimate."""
    import msgspec  # noqa: PLC0415 - not needed for --help

    estimated = _estimate_bytes(entry)
    return {**msgspec.to_builtins(entry), **({"estimatedBytes": estimated} if estimated else {})}


def _estimate_bytes(entry: "CatalogEntry") -> int | None:
    from crds.serving import ServingOptions  # noqa: PLC0415 - not needed for --help
    from fitness.memory import Workload, estimate  # noqa: PLC0415 - same

    needed = estimate(Workload(entry.layout, "llama.cpp"), ServingOptions())
    return needed.total_bytes if needed else None


def _format_estimate(entry: "CatalogEntry") -> str:
    from crds.size import size_text  # noqa: PLC0415 - not needed for --help

    estimated = _estimate_bytes(entry)
    return size_text(estimated) if estimated else "-"


_COLUMNS = (
    TableColumn("NAME", lambda it: str(it["name"])),
    TableColumn("PARAMETERS", lambda it: it["entry"].parameters.partition(" ")[0]),
    TableColumn("ACTIVE", lambda it: it["entry"].active or "-"),
    TableColumn("~4 BIT", lambda it: _format_size(it["entry"].quantized_gb, is_low=it["entry"].is_below_four_bits)),
    TableColumn("BF16", lambda it: _format_size(it["entry"].bf16_gb)),
    TableColumn("POMONA", lambda it: _format_estimate(it["entry"])),
    TableColumn("ON", lambda it: it["entry"].accelerator if it["entry"].sources else "-"),
)
