"""`pomona key list`: the GatewayKeys of a namespace, or of all; never a key itself."""

import math
from datetime import UTC, datetime
from typing import Final

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

_COUNT_UNITS: Final = (("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000))


@click.command("list")
@click.option("--all-namespaces", "-A", "is_everywhere", is_flag=True, help="List the keys of all namespaces.")
@output_option
@namespaced_cluster_options
def command(*, target: ClusterOptions, is_everywhere: bool, output_format: str) -> None:
    """List the GatewayKeys: what they open, when they end, how much each was used, and why the gateway refuses one.

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


def describe_last_use(key: Obj, now: datetime) -> str:
    """Return when a key was used last: `5m ago`, `not in 30d` of counting, or `unknown`."""
    usage = _read_usage(key)
    if last := usage.get("lastUsedAt"):
        return f"{age_text(last, now)} ago"
    since = usage.get("since")
    return f"not in {age_text(since, now)}" if since else "unknown"


def shorten_count(count: int | None) -> str:
    """Return a number in short, rounded down: 950, 12.3k, 4.5M; empty if it is unknown."""
    if count is None:
        return ""
    for unit, size in _COUNT_UNITS:
        if count >= size:
            return f"{count // (size // 10) / 10:.1f}{unit}"
    return str(count)


def _read_usage(key: Obj) -> Obj:
    return key.get("status", {}).get("usage") or {}


def _limit_column(title: str, field: str) -> TableColumn:
    return TableColumn(title, lambda it: str(it.get("spec", {}).get(field, "")), is_wide=True)


COLUMNS = [
    TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("READY", lambda it: str(find_condition(it, "Ready").get("status", "Unknown"))),
    TableColumn("REASON", lambda it: str(find_condition(it, "Ready").get("reason", ""))),
    TableColumn("SERVICES", lambda it: ",".join(it.get("spec", {}).get("services") or ["all"])),
    TableColumn("EXPIRES", lambda it: describe_end(it, datetime.now(UTC))),
    TableColumn("LAST USED", lambda it: describe_last_use(it, datetime.now(UTC))),
    TableColumn("REQUESTS", lambda it: shorten_count(_read_usage(it).get("requests"))),
    TableColumn("TOKENS", lambda it: shorten_count(_read_usage(it).get("tokens"))),
    _limit_column("REQUESTS/MIN", "requestsPerMinute"),
    _limit_column("TOKENS/MIN", "tokensPerMinute"),
    _limit_column("CONCURRENT", "concurrentRequests"),
    TableColumn("PREVIOUS", lambda it: str(len(it.get("status", {}).get("previous", ()))), is_wide=True),
    TableColumn("AGE", lambda it: age_text(it["metadata"].get("creationTimestamp"))),
    TableColumn("MESSAGE", lambda it: str(find_condition(it, "Ready").get("message", "")), is_wide=True),
]
"""The columns of one namespace."""
