"""Options and errors of the programs that serve an API in front of a cluster: certificate, address, failed start."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options import EXISTING_FILE
from kube.kubeconfig import CredentialsError

if TYPE_CHECKING:
    from gateway.proxy.config import Tls


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the options `--tls-certificate` and `--tls-key`, which `check_address_and_tls` reads."""
    certificate = click.option(
        "--tls-certificate",
        type=EXISTING_FILE,
        help="Certificate of the API, in PEM form. It is read again when it changes.",
    )
    key = click.option("--tls-key", type=EXISTING_FILE, help="Key of the certificate.")
    return certificate(key(command))


def check_address_and_tls(
    address: tuple[str, int] | None, tls_certificate: Path | None, tls_key: Path | None
) -> "tuple[tuple[str, int], Tls | None]":
    """Return the address, which is None after `--address off`, and the certificate; None: plain HTTP.

    Raises:
        click.UsageError: nothing would be served, or only one of certificate and key is given.
    """
    from gateway.proxy.config import Tls  # noqa: PLC0415 - not needed for --help

    if address is None:
        raise click.UsageError("--address off would serve nothing")
    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key go together")
    return address, Tls(str(tls_certificate), str(tls_key)) if tls_certificate is not None else None


@contextlib.contextmanager
def report_failed_start() -> Iterator[None]:
    """Report why a program could not begin to serve.

    Raises:
        click.ClickException: it has no credentials for the cluster, or an address cannot be used.
    """
    try:
        yield
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"--address or --metrics-address cannot be served: {error}") from error
