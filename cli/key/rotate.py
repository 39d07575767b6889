"""`pomona key rotate`: replace the key of a GatewayKey, and print the new one."""

import secrets
from datetime import UTC, datetime
from typing import Any

import click

from cli.api_objects import Obj
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_keys
from cli.key.key_progress import show_key
from cli.options import OVERLAP, timeout_option
from crds.meta import CLI_FIELD_MANAGER, ROTATE_KEY, digest_request
from kube.resources import GATEWAY_KEYS
from kube.time import rfc3339


@click.command("rotate")
@click.argument("name", shell_complete=complete_keys)
@click.option(
    "--overlap",
    "overlap_seconds",
    type=OVERLAP,
    help="Time for which the former key stays valid, such as 12h, or 0, also at later replacements. Default: "
    "spec.overlapSeconds of the GatewayKey as it is.",
)
@timeout_option
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, overlap_seconds: int | None, timeout: float | None) -> None:
    """Replace the key of the GatewayKey NAME, wait for the new one, and print it.

    The key alone goes to standard output. The former key stays valid for a while, so that clients can change over:
    with --overlap 0 it ends at once.

    \b
    Examples:
      pomona key rotate app
      pomona key rotate app --overlap 0
    """
    value = f"{rfc3339(datetime.now(UTC))}-{secrets.token_hex(4)}"
    key = run_in_cluster(target, lambda cluster: _request_rotation(cluster, name, value, overlap_seconds))
    show_key(target, key, digest_request(value), timeout=timeout)


async def _request_rotation(cluster: Cluster, name: str, value: str, overlap_seconds: int | None) -> Obj:
    """Ask the controller to replace a key by the annotation, and return the GatewayKey. Raises as `read_object`."""
    patch: dict[str, Any] = {"metadata": {"annotations": {ROTATE_KEY: value}}}
    if overlap_seconds is not None:
        patch["spec"] = {"overlapSeconds": overlap_seconds}
    await read_object(cluster.client, GATEWAY_KEYS, name, cluster.namespace)
    return await cluster.client.patch_merge(
        GATEWAY_KEYS, name, cluster.namespace, patch, field_manager=CLI_FIELD_MANAGER
    )
