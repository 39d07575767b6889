"""Wait until the controller has made a key, and print it: alone on standard output, what is said about it beside."""

import asyncio
import contextlib
import sys
from typing import Final

import click

from cli.api_objects import Obj, find_condition
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, run_in_cluster, watch_object
from cli.cluster_options import ClusterOptions
from cli.lazy import program_name
from cli.output import print_note
from crds.gatewaykey import digest_key, key_secret_name, read_key
from kube.errors import NotFound
from kube.resources import GATEWAY_KEYS, SECRETS

UNSEEN_SECONDS: Final = 15.0
"""Time after which a key that no controller has seen is worth a hint."""
NO_KEY: Final = frozenset({"NoGateway", "SecretTaken"})
"""Reasons for which a GatewayKey gets no key by waiting."""


def show_key(target: ClusterOptions, key: Obj, rotation: str = "", *, timeout: float | None) -> None:
    """Wait until the key is there, and print it.

    Args:
        target: the cluster that the user means.
        key: the GatewayKey, as the API server returned it.
        rotation: identifier of the replacement that is waited for; empty: the first key.
        timeout: seconds after which the wait ends with exit code 1; None: no limit.

    Raises:
        click.ClickException: the GatewayKey gets no key; the message has the way out.
    """
    metadata = key["metadata"]
    try:
        text, shown = run_in_cluster(target, lambda cluster: wait_for_key(cluster, key, rotation), timeout=timeout)
    except (KeyboardInterrupt, TimeoutError) as error:
        has_timed_out = isinstance(error, TimeoutError)
        line_end = "" if has_timed_out else "\n"  # the terminal has shown ^C
        command = f"{program_name()} key list{target.render()}"
        print_note(f"{line_end}GatewayKey {metadata['name']} has no new key yet: `{command}` says why")
        sys.exit(1 if has_timed_out else INTERRUPTED_EXIT)

    # The key alone goes to standard output, for KEY=$(pomona key create app).
    print_note(
        f"the key is in Secret {key_secret_name(metadata['name'])} in namespace {metadata['namespace']}, and here:"
    )
    print(text, flush=True)
    former = key.get("status", {}).get("digest", "")
    for previous in shown["status"].get("previous", ()):
        if previous["digest"] == former:
            print_note(f"the former key is valid until {previous['validUntil']}")
    ready = find_condition(shown, "Ready")
    if ready["status"] != "True":
        print_note(f"the gateway does not accept it now: {ready['reason']}: {ready['message']}")


async def wait_for_key(cluster: Cluster, key: Obj, rotation: str) -> tuple[str, Obj]:
    """Return a key, and its GatewayKey as it is then, once the controller has made the key; see `show_key`.

    Raises:
        click.ClickException: the GatewayKey gets no key, or is deleted.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    client, metadata = cluster.client, key["metadata"]
    hint = asyncio.get_running_loop().call_later(
        UNSEEN_SECONDS, print_note, "no controller has seen it so far: does it run?"
    )
    try:
        states = watch_object(client, GATEWAY_KEYS, metadata["name"], metadata["namespace"])
        async with contextlib.aclosing(states):
            async for current in states:
                if current is None or current["metadata"]["uid"] != metadata["uid"]:
                    raise click.ClickException(f"GatewayKey {metadata['name']} was deleted")
                status = current.get("status", {})
                if status.get("observedGeneration", 0) < metadata["generation"]:
                    continue  # the status is not of the spec that was applied
                hint.cancel()
                _report_obstacle(current)
                if "digest" not in status or status.get("rotation", "") != (rotation or status.get("rotation", "")):
                    continue
                text = await _read_key(cluster, metadata)
                if digest_key(text) == status["digest"]:  # else it was replaced again, which the next state shows
                    return text, current
    finally:
        hint.cancel()
    raise AssertionError("a watch has no end")


def _report_obstacle(key: Obj) -> None:
    """Print why the Secret of a GatewayKey is refused. Raises click.ClickException: the GatewayKey gets no key."""
    ready, reconciled = find_condition(key, "Ready"), find_condition(key, "Reconciled")
    if ready.get("reason") in NO_KEY:
        raise click.ClickException(f"GatewayKey {key['metadata']['name']} gets no key: {ready['message']}")
    if reconciled.get("status") == "False":
        print_note(f"waiting: {reconciled['reason']}: {reconciled['message']}")


async def _read_key(cluster: Cluster, metadata: Obj) -> str:
    """Return the key in the Secret of a GatewayKey; empty if there is none. Raises as `Client`."""
    try:
        secret = await cluster.client.get(SECRETS, key_secret_name(metadata["name"]), metadata["namespace"])
    except NotFound:
        return ""
    return read_key(secret).decode(errors="replace")
