"""`pomona host list`, also `pomona hosts`: the hosts outside of the cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cli.cluster_options import ClusterOptions, cluster_options
from cli.output import Form, TableColumn, age_text, output_option, print_objects
from cli.service.service_tree import describe_host_state
from cli.service.verdict import find_condition

if TYPE_CHECKING:
    from cli.cluster_access import Cluster

Obj = dict[str, Any]


@click.command("list")
@output_option
@cluster_options
def command(*, target: ClusterOptions, form: Form) -> None:
    """List the hosts: what they are, what is free there, and whether they take processes.

    `pomona hosts` is the same command.

    \b
    Examples:
      pomona host list
      pomona hosts -o wide
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help
    from kube.resources import METAL_HOSTS  # noqa: PLC0415 - same

    async def read(cluster: "Cluster") -> list[Obj]:
        return (await cluster.client.list(METAL_HOSTS)).items

    empty = "no host has joined: make a code with `pomona host join NAME` (docs/mac.md)"
    print_objects(run_in_cluster(target, read), COLUMNS, form, empty=empty)


def _read_status(field: str) -> Callable[[Obj], str]:
    return lambda it: str(it.get("status", {}).get(field, ""))


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("STATE", describe_host_state),
    TableColumn("CHIP", _read_status("chip")),
    TableColumn("FREE", _read_status("available")),
    TableColumn("PROCESSES", lambda it: str(len(it.get("status", {}).get("processes", [])))),
    TableColumn("AGENT", _read_status("agentVersion")),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("ADDRESS", _read_status("address"), is_wide=True),
    TableColumn("OS", _read_status("os"), is_wide=True),
    TableColumn("RUNTIMES", lambda it: ",".join(it.get("status", {}).get("runtimes", [])), is_wide=True),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of the table."""
