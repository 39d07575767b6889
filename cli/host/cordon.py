"""`pomona host cordon`, `uncordon` and `drain`: take a host out of service, as kubectl does with a node."""

import asyncio
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import click

from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from cli.lazy import program_name
from cli.service.verdict import find_condition

if TYPE_CHECKING:
    from cli.cluster_access import Cluster

Obj = dict[str, Any]


@click.command("cordon")
@click.argument("name", shell_complete=complete_hosts)
@cluster_options
def cordon(name: str, *, target: ClusterOptions) -> None:
    """Place no more processes on the host NAME. Those that run there stay.

    \b
    Example:
      pomona host cordon studio-1
    """
    _edit(target, name, {"unschedulable": True})
    print(f"cordoned {name}: nothing more is placed there until `{program_name()} host uncordon {name}`")


@click.command("uncordon")
@click.argument("name", shell_complete=complete_hosts)
@cluster_options
def uncordon(name: str, *, target: ClusterOptions) -> None:
    """Place processes on the host NAME again, also after it was drained.

    \b
    Example:
      pomona host uncordon studio-1
    """
    _edit(target, name, {"unschedulable": None, "drain": None})
    print(f"uncordoned {name}")


@click.command("drain")
@click.argument("name", shell_complete=complete_hosts)
@click.option("--no-wait", is_flag=True, help="Return at once.")
@cluster_options
def drain(name: str, *, target: ClusterOptions, no_wait: bool) -> None:
    """Cordon the host NAME, and move all its processes to other hosts.

    A process ends when its replacement answers. One that fits on no other host serves on and is named: free memory
    elsewhere, or suspend its service. The command waits until none is left; Ctrl-C ends the wait only.

    \b
    Example:
      pomona host drain studio-1
    """
    from cli.cluster_access import INTERRUPTED_EXIT, run_in_cluster  # noqa: PLC0415 - not needed for --help

    _edit(target, name, {"unschedulable": True, "drain": True})
    print(f"draining {name}: nothing more is placed there until `{program_name()} host uncordon {name}`")
    if no_wait:
        return
    try:
        run_in_cluster(target, functools.partial(_wait_until_empty, name=name))
    except KeyboardInterrupt:
        print(f"\n{name} goes on draining", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT)
    print(f"drained {name}: no process is left on it")


def _edit(target: ClusterOptions, name: str, spec: Obj) -> None:
    """Merge fields into the spec of a host."""
    from cli.cluster_access import FIELD_MANAGER, read_object, run_in_cluster  # noqa: PLC0415 - not for --help
    from kube.resources import METAL_HOSTS  # noqa: PLC0415 - same

    async def merge(cluster: "Cluster") -> None:
        await read_object(cluster.client, METAL_HOSTS, name)
        await cluster.client.patch_merge(METAL_HOSTS, name, None, {"spec": spec}, field_manager=FIELD_MANAGER)

    run_in_cluster(target, merge)


async def _wait_until_empty(cluster: "Cluster", *, name: str) -> None:
    """Print the processes that are still on a host, after each change, until there is none."""
    from cli.cluster_access import watch_objects  # noqa: PLC0415 - not needed for --help
    from kube.resources import METAL_PROCESSES  # noqa: PLC0415 - same

    last = ""
    explaining = asyncio.create_task(_print_what_blocks(cluster, name))
    states = watch_objects(cluster.client, METAL_PROCESSES, None, field_selector=f"spec.hostName={name}")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(explaining.cancel)
        await stack.enter_async_context(contextlib.aclosing(states))
        async for processes in states:
            left = [each for each in processes.values() if not each["spec"].get("inspect")]
            if not left:
                return
            shown = describe_processes(left)
            if shown != last:
                print(shown, flush=True)
            last = shown


async def _print_what_blocks(cluster: "Cluster", name: str) -> None:
    """Print why a drain does not go on, each time when the reason is another one."""
    from cli.cluster_access import watch_objects  # noqa: PLC0415 - not needed for --help
    from kube.resources import METAL_HOSTS  # noqa: PLC0415 - same

    last = ""
    states = watch_objects(cluster.client, METAL_HOSTS, None, field_selector=f"metadata.name={name}")
    async with contextlib.aclosing(states):
        async for hosts in states:
            drained = find_condition(hosts.get(name, {}), "Drained")
            message = str(drained.get("message", "")) if drained.get("reason") == "DrainBlocked" else ""
            if message and message != last:
                print(message, flush=True)
            last = message


def describe_processes(processes: list[Obj]) -> str:
    """Return a line with the number of processes, and one with each: its service, phase and reason."""
    lines = []
    for each in processes:
        metadata, status = each["metadata"], each.get("status", {})
        service = f"{metadata['namespace']}/{each['spec'].get('serviceName', '')}"
        phase = "Stopping" if metadata.get("deletionTimestamp") else status.get("phase", "Pending")
        reason = f" ({status['reason']})" if status.get("reason") else ""
        lines.append(f"  {service}  {metadata['name']}  {phase}{reason}")
    return "\n".join([f"{len(lines)} still run:" if len(lines) > 1 else "1 still runs:", *sorted(lines)])
