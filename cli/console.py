"""`pomona console api`: the density API as a program of its own."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.options import EXISTING_FILE, LISTEN_ADDRESS, kubeconfig_option, vendors_option, verbose_option
from cli.served_api import check_address_and_tls, report_failed_start, tls_options
from cli.stop_signals import serve_until_stopped
from devices.vendors import Vendors

if TYPE_CHECKING:
    from console.run import ConsoleOptions


@click.group("console")
def command() -> None:
    """Run the HTTP API of what fits where, how fast, and at what cost.

    \b
    Examples:
      pomona console api --kubeconfig ~/.kube/config
    """


@command.command("api", short_help="answer users of the cluster by their tokens")
@kubeconfig_option
@click.option(
    "--address",
    type=LISTEN_ADDRESS,
    default="127.0.0.1:8090",
    show_default=True,
    help="Address of the API. Clients send it tokens of the cluster: give it a certificate where others listen in.",
)
@click.option(
    "--metrics-address",
    type=LISTEN_ADDRESS,
    default="off",
    show_default=True,
    help="Address of /healthz, /readyz and /metrics, which ask for no token.",
)
@tls_options
@click.option(
    "--prices",
    "prices_path",
    type=EXISTING_FILE,
    help="YAML file with currency, perKwh, and watts and perHour by device.",
)
@vendors_option
@verbose_option
def api(
    kubeconfig: Path | None,
    *,
    address: tuple[str, int] | None,
    metrics_address: tuple[str, int] | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    prices_path: Path | None,
    vendors: Vendors,
    verbose: bool,
) -> None:
    """Answer over HTTP what fits where, how fast, and at what cost, for users of the cluster by their tokens.

    It reads the cluster and writes nothing. The API server reviews each token, and RBAC decides: a caller may list
    NodeFitness to see nodes, and sees Models and costs of namespaces whose InferenceServices the caller
    may list.

    \b
    Examples:
      pomona console api --kubeconfig ~/.kube/config
      pomona console api --address 0.0.0.0:8090 --metrics-address 0.0.0.0:8080 --prices prices.yaml
    """
    import uvloop  # noqa: PLC0415 - not needed for --help

    from cli import log  # noqa: PLC0415 - same
    from cli.density.reading import load_prices  # noqa: PLC0415 - same
    from console.run import ConsoleOptions  # noqa: PLC0415 - same

    # 1. Check the options.
    served_at, tls = check_address_and_tls(address, tls_certificate, tls_key)

    # 2. Serve until a signal.
    log.configure(verbose=verbose)
    options = ConsoleOptions(served_at, metrics_address, vendors, load_prices(prices_path), tls)
    with report_failed_start():
        uvloop.run(serve_until_stopped(_run(kubeconfig, options)))


async def _run(kubeconfig: Path | None, options: "ConsoleOptions") -> None:
    """Connect to the API server, and serve the API until this is cancelled."""
    from console.run import run  # noqa: PLC0415 - not needed for --help
    from kube import credentials  # noqa: PLC0415 - same
    from kube.client import connect  # noqa: PLC0415 - same

    async with connect(credentials.load(kubeconfig)) as client:
        await run(client, options)
