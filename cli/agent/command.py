"""`pomona agent`: the metal agent of an off-cluster host."""

import asyncio
import contextlib
import signal
from pathlib import Path

import click

from artifacts.repositories.address_policy import Networks
from cli import log
from cli.agent.owner_policy import owner_policy_options
from cli.lazy import LazyGroup
from cli.options import (
    STATE_FOLDER_TEXT,
    ListenAddressParam,
    PortRange,
    Size,
    allow_private_sources,
    default_state_folder,
)
from gateway.proxy.config import Tls
from kube import credentials
from kube.credentials import Credentials
from kube.kubeconfig import CredentialsError
from metal_agent.agent import run
from metal_agent.cluster.host_identity import FILE_NAME, HostIdentity, read_joined_host
from metal_agent.holds.owner_policy import OwnerPolicy
from metal_agent.options import AgentOptions, StartError

SUBCOMMANDS = {
    "doctor": ("find out why this host does not serve, with the way out", "cli.agent.doctor"),
    "join": ("join a cluster with a code of its administrator", "cli.agent.join"),
    "selftest": ("check that this machine behaves as the agent expects", "cli.agent.selftest"),
    "weights": ("list the weights on this host, or delete some", "cli.agent.weights"),
}


@click.group(
    "agent",
    cls=LazyGroup,
    subcommands=SUBCOMMANDS,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
)
@click.option(
    "--name", help="Name of the MetalHost of this machine. Default: the one that `pomona agent join` joined as."
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Kubeconfig with the credentials of this host. Default: what `pomona agent join` wrote, else as for kubectl.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help=f"Folder for weights, logs and records. Default: {STATE_FOLDER_TEXT}.",
)
@click.option(
    "--address",
    help="Address at which the cluster reaches this host. Default: the address on the route to the API server.",
)
@click.option("--port-range", type=PortRange(), default="18000-18999", show_default=True, help="Ports for services.")
@click.option(
    "--file-root",
    type=click.Path(path_type=Path),
    help="Folder for file:// sources. Without this option, file:// sources are refused.",
)
@allow_private_sources
@click.option(
    "--tls-certificate",
    type=click.Path(path_type=Path),
    help="Serve https with this certificate and its chain, in PEM form. A renewed certificate is reloaded.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path),
    help="Private key of the certificate, in PEM form, without a password.",
)
@click.option("--memory-budget", type=Size(), help="Maximum memory for all models together, such as 12GiB.")
@click.option(
    "--metrics-address",
    type=ListenAddressParam(),
    default="127.0.0.1:17999",
    show_default=True,
    help="Address of the metrics for Prometheus; `off` disables them.",
)
@owner_policy_options
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
    allowed_networks: Networks,
    tls_certificate: Path | None,
    tls_key: Path | None,
    memory_budget: int | None,
    metrics_address: tuple[str, int] | None,
    owner_policy: OwnerPolicy,
    keep_awake: bool,
) -> None:
    """Join this machine to a cluster as a MetalHost, and serve models as native processes.

    The agent may be stopped, killed, restarted and updated at any time: engines keep running, and the next agent adopts
    them.

    \b
    Examples:
      pomona agent join pomona-join-1.eNqrV...
      pomona agent --file-root ~/models
      pomona agent --name studio-1 --kubeconfig ~/.pomona/kubeconfig
      pomona agent selftest
      pomona agent weights
    """
    if ctx.invoked_subcommand:
        return
    folder = (state_dir or default_state_folder()).absolute()
    identity = None if kubeconfig else _read_identity(folder, name)
    if identity:
        name = identity.host
    if not name:
        raise click.UsageError(
            f"this machine has not joined a cluster with --state-dir {folder}: run `pomona agent join CODE`, or give "
            "--name and --kubeconfig"
        )
    log.configure()
    options = AgentOptions(
        name=name,
        folder=folder,
        address=address,
        first_port=port_range[0],
        last_port=port_range[1],
        file_root=file_root.absolute() if file_root else None,
        allowed_networks=allowed_networks,
        memory_budget_bytes=memory_budget,
        metrics_place=metrics_address,
        tls=_read_tls(tls_certificate, tls_key),
        owner_policy=owner_policy,
        keep_awake=keep_awake,
    )
    try:
        granted = identity.credentials() if identity else credentials.load(kubeconfig)
        asyncio.run(_run_until_signalled(granted, options))
    except (StartError, CredentialsError) as error:
        raise click.ClickException(str(error)) from error


def _read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return certificate and key. Raises click.UsageError: one is missing."""
    if certificate and key:
        # The proxy reads the files, and has another working directory.
        return Tls(str(certificate.absolute()), str(key.absolute()))
    if certificate or key:
        raise click.UsageError("--tls-certificate and --tls-key belong together: give both, or none for plain HTTP")
    return None


def _read_identity(folder: Path, name: str | None) -> HostIdentity | None:
    """Return the identity that `pomona agent join` wrote, if it did. Raises click.ClickException."""
    try:
        joined = read_joined_host(folder)
    except OSError as error:
        raise click.ClickException(f"{folder / FILE_NAME}: {error}: make it readable for this user") from error
    if joined is None:
        return None
    if name not in (None, joined.host):
        raise click.UsageError(
            f"this machine has joined as host {joined.host}: leave --name {name} out, join as {name}, or give "
            "--kubeconfig"
        )
    return HostIdentity(folder, joined)


async def _run_until_signalled(granted: Credentials, options: AgentOptions) -> None:
    """Run the agent until SIGTERM or SIGINT, which end the agent only: its engines keep running."""
    task = asyncio.current_task()
    assert task  # noqa: S101 - a coroutine that runs has one
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await run(granted, options)
