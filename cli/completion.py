"""`pomona completion`: scripts for shells, and the names of objects that complete from the cluster."""

import asyncio
import sys
from collections.abc import Callable
from typing import Final

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, METAL_HOSTS, MODELS, NAMESPACES, NODES, Resource

SECONDS: Final = 2.0
"""Time for the answer of the API server: whoever presses Tab waits no longer."""
_NO_FILES: Final = ":4"
"""Last line for kubectl, which is made with Cobra: complete no names of files."""

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print the script by which SHELL completes commands, options, and names in the cluster.

    kubectl completes `kubectl pomona` by itself where the program kubectl_complete-pomona is on PATH.

    \b
    Examples:
      source <(pomona completion bash)                                       # in ~/.bashrc
      pomona completion zsh > "${fpath[1]}/_pomona"
      pomona completion fish > ~/.config/fish/completions/pomona.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has these three
    print(kind(ctx.find_root().command, {}, "pomona", "_POMONA_COMPLETE").source())


def complete_for_kubectl() -> None:
    """Print the completions of `kubectl pomona ARGUMENTS...`, as kubectl asks for them; the last one is incomplete."""
    from cli.main import main  # noqa: PLC0415 - it imports this module when it runs

    # kubectl gives the words after `kubectl pomona`; the last one is what the user has typed of it.
    *arguments, incomplete = sys.argv[1:] or [""]
    for item in ShellComplete(main, {}, "kubectl pomona", "").get_completions(arguments, incomplete):
        if item.type == "plain":
            print(f"{item.value}\t{item.help}" if item.help else item.value)
    # _NO_FILES tells kubectl to complete no names of files beside these.
    print(_NO_FILES)


def complete_names(*resources: Resource) -> Complete:
    """Return a function that completes the names of objects of these kinds."""

    def complete(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names in the cluster that begin with what the user has typed of the argument."""
        return [item for resource in resources for item in _list_items(ctx, resource, incomplete)]

    return complete


complete_services: Final = complete_names(INFERENCE_SERVICES)
complete_hosts: Final = complete_names(METAL_HOSTS)
complete_cells: Final = complete_names(METAL_HOSTS, NODES)
complete_keys: Final = complete_names(GATEWAY_KEYS)
complete_models: Final = complete_names(MODELS)
complete_namespaces: Final = complete_names(NAMESPACES)


def complete_instance_services(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a service of the running `pomona up`; none if none runs."""
    from cli.machine.instance import find_instance  # noqa: PLC0415 - not needed for --help

    try:
        instance = find_instance(ctx.params.get("state_dir"))
    except click.ClickException:
        return []
    services = instance.status.services if instance else []
    return [CompletionItem(service.name) for service in services if service.name.startswith(incomplete)]


def complete_served(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a service of what the command asks: of the running `pomona up`, or of the cluster."""
    names_cluster = any(ctx.params.get(name) for name in ("kubeconfig", "context", "namespace"))
    found = [] if names_cluster else complete_instance_services(ctx, parameter, incomplete)
    return found or complete_services(ctx, parameter, incomplete)


def complete_catalog(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of an entry of the catalog."""
    from fitness.catalog_entries import load_catalog  # noqa: PLC0415 - not needed for --help

    return [CompletionItem(name) for name in load_catalog() if name.startswith(incomplete)]


def _list_items(ctx: click.Context, resource: Resource, incomplete: str) -> list[CompletionItem]:
    """Return the names of a kind's objects that begin with `incomplete`, in the cluster and namespace of the options.

    None are returned if the cluster does not answer: a shell that completes shows no message.
    """
    from cli.cluster_access import Cluster, run_in_cluster  # noqa: PLC0415 - not needed for --help
    from cli.cluster_options import ClusterOptions  # noqa: PLC0415 - it imports this module

    async def list_names(cluster: Cluster) -> list[str]:
        """Return the names of all objects of the kind, in order. Raises TimeoutError: the user would wait too long.

        `resource` is the kind that the outer function completes; `SECONDS` is the longest that the user waits.
        """
        async with asyncio.timeout(SECONDS):
            namespace = cluster.namespace if resource.namespaced else None
            listed = await cluster.client.list_metadata(resource, namespace)
        return sorted(item["metadata"]["name"] for item in listed.items)

    # ctx.params: the values of the options that click has parsed so far
    target = ClusterOptions(ctx.params.get("kubeconfig"), ctx.params.get("context"), ctx.params.get("namespace"))
    try:
        names = run_in_cluster(target, list_names)
    except (click.ClickException, TimeoutError):
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
