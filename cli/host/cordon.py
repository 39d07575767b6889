"""`pomona host cordon`, `uncordon` and `drain`: take a host out of service, as kubectl does with a node."""

import contextlib
import sys

import click

from cli.api_objects import Obj, find_condition
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster, watch_object
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from cli.lazy import program_name
from cli.options import timeout_option
from cli.output import progress_width, wrap_text
from crds.meta import CLI_FIELD_MANAGER, DRAINED
from kube.resources import METAL_HOSTS


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
    print(f"cordoned {name}; `{program_name()} host uncordon {name}{target.render()}` takes it back")


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
@timeout_option
@cluster_options
def drain(name: str, *, target: ClusterOptions, no_wait: bool, timeout: float | None) -> None:
    """Cordon the host NAME, and move all its processes to other hosts.

    A process ends when its replacement answers. One that fits on no other host serves on and is named: free memory
    elsewhere, or suspend its service. The command waits until none is left, or until the drain is taken back; Ctrl-C
    ends the wait only.

    \b
    Example:
      pomona host drain studio-1
    """
    host = _edit(target, name, {"unschedulable": True, "drain": True})
    print(f"draining {name}; `{program_name()} host uncordon {name}{target.render()}` takes it back")
    if no_wait:
        return

    # However the wait ends, the drain goes on.
    try:
        run_in_cluster(target, lambda cluster: wait_until_drained(cluster, host), timeout=timeout)
    except TimeoutError as error:
        raise click.ClickException(f"{name} is not drained yet, and goes on draining") from error
    except KeyboardInterrupt:
        print(f"\n{name} goes on draining", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT)
    print(f"drained {name}: no process is left on it")


def _edit(target: ClusterOptions, name: str, spec: Obj) -> Obj:
    """Merge fields into the spec of a host, and return the host as it is then."""

    async def merge(cluster: Cluster) -> Obj:
        """Patch the host; read it before, for the message with similar names if there is none of this name."""
        await read_object(cluster.client, METAL_HOSTS, name)
        patch = {"spec": spec}
        return await cluster.client.patch_merge(METAL_HOSTS, name, None, patch, field_manager=CLI_FIELD_MANAGER)

    return run_in_cluster(target, merge)


async def wait_until_drained(cluster: Cluster, host: Obj) -> None:
    """Print how far the drain of a host is, after each change, until the controller says that nothing is left on it.

    Args:
        cluster: the cluster.
        host: the host, as the API server returned it with `spec.drain`.

    Raises:
        click.ClickException: the drain was taken back, or the host was removed.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    metadata, printed_message = host["metadata"], ""
    # states: the host as it is now and after each change; None: there is no host of this name
    states = watch_object(cluster.client, METAL_HOSTS, metadata["name"])
    async with contextlib.aclosing(states):
        async for current in states:
            # Another uid: it was removed, and another host of this name has joined.
            if current is None or current["metadata"]["uid"] != metadata["uid"]:
                raise click.ClickException(f"MetalHost {metadata['name']} was removed while it was drained")
            if not current["spec"].get("drain"):
                raise click.ClickException(
                    f"the drain of {metadata['name']} was taken back (spec.drain is not true): what is left there stays"
                )

            # drained: the condition in which the controller reports this drain, once it has seen it
            drained = find_condition(current, DRAINED)
            if drained.get("observedGeneration", 0) < metadata["generation"]:
                continue  # the controller has not seen this drain yet
            if drained["status"] == "True":
                return
            if drained["message"] != printed_message:
                printed_message = drained["message"]
                print("\n".join(wrap_text(printed_message, progress_width())), flush=True)
