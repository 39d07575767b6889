"""`pomona controller`: the in-cluster controller."""

import asyncio
import contextlib
import os
import signal
import ssl
from importlib.metadata import version
from pathlib import Path

import click

from cli import log
from controller.run import Controller, Options
from kube import credentials
from kube.client import connect
from kube.kubeconfig import CredentialsError

HANDED_ON = ("HF_ENDPOINT",)
"""Variables of the controller's own environment that the Jobs get too."""


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Cluster and identity; else $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config.",
)
@click.option(
    "--image",
    default=f"ghcr.io/pomona-dev/pomona:{version('pomona')}",
    show_default=True,
    help="Image with pomona as its entry point, for the Jobs that read and fetch weights.",
)
@click.option(
    "--hosts-ca",
    type=click.Path(path_type=Path),
    help="Certificates, in PEM form, of who may vouch for hosts that serve https; default: the system's.",
)
@click.option("--verbose", is_flag=True, help="Log debugging events too.")
def command(kubeconfig: Path | None, image: str, hosts_ca: Path | None, *, verbose: bool) -> None:
    """Run the in-cluster controller of Models and InferenceServices.

    \b
    Examples:
      pomona controller                                             (in a pod, as its ServiceAccount)
      pomona controller --kubeconfig controller.kubeconfig --image registry.example/pomona:dev
    """
    log.configure(verbose=verbose)
    environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    trust = _trust(hosts_ca) if hosts_ca else None
    try:
        asyncio.run(_run(kubeconfig, Options(image, environment, trust)))
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error


def _trust(authorities: Path) -> ssl.SSLContext:
    """Trust what they vouch for, and nothing else. Raises click.ClickException: there are none to be read."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        message = f"cannot use --hosts-ca {authorities}: {error}: it has to be a file of certificates in PEM form"
        raise click.ClickException(message) from error


async def _run(kubeconfig: Path | None, options: Options) -> None:
    """Run until SIGTERM or SIGINT, then give up leadership and leave."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None  # noqa: S101 - a coroutine of asyncio.run is a task
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with connect(credentials.load(kubeconfig)) as client:
            await Controller(client, lambda: credentials.load(kubeconfig), options).run()
