"""The options of an agent, which `pomona agent` reads and `pomona agent install` passes on to a service."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from artifacts.repositories.address_policy import Networks
from cli.agent.owner_policy import owner_policy_options, render_owner_policy
from cli.options import (
    LISTEN_ADDRESS,
    PATH,
    PORT_RANGE,
    SIZE,
    allow_private_sources,
    default_state_folder,
    metric_prefix_option,
    state_folder_option,
)
from crds.meta import METRIC_PREFIX
from gateway.proxy.config import Tls
from launchd.service_definition import STATE_OPTION
from metal_agent.holds.owner_policy import OwnerPolicy
from metal_agent.options import AgentOptions, OptionsError, StartError

if TYPE_CHECKING:
    from metal_agent.cluster.host_identity import HostIdentity

_OPTIONS: Final = (
    click.option("--name", help="Name of the MetalHost of this machine. Default: that of `pomona agent join`."),
    click.option(
        "--kubeconfig",
        type=PATH,
        help="Kubeconfig with the credentials of this host. Default: what `pomona agent join` wrote, else as for "
        "kubectl.",
    ),
    state_folder_option,
    click.option(
        "--address",
        help="Address at which the cluster reaches this host. Default: the address on the route to the API server.",
    ),
    click.option("--port-range", type=PORT_RANGE, default="18000-18999", show_default=True, help="Ports for services."),
    click.option("--file-root", type=PATH, help="Folder for file:// sources. Default: file:// sources are refused."),
    allow_private_sources,
    click.option(
        "--tls-certificate",
        type=PATH,
        help="Serve https with this certificate and its chain, in PEM form. A renewed certificate is reloaded.",
    ),
    click.option("--tls-key", type=PATH, help="Private key of the certificate, in PEM form, without a password."),
    click.option("--memory-budget", type=SIZE, help="Maximum memory for all models together, such as 12GiB."),
    click.option(
        "--metrics-address",
        type=LISTEN_ADDRESS,
        default="127.0.0.1:17999",
        show_default=True,
        help="Address of the metrics for Prometheus; `off` disables them.",
    ),
    metric_prefix_option,
    click.option(
        "--benchmarks/--no-benchmarks",
        default=True,
        show_default=True,
        help="Measure the speed of each model once, for about half a minute, while this machine serves nothing.",
    ),
)


def agent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of an agent; it gets them as the fields of AgentArguments."""
    command = owner_policy_options(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class AgentArguments:
    """The options of an agent as they were given."""

    name: str | None
    kubeconfig: Path | None
    state_dir: Path | None
    address: str | None
    port_range: tuple[int, int]
    file_root: Path | None
    allowed_networks: Networks
    tls_certificate: Path | None
    tls_key: Path | None
    memory_budget: int | None
    metrics_address: tuple[str, int] | None
    metric_prefix: str
    owner_policy: OwnerPolicy
    keep_awake: bool
    benchmarks: bool

    @property
    def folder(self) -> Path:
        """The state folder."""
        return (self.state_dir or default_state_folder()).absolute()

    def read_identity(self, folder: Path) -> "HostIdentity | None":
        """Return the identity by which the agent calls the cluster: `pomona agent join` wrote it into the state folder.

        None: there is none, or --kubeconfig takes its place.

        Raises:
            OptionsError: it cannot be read, or is that of another host than --name.
        """
        from metal_agent.cluster.host_identity import (  # noqa: PLC0415 - commands about an agent need no client
            FILE_NAME,
            HostIdentity,
            read_joined_host,
        )

        if self.kubeconfig:
            return None

        # joined: the host that this machine has joined as, and its token; None: it has joined no cluster
        try:
            joined = read_joined_host(folder)
        except OSError as error:
            raise OptionsError(f"{folder / FILE_NAME}: {error}: make it readable for this user") from error
        if joined is None:
            return None

        is_of_another_host = self.name is not None and self.name != joined.host
        if is_of_another_host:
            raise OptionsError(
                f"this machine has joined as host {joined.host}: leave --name {self.name} out, join as {self.name}, or "
                "give --kubeconfig"
            )
        return HostIdentity(folder, joined)

    def read_options(self, folder: Path, identity: "HostIdentity | None") -> AgentOptions:
        """Return the options as the agent takes them; relative paths are made absolute.

        Args:
            folder: the state folder.
            identity: the identity that `pomona agent join` wrote, which names the host; None: --name names it.

        Raises:
            OptionsError: an option is missing, so that every start fails; a service manager does not try again.
            StartError: the name of the host is missing, but another start may find it in the state folder.
        """
        name = identity.host if identity else self.name
        if not name:
            # macOS mounts an external disk when its owner logs in: an agent that starts before must be started again.
            refusal = OptionsError if folder.exists() else StartError
            raise refusal(
                f"this machine has not joined a cluster with --state-dir {folder}: run `pomona agent join CODE`, or "
                "give --name and --kubeconfig"
            )

        return AgentOptions(
            name=name,
            folder=folder,
            address=self.address,
            first_port=self.port_range[0],
            last_port=self.port_range[1],
            file_root=self.file_root.absolute() if self.file_root else None,
            allowed_networks=self.allowed_networks,
            memory_budget_bytes=self.memory_budget,
            metrics_place=self.metrics_address,
            metric_prefix=self.metric_prefix,
            tls=_read_tls(self.tls_certificate, self.tls_key),
            owner_policy=self.owner_policy,
            keep_awake=self.keep_awake,
            benchmarks=self.benchmarks,
        )

    def render(self, state_folder: Path) -> list[str]:
        """Return the command line of an agent with these options, for the service that `pomona agent install` makes.

        Paths are made absolute, because the service manager starts the agent in another working directory.

        Args:
            state_folder: the state folder, which the service names in any case.
        """
        # 1. Options with a value.
        metrics_address = "off"
        if self.metrics_address is not None:
            address, port = self.metrics_address
            metrics_address = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        # None: the option was not given, or has its default, and is left out.
        given = {
            "--name": self.name,
            "--kubeconfig": self.kubeconfig,
            STATE_OPTION: state_folder,
            "--address": self.address,
            "--port-range": f"{self.port_range[0]}-{self.port_range[1]}",
            "--file-root": self.file_root,
            "--tls-certificate": self.tls_certificate,
            "--tls-key": self.tls_key,
            "--memory-budget": self.memory_budget,
            "--metrics-address": metrics_address,
            "--metric-prefix": None if self.metric_prefix == METRIC_PREFIX else self.metric_prefix,
        }
        words = []
        for option, value in given.items():
            if value is not None:
                words += [option, str(value.absolute() if isinstance(value, Path) else value)]

        # 2. The option that may be repeated, the flag, and the options of the owner policy: when the agent may serve.
        for network in self.allowed_networks:
            words += ["--allow-private-sources", str(network)]
        if not self.benchmarks:
            words.append("--no-benchmarks")
        return [*words, *render_owner_policy(self.owner_policy, keep_awake=self.keep_awake)]


def _read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return certificate and key; None: neither is given. Raises OptionsError: one of them is missing."""
    if certificate and key:
        # The proxy reads the files, and has another working directory.
        return Tls(str(certificate.absolute()), str(key.absolute()))
    if certificate or key:
        raise OptionsError("--tls-certificate and --tls-key belong together: give both, or none for plain HTTP")
    return None
