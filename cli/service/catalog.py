"""`pomona catalog`: the models that `pomona deploy` knows by name, with what their memory is said to be."""

from typing import Any

import click
import msgspec

from cli.lazy import program_name
from cli.output import TableColumn, facts_option, print_facts, progress_width, render_table, terminal_width, wrap_text
from crds.serving import ServingOptions
from devices.vendors import VENDORS
from fitness.catalog_entries import CatalogEntry, load_catalog
from fitness.memory import estimate_pod

_NOTE = (
    "~4 BIT and BF16 are the sizes of the weights by third parties, unchecked; * assumes a lower quantization than 4 "
    "bit. POMONA is our estimate of all memory that the first source needs with 4,096 tokens of context, of all "
    "devices of a replica where it has devices. - means that no header is known here, or no formula for it: `pomona "
    "catalog -o yaml` lists the sources, `pomona inspect SOURCE` reads the header of one, and `pomona deploy "
    "--memory` states the memory that a header does not tell. ON is the accelerator without --accelerator."
)


@click.command("catalog")
@facts_option("table")
def command(*, output_format: str) -> None:
    """List the models that `pomona deploy NAME` knows.

    \b
    Examples:
      pomona catalog
      pomona deploy qwen3-8b --accelerator metal
    """
    entries = load_catalog()
    if output_format != "table":
        print_facts({name: _describe(entry) for name, entry in entries.items()}, output_format)
        return

    # _COLUMNS read a cell from a row; _NOTE explains the columns.
    rows: list[dict[str, Any]] = [{"name": name, "entry": entry} for name, entry in entries.items()]
    cells = [[column.read(row) for column in _COLUMNS] for row in rows]
    print(render_table([column.title for column in _COLUMNS], cells, progress_width(), {0}))
    note = _NOTE.replace("`pomona ", f"`{program_name()} ")
    print("\n".join(["", *wrap_text(note, terminal_width())]))


def _format_size(gigabytes: float | None, *, is_low: bool = False) -> str:
    return f"{gigabytes:,.0f} GB{'*' if is_low else ''}" if gigabytes else "-"


def _describe(entry: CatalogEntry) -> dict[str, Any]:
    """Return an entry for programs, with our own estimate."""
    estimated = _estimate_bytes(entry)
    return {**msgspec.to_builtins(entry), **({"estimatedBytes": estimated} if estimated else {})}


def _estimate_bytes(entry: CatalogEntry) -> int | None:
    """Return the memory of a replica on the entry's default accelerator; None if it is unknown.

    It is that of all its devices together, or of the container or host for an accelerator without countable devices.
    """
    # workload: what an engine loads of the model
    workload = entry.find_workload(entry.accelerator)
    if workload is None:
        return None

    # No resource: the accelerator has no devices to count, as the processor or Metal.
    has_countable_devices = bool(VENDORS[entry.accelerator].resource)
    devices = entry.hardware.get("count", 1) if has_countable_devices else 0
    if workload.stated_bytes is not None and not devices:
        return workload.stated_bytes  # the catalog states it

    needed = estimate_pod(workload, ServingOptions(parallel=1, mode=entry.mode), devices)
    if needed is None:
        return None
    return needed.container_bytes if needed.device_bytes_each is None else needed.device_bytes_each * devices


def _format_estimate(entry: CatalogEntry) -> str:
    """Return the estimate in the unit of the figures beside it."""
    estimated = _estimate_bytes(entry)
    return f"{estimated / 10**9:,.1f} GB" if estimated else "-"


_COLUMNS = (
    TableColumn("NAME", lambda it: str(it["name"])),
    TableColumn("PARAMETERS", lambda it: it["entry"].parameters.partition(" ")[0]),
    TableColumn("ACTIVE", lambda it: it["entry"].active or "-"),
    TableColumn("~4 BIT", lambda it: _format_size(it["entry"].quantized_gb, is_low=it["entry"].is_below_four_bits)),
    TableColumn("BF16", lambda it: _format_size(it["entry"].bf16_gb)),
    TableColumn("POMONA", lambda it: _format_estimate(it["entry"])),
    TableColumn("ON", lambda it: it["entry"].accelerator),
)
