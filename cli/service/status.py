"""`pomona status`: the verdict on a service, and the tree of what it waits for."""

from collections.abc import Iterable
from pathlib import Path

import click

from cli.api_objects import Obj, list_model_names, may_be_on_hosts
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_errors import describe_api_error
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_served
from cli.lazy import program_name
from cli.machine.instance import OR_START, choose_instance
from cli.options import state_folder_option
from cli.output import facts_option, print_facts, terminal_width, without_managed_fields
from cli.service.service_tree import ServiceObjects, render_status
from cli.service.verdict import judge_service
from crds.meta import LABEL_SERVICE
from kube.errors import Forbidden
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, PODS, Resource


@click.command("status")
@click.argument("name", shell_complete=complete_served)
@facts_option("tree")
@state_folder_option
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, output_format: str, state_dir: Path | None) -> None:
    """Show whether the service NAME serves, what it waits for, and what to do next.

    The running `pomona up` of this machine is asked, unless -n, --context or --kubeconfig names a cluster. A model that
    the first request loads counts as one that serves.

    Exit code: 0 it serves, 1 it does not.

    \b
    Examples:
      pomona status chat
      pomona status chat -o yaml
    """
    if instance := choose_instance(target, state_dir):
        from cli.machine.services import print_status  # noqa: PLC0415 - not needed for a cluster

        click.get_current_context().exit(0 if print_status(instance, name, output_format) else 1)
    objects = run_in_cluster(target, lambda cluster: read_service_objects(cluster, name), instead=OR_START)
    verdict = judge_service(objects.service, program_name(), target)
    if output_format == "tree":
        print("\n".join(render_status(objects, verdict, terminal_width())))
    else:
        print_facts(without_managed_fields(objects.service), output_format)
    click.get_current_context().exit(0 if verdict.state in {"serves", "serves partly"} else 1)


async def read_service_objects(cluster: Cluster, name: str) -> ServiceObjects:
    """Read a service with its Models, replicas and hosts; what the user may not read is left out and named.

    Raises:
        click.ClickException: the service does not exist.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    cluster.say_asked()
    # not_shown_lines: a line for each right that the user lacks, added by `_find` and `_list`
    not_shown_lines: list[str] = []

    # 1. Its Models.
    model_names = list_model_names(service)
    models = await _find(cluster, MODELS, cluster.namespace, model_names, not_shown_lines)

    # 2. Its replicas: pods, and processes on hosts.
    label = f"{LABEL_SERVICE}={name}"
    # A service that cannot run on hosts has no processes: drop the line that they may not be read.
    lines_of_processes = not_shown_lines if may_be_on_hosts(service) else []
    processes = await _list(cluster, METAL_PROCESSES, cluster.namespace, lines_of_processes, label=label)
    pods = await _list(cluster, PODS, cluster.namespace, not_shown_lines, label=label)

    # 3. The hosts of these processes, which belong to no namespace.
    host_names = {process["spec"].get("hostName") for process in processes}
    return ServiceObjects(
        service=service,
        models={model_name: models.get(model_name) for model_name in model_names},
        pods=sorted(pods, key=_name),
        processes=sorted(processes, key=_name),
        hosts=await _find(cluster, METAL_HOSTS, None, sorted(filter(None, host_names)), not_shown_lines),
        hidden=tuple(not_shown_lines),
    )


async def _find(
    cluster: Cluster, resource: Resource, namespace: str | None, names: Iterable[str], not_shown_lines: list[str]
) -> dict[str, Obj]:
    """Return the objects with these names, by name; those that do not exist or may not be read are left out.

    Each is asked for by its name, since a service has few of the thousands that a cluster may have. Rights that are
    missing are added to `not_shown_lines`.
    """
    objects: dict[str, Obj] = {}
    for name in names:
        objects |= {
            _name(manifest): manifest
            for manifest in await _list(cluster, resource, namespace, not_shown_lines, name=name)
        }
    return objects


async def _list(
    cluster: Cluster,
    resource: Resource,
    namespace: str | None,
    not_shown_lines: list[str],
    *,
    label: str = "",
    name: str = "",
) -> list[Obj]:
    """Return the objects of a kind, of one label or name if it is given.

    If the user may not read them, return none, and add a line about that to `not_shown_lines`.
    """
    # Empty selectors select all.
    fields = f"metadata.name={name}" if name else ""
    try:
        return (await cluster.client.list(resource, namespace, label_selector=label, field_selector=fields)).items
    except Forbidden as error:
        sentence = f"not shown: {describe_api_error(error, cluster.credentials.server)}"
        # Each sentence once, even if several kinds are refused for the same reason.
        not_shown_lines += [sentence] if sentence not in not_shown_lines else []
        return []


def _name(obj: Obj) -> str:
    return str(obj["metadata"]["name"])
