"""`pomona controller`: the in-cluster controller."""

import asyncio
import contextlib
import os
import signal
import ssl
from importlib.metadata import version
from pathlib import Path

import click

from artifacts.address_policy import NETWORKS_VARIABLE, Networks, networks_text
from cli import log
from cli.options import allow_private_sources
from controller.run import Controller, ControllerOptions
from kube import credentials
from kube.client import connect
from kube.kubeconfig import CredentialsError

INHERITED_VARIABLES = ("HF_ENDPOINT",)
"""Environment variables that the Jobs inherit from the controller."""


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Kubeconfig with cluster and credentials. Default: $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config.",
)
@click.option(
    "--image",
    default=f"ghcr.io/pomona-dev/pomona:{version('pomona')}",
    show_default=True,
    help="Image for the Jobs that inspect and download weights; its entry point is pomona.",
)
@click.option(
    "--hosts-ca",
    type=click.Path(path_type=Path),
    help="File of certificate authorities, in PEM form, for hosts that serve https. Default: the system's authorities.",
)
@allow_private_sources
@click.option("--verbose", is_flag=True, help="Also log debug events.")
def command(
    kubeconfig: Path | None, image: str, hosts_ca: Path | None, *, allowed_networks: Networks, verbose: bool
) -> None:
    """Run the controller of Models and InferenceServices.

    \b
    Examples:
      pomona controller                                             (in a pod, as its ServiceAccount)
      pomona controller --kubeconfig controller.kubeconfig --image registry.example/pomona:dev
    """
    log.configure(verbose=verbose)
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    if allowed_networks:
        environment[NETWORKS_VARIABLE] = networks_text(allowed_networks)
    trust = _load_authorities(hosts_ca) if hosts_ca else None
    try:
        asyncio.run(_run(kubeconfig, ControllerOptions(image, environment, trust)))
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error


def _load_authorities(authorities: Path) -> ssl.SSLContext:
    """Return a context that trusts these authorities only. Raises click.ClickException: the file cannot be read."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        message = f"cannot read --hosts-ca {authorities}: {error}: give a file of certificates in PEM form"
        raise click.ClickException(message) from error


async def _run(kubeconfig: Path | None, options: ControllerOptions) -> None:
    """Run until SIGTERM or SIGINT, then release leadership and end."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None  # noqa: S101 - a coroutine of asyncio.run is a task
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with connect(credentials.load(kubeconfig)) as client:
            await Controller(client, lambda: credentials.load(kubeconfig), options).run()
