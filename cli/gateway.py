"""`pomona gateway`: one address for all services of a cluster, for clients with keys."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.options import EXISTING_FILE, LISTEN_ADDRESS, PATH, kubeconfig_option, load_hosts_ca, verbose_option
from cli.served_api import check_address_and_tls, report_failed_start, tls_options

if TYPE_CHECKING:
    from gateway.cluster.gateway_process import GatewayOptions


@click.command("gateway")
@kubeconfig_option
@click.option(
    "--address",
    type=LISTEN_ADDRESS,
    default="127.0.0.1:8080",
    show_default=True,
    help="Address of the API. Clients send it keys: give it a certificate where others listen in.",
)
@click.option(
    "--metrics-address",
    type=LISTEN_ADDRESS,
    default="off",
    show_default=True,
    help="Address of /healthz, /readyz and /metrics, which ask for no key.",
)
@tls_options
@click.option(
    "--hosts-ca",
    type=PATH,
    help="File of certificate authorities, in PEM form, for hosts that serve https. Default: the system's authorities.",
)
@click.option(
    "--redis-url-file",
    type=EXISTING_FILE,
    help="File with the URL of a Redis or Valkey, such as redis://:PASSWORD@HOST:6379/0, in which all replicas count "
    "limits together. Default: each replica has its share of them.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, 86_400),
    default=600.0,
    show_default=True,
    help="Seconds for running requests after SIGTERM.",
)
@verbose_option
def command(
    kubeconfig: Path | None,
    *,
    address: tuple[str, int] | None,
    metrics_address: tuple[str, int] | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    hosts_ca: Path | None,
    redis_url_file: Path | None,
    drain_seconds: float,
    verbose: bool,
) -> None:
    """Serve all services of a cluster at one address, to clients with keys: pods and hosts alike.

    A request names the service as its model, and `pomona key create` makes the key. It reads the cluster and writes
    nothing.

    \b
    Examples:
      pomona gateway --kubeconfig ~/.kube/config
      pomona gateway --address 0.0.0.0:8080 --metrics-address 0.0.0.0:8081
    """
    import uvloop  # noqa: PLC0415 - not needed for --help

    from cli import log  # noqa: PLC0415 - same
    from gateway.cluster.gateway_process import GatewayOptions  # noqa: PLC0415 - same
    from gateway.event_log import log_libraries  # noqa: PLC0415 - same

    # 1. Check the options.
    served_at, tls = check_address_and_tls(address, tls_certificate, tls_key)
    trust = load_hosts_ca(hosts_ca) if hosts_ca is not None else None
    redis_url = read_redis_url(redis_url_file) if redis_url_file is not None else None

    # 2. Serve until a signal.
    log.configure(verbose=verbose)
    log_libraries()
    options = GatewayOptions(served_at, metrics_address, tls, trust, drain_seconds, redis_url)
    with report_failed_start():
        uvloop.run(_run(kubeconfig, options))


def read_redis_url(path: Path) -> str:
    """Return the URL in a file, which is no argument because it may have a password.

    Raises:
        click.ClickException: it cannot be used.
    """
    try:
        from gateway.cluster.redis_limits import connect_store  # noqa: PLC0415 - an extra

        url = path.read_text().strip()
        connect_store(url)
    except ModuleNotFoundError as error:
        message = "--redis-url-file needs the extra `gateway`: pip install 'pomona[gateway]'"
        raise click.ClickException(message) from error
    except (OSError, ValueError) as error:
        message = f"--redis-url-file {path} has no URL such as redis://:PASSWORD@HOST:6379/0"
        raise click.ClickException(message) from error
    return url


async def _run(kubeconfig: Path | None, options: "GatewayOptions") -> None:
    """Connect to the API server, and serve until a signal."""
    from gateway.cluster.gateway_process import run  # noqa: PLC0415 - not needed for --help
    from kube import credentials  # noqa: PLC0415 - same
    from kube.client import connect  # noqa: PLC0415 - same

    async with connect(credentials.load(kubeconfig)) as client:
        await run(client, options)
