"""`pomona list`: the services of this machine or of a cluster, there of a namespace or of all."""

from pathlib import Path
from typing import Final

import click

from cli.api_objects import Obj, count_serving, find_condition, status_reader
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.lazy import program_name
from cli.machine.instance import OR_START, choose_instance
from cli.options import state_folder_option
from cli.output import TableColumn, age_text, output_option, print_objects
from kube.resources import INFERENCE_SERVICES


@click.command("list")
@click.option("--all-namespaces", "-A", "is_everywhere", is_flag=True, help="List the services of all namespaces.")
@output_option
@state_folder_option
@namespaced_cluster_options
def command(*, target: ClusterOptions, is_everywhere: bool, output_format: str, state_dir: Path | None) -> None:
    """List the services: what serves, and why something does not.

    The running `pomona up` of this machine is asked, unless -n, -A, --context or --kubeconfig names a cluster.

    \b
    Examples:
      pomona list
      pomona list -A -o wide
      pomona list -o json
    """
    if not is_everywhere and (instance := choose_instance(target, state_dir)):
        from cli.machine.services import print_services  # noqa: PLC0415 - not needed for a cluster

        print_services(instance, output_format)
        return
    services, place = list_services(target, is_everywhere=is_everywhere, is_one_of_two=True)
    empty = f"no service in {place}: see `{program_name()} deploy --help`"
    print_objects(services, [NAMESPACE, *COLUMNS] if is_everywhere else COLUMNS, output_format, empty=empty)


def list_services(target: ClusterOptions, *, is_everywhere: bool, is_one_of_two: bool = False) -> tuple[list[Obj], str]:
    """Return the services of the namespace or of the whole cluster, and the place in words: `namespace team`.

    `is_one_of_two` is True for a command that would have asked a `pomona up` in preference.
    """

    async def read(cluster: Cluster) -> tuple[list[Obj], str]:
        """Return the services and the place, of which the namespace is known only with the cluster."""
        namespace = None if is_everywhere else cluster.namespace
        place = f"namespace {namespace}" if namespace else "the cluster"
        services = (await cluster.client.list(INFERENCE_SERVICES, namespace)).items
        if is_one_of_two:
            cluster.say_asked()
        return services, place

    return run_in_cluster(target, read, instead=OR_START if is_one_of_two else "")


NAMESPACE: Final = TableColumn("NAMESPACE", lambda it: str(it["metadata"]["namespace"]), is_name=True)
COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("PHASE", lambda it: str(it.get("status", {}).get("phase", "Pending"))),
    TableColumn("READY", lambda it: f"{count_serving(it)}/{it['spec'].get('replicas', 1)}"),
    TableColumn("MODEL", lambda it: str(it["spec"]["modelRef"])),
    TableColumn("ON", status_reader("accelerator")),
    TableColumn("ENGINE", status_reader("runtime"), is_wide=True),
    TableColumn("CONTEXT", lambda it: str(it["spec"].get("contextLength", "")), is_wide=True),
    TableColumn("MEMORY", status_reader("memory"), is_wide=True),
    TableColumn("NODES", lambda it: ",".join(it.get("status", {}).get("nodes", [])), is_wide=True),
    TableColumn("ENDPOINT", status_reader("endpoint"), is_wide=True),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("REASON", lambda it: str(find_condition(it, "Ready").get("reason", ""))),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of one namespace."""
