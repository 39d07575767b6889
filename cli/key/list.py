"""`pomona key list`: the GatewayKeys of a namespace, or of all; never a key itself."""

import math
from datetime import UTC, datetime

import click
import msgspec

from cli.api_objects import Obj, find_condition
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.lazy import program_name
from cli.output import TableColumn, age_text, duration_text, output_option, print_objects
from cli.service.list import NAMESPACE
from crds.gatewaykey import GatewayKeySpec, read_expiry_seconds
from kube.resources import GATEWAY_KEYS


@click.command("list")
@click.option("--all-namespaces", "-A", "is_everywhere", is_flag=True, help="List the keys of all namespaces.")
@output_option
@namespaced_cluster_options
def command(*, target: ClusterOptions, is_everywhere: bool, output_format: str) -> None:
    """List the GatewayKeys: what they open, when they end, and why the gateway does not accept one.

    The keys themselves are in Secrets NAME-key, and are not shown.

    \b
    Examples:
      pomona key list
      pomona key list -A -o wide
    """

    async def read(cluster: Cluster) -> tuple[list[Obj], str]:
        """Return the keys and the place, of which the namespace is known only with the cluster."""
        namespace = None if is_everywhere else cluster.namespace
        place = f"namespace {namespace}" if namespace else "the cluster"
        return (await cluster.client.list(GATEWAY_KEYS, namespace)).items, place

    keys, place = run_in_cluster(target, read)
    empty = f"no key in {place}: see `{program_name()} key create --help`"
    print_objects(keys, [NAMESPACE, *COLUMNS] if is_everywhere else COLUMNS, output_format, empty=empty)


def describe_end(key: Obj, now: datetime) -> str:
    """Return when a key ends: `never`, `in 3d` or `over`."""
    end = read_expiry_seconds(msgspec.convert({"expiresAt": key.get("spec", {}).get("expiresAt")}, GatewayKeySpec))
    left_seconds = end - now.timestamp()
    if end == math.inf:
        return "never"
    return f"in {duration_text(left_seconds)}" if left_seconds > 0 else "over"


def _limit_column(title: str, field: str) -> TableColumn:
    return TableColumn(title, lambda it: str(it.get("spec", {}).get(field, "")), is_wide=True)


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("READY", lambda it: str(find_condition(it, "Ready").get("status", "Unknown"))),
    TableColumn("REASON", lambda it: str(find_condition(it, "Ready").get("reason", ""))),
    TableColumn("SERVICES", lambda it: ",".join(it.get("spec", {}).get("services") or ["all"])),
    TableColumn("EXPIRES", lambda it: describe_end(it, datetime.now(UTC))),
    _limit_column("REQUESTS/MIN", "requestsPerMinute"),
    _limit_column("TOKENS/MIN", "tokensPerMinute"),
    _limit_column("CONCURRENT", "concurrentRequests"),
    TableColumn("PREVIOUS", lambda it: str(len(it.get("status", {}).get("previous", ()))), is_wide=True),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of one namespace."""
