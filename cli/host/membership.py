"""`pomona host join`, `list` and `remove`: the hosts outside of the cluster, how one joins, and how its rights end.

`pomona hosts` lists them, too. To remove a host revokes its rights, and deletes its objects.
"""

import asyncio
from difflib import get_close_matches

import click

from cli.api_objects import Obj, find_condition, status_reader
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from cli.confirmation import confirm
from cli.lazy import program_name
from cli.output import TableColumn, age_text, output_option, print_objects, progress_width, wrap_text
from cli.service.service_tree import describe_host_state
from kube.resources import METAL_HOSTS


@click.command("list")
@output_option
@cluster_options
def list_hosts(*, target: ClusterOptions, output_format: str) -> None:
    """List the hosts: what they are, what is free there, and whether they take processes.

    `pomona hosts` is the same command.

    \b
    Examples:
      pomona host list
      pomona hosts -o wide
    """
    hosts = run_in_cluster(target, lambda cluster: cluster.client.list(METAL_HOSTS))
    join = f"{program_name()} host join NAME{target.render()}"
    empty = f"no host has joined: make a code with `{join}` (docs/mac.md)"
    print_objects(hosts.items, COLUMNS, output_format, empty=empty)


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("STATE", describe_host_state),
    TableColumn("CHIP", status_reader("chip")),
    TableColumn("FREE", status_reader("available")),
    TableColumn("PROCESSES", lambda it: str(len(it.get("status", {}).get("processes", [])))),
    TableColumn("AGENT", status_reader("agentVersion")),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("ADDRESS", status_reader("address"), is_wide=True),
    TableColumn("OS", status_reader("os"), is_wide=True),
    TableColumn("RUNTIMES", lambda it: ",".join(it.get("status", {}).get("runtimes", [])), is_wide=True),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of the table."""


@click.command("join")
@click.argument("name")
@click.option("--server", help="URL of the API server that the host reaches. Default: the one of the kubeconfig.")
@cluster_options
def join(name: str, *, server: str | None, target: ClusterOptions) -> None:
    """Make an identity for host NAME, and a code with which one machine takes it over.

    The code is valid for 15 minutes and for one use. Another code for the same host replaces an unused one; a host
    that runs goes on. The code alone is written to standard output, so that it can be piped.

    \b
    Examples:
      pomona host join studio-1
      pomona host join studio-1 --server https://192.0.2.10:6443
      pomona host join studio-1 | ssh studio-1 '~/.local/bin/pomona' agent join -
    """
    from metal_agent.join.invitation import CODE_SECONDS, InvitationError, invite_host  # noqa: PLC0415 - not for --help

    try:
        code = run_in_cluster(target, lambda cluster: invite_host(cluster.client, cluster.credentials, name, server))
    except InvitationError as error:
        raise click.ClickException(str(error)) from error

    # The explanation goes to standard error, so that the code alone can be piped.
    click.echo(f"On the machine that becomes host {name}, within {CODE_SECONDS // 60} minutes:\n", err=True)
    click.echo("  pomona agent join CODE\n", err=True)
    click.echo("with this CODE, which works once (hand it over as you would a password):\n", err=True)
    click.echo(code)


_MOST_SHOWN = 10


@click.command("remove")
@click.argument("name", shell_complete=complete_hosts)
@click.option("--yes", "-y", is_flag=True, help="Do not ask, even if processes are bound to the host.")
@cluster_options
def remove(name: str, *, yes: bool, target: ClusterOptions) -> None:
    """Remove host NAME: its rights first, so that each new request of it is refused, then its tokens and objects.

    What it serves is replaced on other hosts where it fits. Its engines run on, without requests of the cluster, until
    its owner stops them. A removal that was interrupted is continued by the same command.

    \b
    Examples:
      pomona host remove studio-1
      pomona host remove studio-1 --yes
    """
    from metal_agent.join.invitation import InvitationError, check_host_name  # noqa: PLC0415 - not needed for --help

    # A name that no host can have is refused before the cluster is asked.
    try:
        check_host_name(name)
    except InvitationError as error:
        raise click.UsageError(str(error)) from error
    run_in_cluster(target, lambda cluster: _remove(cluster, name, yes=yes))


async def _remove(cluster: Cluster, name: str, *, yes: bool) -> None:
    """Remove a host, after a question if processes are bound to it; say what is gone, and what is left to do."""
    from metal_agent.join.removal import (  # noqa: PLC0415 - not needed for --help
        TOKEN_CACHE_SECONDS,
        list_bound_processes,
        remove_host,
    )

    # 1. Ask first, if processes are bound to the host.
    bound = await list_bound_processes(cluster.client, name)
    if bound and not yes:
        consequences = describe_removal(name, bound, cluster.target)
        click.echo("\n".join(wrap_text(consequences, progress_width())), err=True)
        confirm(f"host {name} has processes", "Remove it now?")

    # 2. Remove its rights and objects. `deleted` names what was removed; empty: there was nothing.
    deleted = await remove_host(cluster.client, name)
    if deleted:
        # API servers accept a token for so long after its removal, since they cache reviews of tokens.
        await asyncio.sleep(TOKEN_CACHE_SECONDS)
        # A request that was on its way, or a controller that had decided already, may have written since.
        deleted += await remove_host(cluster.client, name)
        click.echo(f"removed host {name}: {', '.join(deleted)}")
    else:
        names = [item["metadata"]["name"] for item in (await cluster.client.list_metadata(METAL_HOSTS)).items]
        near = get_close_matches(name, names, n=1)
        rest = f"did you mean {near[0]}?" if near else "nothing to remove"
        click.echo(f"host {name} has no rights and no objects: {rest}")

    # 3. Say what is left to do.
    if left := await list_bound_processes(cluster.client, name):
        click.echo(warn_of_bound_processes(name, left), err=True)
    if services := sorted({_service(process) for process in bound}):
        click.echo(
            f"if its machine is not trusted, replace the tokens of the services that it had: {', '.join(services)} "
            "(annotation inference.pomona.dev/rotate-token)",
            err=True,
        )


def describe_removal(name: str, bound: list[Obj], target: ClusterOptions) -> str:
    """Return the consequences of a removal for the processes of a host, and the command that avoids them.

    Args:
        name: the host.
        bound: its processes.
        target: the cluster that the user means, for the command.
    """
    names = sorted(f"{process['metadata']['namespace']}/{process['metadata']['name']}" for process in bound)
    rest = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    processes = "1 process" if len(names) == 1 else f"{len(names)} processes"
    return (
        f"host {name} has {processes}: {', '.join(names[:_MOST_SHOWN])}{rest}\n"
        "Running answers may break off, and each process is replaced on another host once it fits there. To move them "
        f"without a failed request first, drain the host: {program_name()} host drain {name}{target.render()}"
    )


def warn_of_bound_processes(name: str, left: list[Obj]) -> str:
    """Return the warning about processes that are still bound to a host that was removed."""
    services = ", ".join(sorted({_service(process) for process in left}))
    return (
        f"processes of {services} are still bound to {name}, since the controller does not run or is behind: a machine "
        f"that joins as {name} before they are gone would get them and their tokens: run this again to see"
    )


def _service(process: Obj) -> str:
    return f"{process['metadata']['namespace']}/{process['spec'].get('serviceName') or process['spec']['modelName']}"
