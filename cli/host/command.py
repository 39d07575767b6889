"""`pomona host`: the group of the commands about hosts."""

import click

from cli.lazy import LazyGroup

SUBCOMMANDS = {
    "cordon": ("place no more processes on a host", "cli.host.scheduling:cordon"),
    "drain": ("move all processes off a host", "cli.host.scheduling:drain"),
    "join": ("make a code with which a machine joins as a host", "cli.host.membership:join"),
    "list": ("list the hosts outside of the cluster", "cli.host.membership:list_hosts"),
    "remove": ("revoke the rights of a host, and delete its objects", "cli.host.membership:remove"),
    "taint": ("keep services off a host that do not tolerate its taints", "cli.host.scheduling:taint"),
    "uncordon": ("place processes on a host again", "cli.host.scheduling:uncordon"),
}
"""The line in the help, and the module with the `command`, by name."""


@click.group("host", cls=LazyGroup, subcommands=SUBCOMMANDS)
def command() -> None:
    """Invite, look at, drain and remove hosts: machines outside of the cluster that serve models, such as Macs.

    \b
    Examples:
      pomona host join studio-1
      pomona host list
      pomona host drain studio-1
    """
