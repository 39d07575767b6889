"""`pomona host list`, also `pomona hosts`: the hosts outside of the cluster."""

import click

from cli.api_objects import find_condition, status_reader
from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.lazy import program_name
from cli.output import TableColumn, age_text, output_option, print_objects
from cli.service.service_tree import describe_host_state
from kube.resources import METAL_HOSTS


@click.command("list")
@output_option
@cluster_options
def command(*, target: ClusterOptions, output_format: str) -> None:
    """List the hosts: what they are, what is free there, and whether they take processes.

    `pomona hosts` is the same command.

    \b
    Examples:
      pomona host list
      pomona hosts -o wide
    """
    hosts = run_in_cluster(target, lambda cluster: cluster.client.list(METAL_HOSTS))
    join = f"{program_name()} host join NAME{target.render()}"
    empty = f"no host has joined: make a code with `{join}` (docs/mac.md)"
    print_objects(hosts.items, COLUMNS, output_format, empty=empty)


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("STATE", describe_host_state),
    TableColumn("CHIP", status_reader("chip")),
    TableColumn("FREE", status_reader("available")),
    TableColumn("PROCESSES", lambda it: str(len(it.get("status", {}).get("processes", [])))),
    TableColumn("AGENT", status_reader("agentVersion")),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("ADDRESS", status_reader("address"), is_wide=True),
    TableColumn("OS", status_reader("os"), is_wide=True),
    TableColumn("RUNTIMES", lambda it: ",".join(it.get("status", {}).get("runtimes", [])), is_wide=True),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of the table."""
