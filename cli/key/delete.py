"""`pomona key delete`: delete a GatewayKey with its Secret."""

import click

from cli.api_objects import has_condition
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_keys
from cli.confirmation import confirm
from kube.resources import GATEWAY_KEYS


@click.command("delete")
@click.argument("name", shell_complete=complete_keys)
@click.option("--yes", "-y", is_flag=True, help="Do not ask, even if the gateway accepts the key now.")
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, yes: bool) -> None:
    """Delete the GatewayKey NAME, with all of its keys: requests of its clients are refused then.

    To refuse them for a while only, set spec.suspend of the GatewayKey to true.

    \b
    Example:
      pomona key delete app
    """
    run_in_cluster(target, lambda cluster: _delete(cluster, name, is_certain=yes))


async def _delete(cluster: Cluster, name: str, *, is_certain: bool) -> None:
    """Delete a GatewayKey, and ask first if the gateway accepts its key, unless `is_certain`."""
    client, namespace = cluster.client, cluster.namespace
    key = await read_object(client, GATEWAY_KEYS, name, namespace)
    if not is_certain and has_condition(key, "Ready"):
        confirm(f"the gateway accepts {name} in namespace {namespace} now", "Delete it?")
    # With the uid, a GatewayKey of the same name that was made meanwhile stays.
    await client.delete(GATEWAY_KEYS, name, namespace, uid=key["metadata"]["uid"])
    print(f"deleted GatewayKey {name} in namespace {namespace}")
