"""The option --vendors: a file of accelerators that differ from the built-in ones."""

from pathlib import Path

import click

from cli.options import EXISTING_FILE
from devices.vendors import VENDORS, Vendors


def read_vendors(_context: click.Context, parameter: click.Parameter, path: Path | None) -> Vendors:
    """Return the table of vendors with what the file changes. Raises click.BadParameter: it cannot be read."""
    from devices.vendor_file import VendorFileError, parse_vendors  # noqa: PLC0415 - not needed for --help
    from runtimes.registry import list_pod_engines  # noqa: PLC0415 - same

    try:
        return parse_vendors(path.read_text(), list_pod_engines()) if path else VENDORS
    except (VendorFileError, OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", param=parameter) from error


vendors_option = click.option(
    "--vendors",
    callback=read_vendors,
    type=EXISTING_FILE,
    help="YAML file of accelerators, that of the controller.",
)
