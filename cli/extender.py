"""`pomona extender`: the scheduler extender, beside a kube-scheduler."""

from pathlib import Path
from typing import Final

import click
import uvloop

from cli import log
from cli.options import LISTEN_ADDRESS, gather_options, kubeconfig_option, prefix_type, vendors_option, verbose_option
from cli.stop_signals import serve_until_stopped
from extender.node_facts import DEFAULT_ANNOTATION_PREFIX
from extender.run import DEFAULT_PORT, LOOPBACK, ExtenderOptions, run
from extender.score import ScoreWeights
from kube import credentials
from kube.client import connect
from kube.kubeconfig import CredentialsError

_DEFAULTS: Final = ScoreWeights()


@click.command()
@gather_options("weights", ScoreWeights)
@gather_options("options", ExtenderOptions)
@kubeconfig_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of /filter and /prioritize.",
)
@click.option(
    "--address",
    default=LOOPBACK,
    show_default=True,
    help="Address of that port. The default is for a scheduler in the same pod; 0.0.0.0 is reached by every pod.",
)
@click.option(
    "--metrics-address",
    type=LISTEN_ADDRESS,
    default="off",
    show_default=True,
    help="Further address of /healthz, /readyz and /metrics alone, for probes and Prometheus.",
)
@click.option(
    "--tps-weight",
    "tps",
    type=float,
    default=_DEFAULTS.tps,
    show_default=True,
    envvar="SCHED_TPS_WEIGHT",
    show_envvar=True,
    help="Weight of the speed, relative to the fastest device class.",
)
@click.option(
    "--util-weight",
    "util",
    type=float,
    default=_DEFAULTS.util,
    show_default=True,
    envvar="SCHED_UTIL_WEIGHT",
    show_envvar=True,
    help="Weight of the utilization, which counts against a node.",
)
@click.option(
    "--cost-weight",
    "cost",
    type=float,
    default=_DEFAULTS.cost,
    show_default=True,
    envvar="SCHED_COST_WEIGHT",
    show_envvar=True,
    help="Weight of the cost relative to the dearest node, which counts against a node.",
)
@click.option(
    "--annotation-prefix",
    default=DEFAULT_ANNOTATION_PREFIX,
    show_default=True,
    type=prefix_type("is no prefix of annotations: give one such as flexinfer.ai"),
    help="Prefix of the annotations gpu.util and cost of nodes; flexinfer.ai for those of that project.",
)
@vendors_option
@verbose_option
def command(kubeconfig: Path | None, *, options: ExtenderOptions, verbose: bool) -> None:
    """Score and filter nodes for a kube-scheduler, by the speed of the model that a pod serves.

    It reads the cluster and writes nothing. docs/extender.md has the configuration of the scheduler.

    \b
    Examples:
      pomona extender                                               (in the pod of a scheduler)
      pomona extender --kubeconfig ~/.kube/config --port 18888      (beside a scheduler on this machine)
      pomona extender --tps-weight 1 --util-weight 0 --cost-weight 0 --annotation-prefix flexinfer.ai
    """
    if problem := options.weights.find_problem():
        raise click.BadParameter(problem, param_hint="'--tps-weight', '--util-weight', '--cost-weight'")
    log.configure(verbose=verbose)
    try:
        uvloop.run(serve_until_stopped(_run(kubeconfig, options)))
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"{options.address}:{options.port} or --metrics-address cannot be served: {error}"
        ) from error


async def _run(kubeconfig: Path | None, options: ExtenderOptions) -> None:
    """Connect to the API server, and answer schedulers until this is cancelled."""
    async with connect(credentials.load(kubeconfig)) as client:
        await run(client, options)
