"""`pomona host`: the group of the commands about hosts."""

import click

from cli.lazy import LazyGroup

SUBCOMMANDS = {
    "join": ("make a code with which a machine joins as a host", "cli.host.join"),
    "remove": ("end the rights of a host, and delete what there is of it", "cli.host.remove"),
}
"""The line in the help and the module with the `command`, by name."""


@click.group("host", cls=LazyGroup, subcommands=SUBCOMMANDS)
def command() -> None:
    """Invite and remove hosts: machines outside of the cluster that serve models, such as Macs.

    \b
    Examples:
      pomona host join studio-1
      pomona host remove studio-1
    """
