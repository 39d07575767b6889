"""`pomona ps`: the models that the running `pomona up` has loaded."""

import sys
from pathlib import Path

import click

from cli.machine.instance import require_instance
from cli.options import state_folder_option
from cli.output import facts_option, print_facts, progress_width


@click.command("ps")
@state_folder_option
@facts_option("table")
def command(state_dir: Path | None, output_format: str) -> None:
    """List the models that are loaded on this machine: their memory, and when they are unloaded.

    `pomona list` has those that are not loaded, too.

    \b
    Examples:
      pomona ps
      pomona ps -o json
    """
    import msgspec  # noqa: PLC0415 - not needed for --help

    from cli.machine.service_output import format_loaded, format_memory  # noqa: PLC0415 - same

    instance = require_instance(state_dir)
    instance.say_asked()
    loaded = [service for service in instance.status.services if service.is_loaded]
    if output_format != "table":
        print_facts([msgspec.to_builtins(service) for service in loaded], output_format)
        return
    if loaded:
        print(format_loaded(loaded, progress_width()))
    else:
        print("no model is loaded: a request loads one, or `pomona load NAME`", file=sys.stderr)
    print(format_memory(instance.status), file=sys.stderr)
