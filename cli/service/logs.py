"""`pomona logs`: what the engines of a service have logged, on this machine, in pods and on hosts."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import click

from cli.api_objects import Obj, may_be_on_hosts
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_served
from cli.lazy import program_name
from cli.machine.instance import OR_START, choose_instance
from cli.options import state_folder_option
from cli.output import show_raw
from crds.meta import DEFAULT_CONTAINER, LABEL_SERVICE
from crds.text import escape_controls
from kube.errors import ApiError, Forbidden
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, PODS

_WITHOUT_LOG: Final = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND})
"""Answers about a container that has not started, and about a pod that is gone."""


@click.command("logs")
@click.argument("name", shell_complete=complete_served)
@click.option("--follow", "-f", is_flag=True, help="Go on printing what engines here or in pods log, until Ctrl-C.")
@click.option("--replica", help="Number or name of one replica. Default: all.")
@click.option("--tail", "tail", type=click.IntRange(min=0), help="Last lines only, so many of each replica.")
@state_folder_option
@namespaced_cluster_options
def command(
    name: str,
    *,
    target: ClusterOptions,
    follow: bool,
    replica: str | None,
    tail: int | None,
    state_dir: Path | None,
) -> None:
    """Print the logs of the engines of the service NAME.

    The running `pomona up` of this machine is asked, unless -n, --context or --kubeconfig names a cluster.

    Of an engine on a host, the cluster has the last lines before its last exit only; the command names the one that
    prints all of them on the host.

    \b
    Examples:
      pomona logs chat
      pomona logs chat -f --replica 0 --tail 20
    """
    if instance := choose_instance(target, state_dir):
        from cli.machine.logs import print_logs_here  # noqa: PLC0415 - not needed for a cluster

        print_logs_here(instance, name, replica, follow=follow, tail=tail)
        return
    try:
        run_in_cluster(
            target,
            lambda cluster: _print_logs(cluster, name, replica, follow=follow, tail=tail),
            instead=OR_START,
        )
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT)


async def _print_logs(cluster: Cluster, name: str, replica: str | None, *, follow: bool, tail: int | None) -> None:
    """Print the logs of one replica or of all.

    Those of pods are printed at the same time; of an engine on a host, the cluster has only a part of the log.

    Args:
        cluster: the cluster.
        name: the service.
        replica: number or name of one replica; None: all.
        follow: go on until the logs of the pods end.
        tail: how many last lines of each; None: all.
    """
    # 1. Find the replicas.
    client, namespace = cluster.client, cluster.namespace
    service = await read_object(client, INFERENCE_SERVICES, name, namespace)
    label = f"{LABEL_SERVICE}={name}"
    pods = (await client.list(PODS, namespace, label_selector=label)).items
    try:
        processes = (await client.list(METAL_PROCESSES, namespace, label_selector=label)).items
    except Forbidden:
        # Without the right to read processes, the logs of pods are still shown, if there may be some.
        if not pods and may_be_on_hosts(service):
            raise
        processes = []
    replicas = sorted([*pods, *processes], key=lambda instance: str(instance["metadata"]["name"]))
    if not replicas:
        says = f"`{program_name()} status {name}{cluster.target.render()}` says what it waits for"
        raise click.ClickException(f"{name} has no replica yet: {says}")

    cluster.say_asked()

    # 2. Print their logs; a prefix names the replica if there are several.
    chosen = choose_replicas(name, replicas, replica)
    has_prefix = len(chosen) > 1
    streams = []
    for instance in chosen:
        prefix = f"[{instance['metadata']['name']}] " if has_prefix else ""
        if instance["kind"] == "Pod":
            streams.append(print_pod_log(cluster, instance, prefix, follow=follow, tail=tail))
        else:
            print_process_log(instance, prefix, tail)
    await asyncio.gather(*streams)


def choose_replicas(name: str, replicas: Sequence[Obj], wanted: str | None) -> list[Obj]:
    """Return the wanted replica, or all.

    Args:
        name: the service.
        replicas: its pods and MetalProcesses.
        wanted: number or name of one; None: all.

    Raises:
        click.ClickException: there is none such.
    """
    if wanted is None:
        return list(replicas)

    # The number of a replica is its place among `replicas`, from 0 on.
    names = [replica["metadata"]["name"] for replica in replicas]
    matching = [replica for number, replica in enumerate(replicas) if wanted in {str(number), names[number]}]
    if not matching:
        there = ", ".join(f"{number} ({replica})" for number, replica in enumerate(names))
        raise click.ClickException(f"{name} has no replica {wanted}: choose {there}")
    return matching


async def print_pod_log(cluster: Cluster, pod: Obj, prefix: str, *, follow: bool, tail: int | None) -> None:
    """Print the log of the engine in a pod, with `follow` until it ends; say on standard error that it has none.

    The prefix names the pod if there are others, whose logs go on also when the node of this one does not answer.

    Raises:
        BrokenPipeError: nobody reads the output any more.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    # 1. The container of the engine. A pod that a user labelled may have no annotation that names it.
    name = pod["metadata"]["name"]
    annotations, containers = pod["metadata"].get("annotations", {}), pod["spec"]["containers"]
    container = annotations.get(DEFAULT_CONTAINER) or containers[0]["name"]
    if not pod["spec"].get("nodeName"):
        print(f"{prefix}{name} is on no node yet, and has no log", file=sys.stderr)
        return

    # 2. Its log.
    lines = cluster.client.stream_log(name, cluster.namespace, container, follow=follow, tail_lines=tail)
    try:
        # A reader that is gone, such as `head`, ends the command while the log is still open.
        async with contextlib.aclosing(lines):
            async for line in lines:
                print(prefix + show_raw(line.decode(errors="replace")), flush=follow)
    except ApiError as error:
        # A node that does not answer hides only its own pods: the logs of the others, which a prefix shows, go on.
        # _WITHOUT_LOG (400, 404): the container has no log yet, or the pod is gone.
        is_kubelet_unreachable = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        others_go_on = is_kubelet_unreachable and prefix
        if error.status not in _WITHOUT_LOG and not others_go_on:
            raise
        print(f"{prefix}{escape_controls(error.message)}", file=sys.stderr)


def print_process_log(process: Obj, prefix: str, tail: int | None) -> None:
    """Print what the cluster knows of the log of an engine on a host, and where all of it is."""
    metadata, status, spec = process["metadata"], process.get("status", {}), process["spec"]
    host = spec.get("hostName")
    if not host:
        print(f"{prefix}{metadata['name']} is on no host yet, and has no log", file=sys.stderr)
        return
    lines = status.get("lastExit", {}).get("log", "").splitlines()
    first = 0 if tail is None else max(0, len(lines) - tail)
    for line in lines[first:]:
        print(prefix + show_raw(line))
    what = "the lines above are from before its last exit" if lines else "the engine has not exited so far"
    command = f"pomona agent logs --engine {metadata['name']}"  # kubectl is not on that host
    print(f"{prefix}{what}; the whole log is on host {host}: {command}", file=sys.stderr)
