"""`pomona host remove`: revoke the rights of a host, and delete its objects."""

import asyncio
from difflib import get_close_matches

import click

from cli.api_objects import Obj
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from cli.confirmation import confirm
from cli.lazy import program_name
from cli.output import progress_width, wrap_text
from kube.resources import METAL_HOSTS

_MOST_SHOWN = 10


@click.command("remove")
@click.argument("name", shell_complete=complete_hosts)
@click.option("--yes", "-y", is_flag=True, help="Do not ask, even if processes are bound to the host.")
@cluster_options
def command(name: str, *, yes: bool, target: ClusterOptions) -> None:
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
