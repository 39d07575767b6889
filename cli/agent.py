"""`pomona agent`: the metal agent of an off-cluster host."""

import asyncio
import contextlib
import ipaddress
import signal
from pathlib import Path
from typing import Final

import click

from cli import log
from cli.lazy import LazyGroup
from cli.size import Size
from cli.state import SHOWN, default_state_folder
from gateway.proxy.config import Tls
from kube import credentials
from kube.kubeconfig import CredentialsError
from metal_agent.agent import run
from metal_agent.start import Options, StartError

LAST_PORT: Final = 65535


class PortRange(click.ParamType[tuple[int, int]]):
    """FIRST-LAST."""

    name = "FIRST-LAST"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Read the two ports."""
        if isinstance(value, tuple):
            return value
        first, _, last = str(value).partition("-")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= LAST_PORT):
            self.fail(f"{value!r} is no range of ports such as 18000-18999", param, ctx)
        return int(first), int(last)


class Place(click.ParamType[tuple[str, int] | None]):
    """ADDRESS:PORT, or off."""

    name = "ADDRESS:PORT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int] | None:
        """Read address and port."""
        if isinstance(value, tuple) or value == "off":
            return value if isinstance(value, tuple) else None
        address, _, port = str(value).rpartition(":")
        try:
            return str(ipaddress.ip_address(address.strip("[]"))), check_port(port)
        except ValueError:
            self.fail(f"{value!r} is no address and port such as 127.0.0.1:17999, nor off", param, ctx)


def check_port(text: str) -> int:
    """Read a port. Raises ValueError."""
    if not (text.isdecimal() and 0 < int(text) <= LAST_PORT):
        raise ValueError(text)
    return int(text)


SUBCOMMANDS = {
    "selftest": ("look at everything that the agent relies on, beside what it expects", "cli.selftest"),
    "weights": ("list the weights on this host, or delete some", "cli.weights"),
}


@click.group(
    "agent",
    cls=LazyGroup,
    subcommands=SUBCOMMANDS,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
)
@click.option("--name", help="Name of this host's MetalHost.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Credentials of this host; default as kubectl's.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help=f"What the agent keeps: weights, logs, records. Default: {SHOWN}.",
)
@click.option(
    "--address", help="Address at which the cluster reaches this host; default: on the route to its API server."
)
@click.option("--port-range", type=PortRange(), default="18000-18999", show_default=True, help="Ports for services.")
@click.option("--file-root", type=click.Path(path_type=Path), help="Folder below which file:// sources are allowed.")
@click.option(
    "--tls-certificate",
    type=click.Path(path_type=Path),
    help="Have services speak https: the certificate and its chain, in PEM form; read again when it is renewed.",
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its key, in PEM form and without a password.")
@click.option("--memory-budget", type=Size(), help="Memory that models may use in all, such as 12GiB.")
@click.option(
    "--metrics-address",
    type=Place(),
    default="127.0.0.1:17999",
    show_default=True,
    help="For Prometheus; off: nowhere.",
)
@click.pass_context
def command(
    ctx: click.Context,
    *,
    name: str | None,
    kubeconfig: Path | None,
    state_dir: Path | None,
    address: str | None,
    port_range: tuple[int, int],
    file_root: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    memory_budget: int | None,
    metrics_address: tuple[str, int] | None,
) -> None:
    """Serve models as native processes of this machine, as its MetalHost in the cluster.

    The agent may be stopped, killed, restarted and updated at any time: what it runs goes on and is taken over.

    \b
    Examples:
      pomona agent --name studio-1 --kubeconfig ~/.pomona/kubeconfig --file-root ~/models
      pomona agent selftest
      pomona agent weights
    """
    if ctx.invoked_subcommand:
        return
    if not name:
        raise click.MissingParameter(param_hint="'--name'", param_type="option")
    log.configure()
    options = Options(
        name=name,
        folder=(state_dir or default_state_folder()).absolute(),
        address=address,
        first_port=port_range[0],
        last_port=port_range[1],
        file_root=file_root.absolute() if file_root else None,
        memory_budget_bytes=memory_budget,
        metrics_place=metrics_address,
        tls=_tls(tls_certificate, tls_key),
    )
    try:
        asyncio.run(_until_signalled(kubeconfig, options))
    except (StartError, CredentialsError) as error:
        raise click.ClickException(str(error)) from error


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return the pair. Raises click.UsageError: there is one without the other."""
    if certificate and key:
        # The proxy, which reads them, has a folder of its own.
        return Tls(str(certificate.absolute()), str(key.absolute()))
    if certificate or key:
        raise click.UsageError("--tls-certificate and --tls-key belong together: give both, or none for plain HTTP")
    return None


async def _until_signalled(kubeconfig: Path | None, options: Options) -> None:
    """Run the agent; SIGTERM and SIGINT end it alone, and nothing that it runs."""
    task = asyncio.current_task()
    assert task  # noqa: S101 - a coroutine that runs has one
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await run(credentials.load(kubeconfig), options)
