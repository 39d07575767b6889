"""`pomona list`: the services of a namespace, or of all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.output import Form, TableColumn, age_text, output_option, print_objects

if TYPE_CHECKING:
    from cli.cluster_access import Cluster

Obj = dict[str, Any]


@click.command("list")
@click.option("--all-namespaces", "-A", "is_everywhere", is_flag=True, help="List the services of all namespaces.")
@output_option
@namespaced_cluster_options
def command(*, target: ClusterOptions, is_everywhere: bool, form: Form) -> None:
    """List the services: what serves, and why something does not.

    \b
    Examples:
      pomona list
      pomona list -A -o wide
      pomona list -o json
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help
    from kube.resources import INFERENCE_SERVICES  # noqa: PLC0415 - same

    async def read(cluster: "Cluster") -> tuple[str, list[Obj]]:
        namespace = None if is_everywhere else cluster.namespace
        return cluster.namespace, (await cluster.client.list(INFERENCE_SERVICES, namespace)).items

    namespace, services = run_in_cluster(target, read)
    columns = [TableColumn("NAMESPACE", lambda it: str(it["metadata"]["namespace"]), is_name=True), *COLUMNS]
    place = "the cluster" if is_everywhere else f"namespace {namespace}"
    empty = f"no service in {place}: see `pomona deploy --help`"
    print_objects(services, columns if is_everywhere else COLUMNS, form, empty=empty)


def _read_status(field: str) -> Callable[[Obj], str]:
    return lambda it: str(it.get("status", {}).get(field, ""))


def ready_condition(obj: Obj) -> Obj:
    """Return the condition Ready; empty if there is none yet."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Ready"), {})


def _ready_text(service: Obj) -> str:
    status = service.get("status", {})
    return f"{status.get('readyReplicas', 0)}/{service['spec'].get('replicas', 1)}"


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("PHASE", lambda it: str(it.get("status", {}).get("phase", "Pending"))),
    TableColumn("READY", _ready_text),
    TableColumn("MODEL", lambda it: str(it["spec"]["modelRef"])),
    TableColumn("ON", _read_status("accelerator")),
    TableColumn("ENGINE", _read_status("runtime"), is_wide=True),
    TableColumn("CONTEXT", lambda it: str(it["spec"].get("contextLength", "")), is_wide=True),
    TableColumn("MEMORY", _read_status("memory"), is_wide=True),
    TableColumn("NODES", lambda it: ",".join(it.get("status", {}).get("nodes", [])), is_wide=True),
    TableColumn("ENDPOINT", _read_status("endpoint"), is_wide=True),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("REASON", lambda it: str(ready_condition(it).get("reason", ""))),
    TableColumn("MESSAGE", lambda it: str(ready_condition(it).get("message", "")), is_wide=True),
]
"""The columns of one namespace."""
