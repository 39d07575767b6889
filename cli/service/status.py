"""`pomona status`: the verdict on a service, and the tree of what it waits for."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import click

from cli.api_objects import Obj
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.lazy import program_name
from cli.output import facts_option, print_facts, terminal_width, without_managed_fields
from cli.service.model_users import list_model_names
from cli.service.replicas import may_be_on_hosts

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from cli.service.service_tree import ServiceObjects
    from kube.resources import Resource


@click.command("status")
@click.argument("name", shell_complete=complete_services)
@facts_option("tree")
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, output_format: Literal["tree", "json", "yaml"]) -> None:
    """Show whether the service NAME serves, what it waits for, and what to do next.

    Exit code: 0 it serves, 1 it does not.

    \b
    Examples:
      pomona status chat
      pomona status chat -o yaml
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help
    from cli.service.service_tree import render_status  # noqa: PLC0415 - same
    from cli.service.verdict import judge_service  # noqa: PLC0415 - same

    async def read(cluster: "Cluster") -> "ServiceObjects":
        return await read_service_objects(cluster, name)

    objects = run_in_cluster(target, read)
    verdict = judge_service(objects.service, program_name(), target)
    if output_format == "tree":
        print("\n".join(render_status(objects, verdict, terminal_width())))
    else:
        print_facts(without_managed_fields(objects.service), output_format)
    click.get_current_context().exit(0 if verdict.state in {"serves", "serves partly"} else 1)


async def read_service_objects(cluster: "Cluster", name: str) -> "ServiceObjects":
    """Read a service with its Models, replicas and hosts; what the user may not read is left out and named.

    Raises:
        click.ClickException: the service does not exist.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.cluster_access import read_object  # noqa: PLC0415 - not needed for --help
    from cli.service.service_tree import ServiceObjects  # noqa: PLC0415 - same
    from crds.meta import LABEL_SERVICE  # noqa: PLC0415 - same
    from kube.resources import (  # noqa: PLC0415 - same
        INFERENCE_SERVICES,
        METAL_HOSTS,
        METAL_PROCESSES,
        MODELS,
        PODS,
    )

    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    hidden: list[str] = []
    model_names = list_model_names(service)
    models = await _find(cluster, MODELS, cluster.namespace, model_names, hidden)
    label = f"{LABEL_SERVICE}={name}"
    # A tenant, who may not read processes, need not know that of a service without any.
    unseen = hidden if may_be_on_hosts(service) else []
    processes = await _list(cluster, METAL_PROCESSES, cluster.namespace, unseen, label=label)
    pods = await _list(cluster, PODS, cluster.namespace, hidden, label=label)
    host_names = {process["spec"].get("hostName") for process in processes}
    return ServiceObjects(
        service=service,
        models={model_name: models.get(model_name) for model_name in model_names},
        pods=sorted(pods, key=_name),
        processes=sorted(processes, key=_name),
        hosts=await _find(cluster, METAL_HOSTS, None, sorted(filter(None, host_names)), hidden),
        hidden=tuple(hidden),
    )


async def _find(
    cluster: "Cluster", resource: "Resource", namespace: str | None, names: Iterable[str], hidden: list[str]
) -> dict[str, Obj]:
    """Return those objects with these names that exist: a service has few, of the thousands that may be there."""
    objects: dict[str, Obj] = {}
    for name in names:
        objects |= {
            _name(manifest): manifest for manifest in await _list(cluster, resource, namespace, hidden, name=name)
        }
    return objects


async def _list(
    cluster: "Cluster",
    resource: "Resource",
    namespace: str | None,
    hidden: list[str],
    *,
    label: str = "",
    name: str = "",
) -> list[Obj]:
    from cli.cluster_errors import describe_api_error  # noqa: PLC0415 - not needed for --help
    from kube.errors import Forbidden  # noqa: PLC0415 - same

    fields = f"metadata.name={name}" if name else ""
    try:
        return (await cluster.client.list(resource, namespace, label_selector=label, field_selector=fields)).items
    except Forbidden as error:
        sentence = f"not shown: {describe_api_error(error, cluster.credentials.server)}"
        hidden += [sentence] if sentence not in hidden else []
        return []


def _name(obj: Obj) -> str:
    return str(obj["metadata"]["name"])
