"""`pomona key`: the group of the commands about keys for the gateway."""

import click

from cli.lazy import LazyGroup

SUBCOMMANDS = {
    "create": ("make a key, and print it", "cli.key.create"),
    "delete": ("delete a key, whose clients are refused then", "cli.key.delete"),
    "list": ("list the keys, without the keys themselves", "cli.key.list"),
    "rotate": ("replace a key, and print the new one", "cli.key.rotate"),
}
"""The line in the help, and the module with the `command`, by name."""


@click.group("key", cls=LazyGroup, subcommands=SUBCOMMANDS)
def command() -> None:
    """Make, list, replace and delete GatewayKeys: keys with which clients ask services through the gateway.

    \b
    Examples:
      pomona key create app --services 'chat-*' --expires 30d
      pomona key list
      pomona key rotate app
    """
