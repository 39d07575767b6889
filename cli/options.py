"""Types and defaults of options that the sub-commands share."""

import ipaddress
import os
import re
import ssl
import sys
from pathlib import Path
from typing import Final

import click

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, Network, parse_network
from crds.meta import METRIC_PREFIX
from crds.quantity import parse_quantity

STATE_FOLDER_TEXT: Final = (
    "~/Library/Application Support/Pomona" if sys.platform == "darwin" else "~/.local/state/pomona"
)
"""The default state folder as `--help` prints it, the same for every user."""
SOURCE_VARIABLES: Final = ("HF_ENDPOINT", "POMONA_PLAIN_HTTP_REGISTRIES")
"""Environment variables that say from where weights come; the Jobs and an installed agent inherit them."""
_BYTES: Final = re.compile(r"([0-9.]+) ?((?:[KMGT]i)?)B?", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.ASCII)
_METRIC_PREFIX: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_LAST_PORT: Final = 65535


class PortRange(click.ParamType[tuple[int, int]]):
    """A range of ports, as FIRST-LAST."""

    name = "FIRST-LAST"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Read the two ports."""
        if isinstance(value, tuple):
            return value
        first, _, last = str(value).partition("-")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST_PORT):
            self.fail(f"{value!r} is not a range of ports: give one such as 18000-18999", param, ctx)
        return int(first), int(last)


class ListenAddressParam(click.ParamType[tuple[str, int] | None]):
    """An address to listen at, as ADDRESS:PORT, or `off`."""

    name = "ADDRESS:PORT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int] | None:
        """Read address and port."""
        if isinstance(value, tuple) or value == "off":
            return value if isinstance(value, tuple) else None
        address, _, port = str(value).rpartition(":")
        try:
            return str(ipaddress.ip_address(address.strip("[]"))), _read_port(port)
        except ValueError:
            self.fail(f"{value!r} is not an address and port: give one such as 127.0.0.1:17999, or off", param, ctx)


def _read_port(text: str) -> int:
    """Read a port. Raises ValueError."""
    if not (text.isdecimal() and 0 < int(text) <= _LAST_PORT):
        raise ValueError(text)
    return int(text)


class Size(click.ParamType[int]):
    """A size above 0: a quantity such as `12Gi`, as in manifests, or `12.0 GiB`, as Pomona prints it."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        printed = _BYTES.fullmatch(str(value))
        amount = parse_quantity(f"{printed[1]}{printed[2]}" if printed else value)
        size_bytes = int(amount) if amount is not None else 0
        if size_bytes <= 0:
            self.fail(f"{value!r} is not a size: give one such as 12GiB, or 12884901888 for bytes", param, ctx)
        return size_bytes


class Duration(click.ParamType[float]):
    """A time above 0, in seconds: `90s`, `10m`, `1h`."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value))
        seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
        if not seconds:
            self.fail(f"{value!r} is not a time: give one such as 90s, 10m or 1h", param, ctx)
        return seconds


EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)

kubeconfig_option: Final = click.option(
    "--kubeconfig",
    type=EXISTING_FILE,
    help="Kubeconfig with cluster and credentials. Default: $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config.",
)
verbose_option: Final = click.option("--verbose", is_flag=True, help="Also log debug events.")
"""Options of the programs that others start."""

result_option: Final = click.option(
    "--result", type=click.Path(path_type=Path), help="Also write the result or the error to this file, as JSON."
)
"""Option of the commands that run in Jobs."""

file_root_option: Final = click.option(
    "--file-root", type=click.Path(path_type=Path), help="Allow file:// sources in this folder."
)
timeout_option: Final = click.option(
    "--timeout", type=Duration(), help="Longest wait, such as 10m, after which the exit code is 1. Default: no limit."
)
"""Option of the commands that wait for what the cluster does."""


class NetworkParam(click.ParamType[Network]):
    """A network, as CIDR, or one address."""

    name = "CIDR"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Network:
        """Read the network."""
        try:
            return parse_network(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a network: give one such as 192.168.1.0/24", param, ctx)


allow_private_sources: Final = click.option(
    "--allow-private-sources",
    "allowed_networks",
    multiple=True,
    type=NetworkParam(),
    envvar=NETWORKS_VARIABLE,
    show_envvar=True,
    help="Private network that sources and their redirects may lead to. Without this option, private, loopback and "
    "link-local addresses are refused. Repeatable.",
)


choose_files: Final = click.option(
    "--files",
    multiple=True,
    metavar="PATTERN",
    help="Files to take of a repository or folder, such as '*Q4_K_M*.gguf'; * stands for any letters. Repeatable. "
    "Default: all files of a folder of safetensors that an engine needs.",
)


def load_hosts_ca(path: Path) -> ssl.SSLContext:
    """Return a context that trusts the authorities in the file of --hosts-ca only.

    Raises:
        click.ClickException: the file cannot be read, or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        message = f"cannot read --hosts-ca {path}: {error}: give a file of certificates in PEM form"
        raise click.ClickException(message) from error


def default_state_folder() -> Path:
    """Return the folder in which this operating system keeps the state of an application."""
    if sys.platform != "darwin" and (folder := os.environ.get("XDG_STATE_HOME")):
        return Path(folder) / "pomona"
    return state_folder_in(Path.home())


def state_folder_in(home: Path) -> Path:
    """Return the state folder of a user without settings of their own."""
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "Pomona"
    return home / ".local" / "state" / "pomona"


def _read_metric_prefix(_context: click.Context, parameter: click.Parameter, prefix: str) -> str:
    if not _METRIC_PREFIX.fullmatch(prefix):
        message = f"{prefix!r} cannot begin the name of a metric: give one such as pomona, of a-z, 0-9 and _"
        raise click.BadParameter(message, param=parameter)
    return prefix


metric_prefix_option: Final = click.option(
    "--metric-prefix",
    default=METRIC_PREFIX,
    show_default=True,
    callback=_read_metric_prefix,
    help="Beginning of the names of metrics that FlexInfer has, too, such as flexinfer: docs/metrics.md lists them.",
)
"""Option of whatever has such metrics."""


mirrors = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="SOURCE",
    help="Another source of the same weights, asked if those before it cannot be reached. Repeatable. Its bytes are "
    "verified: by --sha256, or by the digest that it and an oci:// SOURCE have. It gets no token.",
)
"""Option of the commands that read a source."""
