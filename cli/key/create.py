"""`pomona key create`: make a GatewayKey, and print its key."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from cli.api_objects import Obj
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.key.key_progress import show_key
from cli.lazy import program_name
from cli.options import DURATION, OVERLAP, timeout_option
from cli.output import print_note
from kube.errors import Conflict
from kube.resources import GATEWAY_KEYS
from kube.time import rfc3339


@click.command("create")
@click.argument("name")
@click.option(
    "--services",
    multiple=True,
    metavar="PATTERN",
    help="Services that the key opens: NAME of this namespace, or NAMESPACE/NAME; * stands for any letters but /. "
    "Repeatable. Default: all that the namespace may use.",
)
@click.option(
    "--expires", "expires_seconds", type=DURATION, help="Time until the key ends, such as 30d. Default: never."
)
@click.option(
    "--overlap",
    "overlap_seconds",
    type=OVERLAP,
    help="Time for which the key stays valid after it is replaced, such as 12h. Default: 1d.",
)
@click.option("--requests-per-minute", type=click.IntRange(1), help="The most requests in a minute.")
@click.option("--tokens-per-minute", type=click.IntRange(1), help="The most tokens of prompts and answers in a minute.")
@click.option("--concurrent-requests", type=click.IntRange(1), help="The most requests at once.")
@timeout_option
@namespaced_cluster_options
def command(
    name: str,
    *,
    target: ClusterOptions,
    services: tuple[str, ...],
    expires_seconds: float | None,
    overlap_seconds: int | None,
    timeout: float | None,
    **limits: Any,
) -> None:
    """Make the GatewayKey NAME, wait for its key, and print it.

    The key alone goes to standard output, all else to standard error. It stays in Secret NAME-key, for who may read
    Secrets of the namespace. Ctrl-C ends the wait only.

    \b
    Examples:
      pomona key create app
      pomona key create app --services 'chat-*' --services shared/embed --expires 30d
      pomona key create batch --requests-per-minute 600 --tokens-per-minute 200000 --concurrent-requests 8
      LLM_API_KEY=$(pomona key create app)
    """
    spec: dict[str, Any] = {
        "services": list(services),
        "expiresAt": _find_end(expires_seconds, datetime.now(UTC)),
        "overlapSeconds": overlap_seconds,
        "requestsPerMinute": limits["requests_per_minute"],
        "tokensPerMinute": limits["tokens_per_minute"],
        "concurrentRequests": limits["concurrent_requests"],
    }
    stated = {field: value for field, value in spec.items() if value not in (None, [])}
    key = run_in_cluster(target, lambda cluster: _create(cluster, name, stated))
    print_note(f"made GatewayKey {name} in namespace {key['metadata']['namespace']}")
    show_key(target, key, timeout=timeout)


def _find_end(seconds: float | None, now: datetime) -> str | None:
    """Return the time at which a key ends that is valid for these seconds. Raises click.BadParameter."""
    if seconds is None:
        return None
    try:
        return rfc3339(now + timedelta(seconds=seconds))
    except OverflowError as error:
        raise click.BadParameter("leave it out for a key that never ends", param_hint="'--expires'") from error


async def _create(cluster: Cluster, name: str, spec: Mapping[str, Any]) -> Obj:
    """Create a GatewayKey. Raises click.ClickException: there is one of this name."""
    metadata = {"name": name, "namespace": cluster.namespace}
    try:
        return await cluster.client.create(GATEWAY_KEYS, {"metadata": metadata, "spec": spec})
    except Conflict as error:
        if error.reason != "AlreadyExists":
            raise
        command = f"{program_name()} key rotate {name}{cluster.target.render()}"
        message = f"GatewayKey {name} exists in namespace {cluster.namespace}: choose another name, or replace its key"
        raise click.ClickException(f"{message}: {command}") from error
