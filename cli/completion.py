"""`pomona completion`: scripts for shells, and the names of objects that complete from the cluster."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

if TYPE_CHECKING:
    from kube.resources import Resource

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

    *arguments, incomplete = sys.argv[1:] or [""]
    for item in ShellComplete(main, {}, "kubectl pomona", "").get_completions(arguments, incomplete):
        if item.type == "plain":
            print(f"{item.value}\t{item.help}" if item.help else item.value)
    print(_NO_FILES)


def complete_services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a service."""
    from kube.resources import INFERENCE_SERVICES  # noqa: PLC0415 - only who completes needs it

    return _complete_names(ctx, INFERENCE_SERVICES, incomplete)


def complete_hosts(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a host."""
    from kube.resources import METAL_HOSTS  # noqa: PLC0415 - same

    return _complete_names(ctx, METAL_HOSTS, incomplete)


def complete_cells(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a host or node."""
    from kube.resources import NODES  # noqa: PLC0415 - only who completes needs it

    return [*complete_hosts(ctx, parameter, incomplete), *_complete_names(ctx, NODES, incomplete)]


def complete_models(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a Model."""
    from kube.resources import MODELS  # noqa: PLC0415 - same

    return _complete_names(ctx, MODELS, incomplete)


def complete_namespaces(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a namespace."""
    from kube.resources import NAMESPACES  # noqa: PLC0415 - same

    return _complete_names(ctx, NAMESPACES, incomplete)


def complete_catalog(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of an entry of the catalog."""
    from fitness.catalog_entries import load_catalog  # noqa: PLC0415 - same

    return [CompletionItem(name) for name in load_catalog() if name.startswith(incomplete)]


def _complete_names(ctx: click.Context, resource: "Resource", incomplete: str) -> list[CompletionItem]:
    """Return the names of objects that begin so; none if the cluster does not answer, as no message can be shown."""
    import asyncio  # noqa: PLC0415 - same

    from cli.cluster_access import Cluster, run_in_cluster  # noqa: PLC0415 - same
    from cli.cluster_options import ClusterOptions  # noqa: PLC0415 - it imports this module

    async def list_names(cluster: Cluster) -> list[str]:
        async with asyncio.timeout(SECONDS):
            namespace = cluster.namespace if resource.namespaced else None
            listed = await cluster.client.list_metadata(resource, namespace)
        return sorted(item["metadata"]["name"] for item in listed.items)

    given = ctx.params
    target = ClusterOptions(given.get("kubeconfig"), given.get("context"), given.get("namespace"))
    try:
        names = run_in_cluster(target, list_names)
    except (click.ClickException, TimeoutError):
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
