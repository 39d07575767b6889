"""`pomona node-agent`: the agent of one node of the cluster."""

import asyncio
from pathlib import Path
from typing import Any, Final

import click

from cli.options import (
    EXISTING_FILE,
    duration_between,
    kubeconfig_option,
    metric_prefix_option,
    name_type,
    prefix_type,
    verbose_option,
)
from cli.stop_signals import serve_until_stopped
from crds.meta import GROUP, LONGEST_NAME, NAME_PATTERN
from devices.node.memory_bandwidth import measure_memory_bandwidth

_PORT: Final = click.IntRange(0, 65535)
_FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--node-name",
    envvar="NODE_NAME",
    show_envvar=True,
    required=True,
    type=name_type(NAME_PATTERN, LONGEST_NAME, "is not a name of a Node: give one of `kubectl get nodes`"),
    help="Name of the Node on which this agent runs; in a pod, spec.nodeName by the downward API.",
)
@kubeconfig_option
@click.option(
    "--interval",
    "interval_seconds",
    # A heartbeat follows a probe, and facts are stale 150 s after one.
    type=duration_between(1.0, 60.0, "facts of a node are reported each minute"),
    default="30s",
    show_default=True,
    help="Time from one probe of the hardware to the next, 1s to 60s. Facts are written each minute, and at once if "
    "the devices are others.",
)
@click.option(
    "--label-prefix",
    default=GROUP,
    show_default=True,
    type=prefix_type(f"is not the prefix of a label: give a DNS name such as {GROUP}"),
    help="Prefix of the labels of the Node, such as flexinfer.ai. The policy pomona-node-agents names it, too: set "
    "nodeAgent.labelPrefix of the chart.",
)
@metric_prefix_option
@click.option(
    "--metrics-port",
    type=_PORT,
    default=9100,
    show_default=True,
    help="Port of /metrics and /healthz, on all addresses; 0 turns them off.",
)
@click.option("--port", "rest_port", type=_PORT, default=8787, show_default=True, help="Port of the REST API; 0: none.")
@click.option(
    "--api-key-file",
    type=EXISTING_FILE,
    help="File with the key that the REST API asks for, as a bearer token. Default: no key, and the REST API is served "
    "on loopback only.",
)
@click.option("--proc-root", type=_FOLDER, default="/proc", show_default=True, help="Folder of the node's /proc.")
@click.option("--sys-root", type=_FOLDER, default="/sys", show_default=True, help="Folder of the node's /sys.")
@click.option(
    "--disk-root",
    type=_FOLDER,
    default="/",
    show_default=True,
    help="Folder in the file system whose size is reported: that of the node's pods, such as an emptyDir.",
)
@verbose_option
def command(
    kubeconfig: Path | None, *, proc_root: Path, sys_root: Path, disk_root: Path, verbose: bool, **given: Any
) -> None:
    """Report the hardware of a node as its NodeFitness, its labels and metrics.

    \b
    Examples:
      pomona node-agent                                     (in a pod with NODE_NAME, as its ServiceAccount)
      pomona node-agent --node-name gpu-1 --kubeconfig node-agent.kubeconfig
      pomona node-agent --node-name gpu-1 --label-prefix flexinfer.ai --metric-prefix flexinfer
    """
    memory_bandwidth = measure_memory_bandwidth()
    # What the agent imports takes 25 MiB, as much as the buffers of the measurement: they are freed before.
    from cli import log  # noqa: PLC0415 - as said
    from devices.node_hardware import NodeRoots  # noqa: PLC0415
    from kube import credentials  # noqa: PLC0415
    from kube.kubeconfig import CredentialsError  # noqa: PLC0415
    from node_agent.options import NodeAgentOptions  # noqa: PLC0415
    from node_agent.rest import read_key  # noqa: PLC0415
    from node_agent.run import run  # noqa: PLC0415

    # `given` has the other options, which are named like the fields of NodeAgentOptions.
    log.configure(verbose=verbose)
    options = NodeAgentOptions(roots=NodeRoots(proc=proc_root, sys=sys_root, disk=disk_root), **given)
    try:
        if options.api_key_file:  # an unusable key ends the command before anything is served
            read_key(options.api_key_file)
        asyncio.run(serve_until_stopped(run(credentials.load(kubeconfig), options, memory_bandwidth)))
    except (CredentialsError, OSError) as error:
        raise click.ClickException(str(error)) from error
