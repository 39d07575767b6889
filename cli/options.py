"""Types and defaults of options that the sub-commands share."""

import contextlib
import functools
import inspect
import ipaddress
import os
import re
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, Network, parse_network
from crds.meta import LONGEST_NAME, METRIC_PREFIX, NAME_PATTERN
from crds.quantity import SIZE_FORMS, parse_quantity
from devices.vendors import VENDORS, Vendors

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

STATE_FOLDER_TEXT: Final = (
    "~/Library/Application Support/Pomona" if sys.platform == "darwin" else "~/.local/state/pomona"
)
"""The default state folder as `--help` prints it, the same for every user."""
SOURCE_VARIABLES: Final = ("HF_ENDPOINT", "POMONA_PLAIN_HTTP_REGISTRIES")
"""Environment variables that say from where weights come; the Jobs and an installed agent inherit them."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
_NO_TIME: Final = re.compile(r"0[smhd]?", re.ASCII)
_LAST_PORT: Final = 65535


class Parsed(click.ParamType[T]):
    """Values that `parse` reads from a text, such as `12Gi`.

    Args:
        name: what stands for a value in the help.
        parse: returns the value; the message of its ValueError is for the user.
    """

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: str | T, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Return the value of a text. Raises click.BadParameter."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def name_type(pattern: str, longest: int, problem: str) -> Parsed[str]:
    """Return the type of names that match a pattern; `problem` follows a name that does not, in the message."""

    def check(name: str) -> str:
        """Return the name if it matches. Raises ValueError."""
        if len(name) > longest or not re.fullmatch(pattern, name):
            raise ValueError(f"{name!r} {problem}")
        return name

    return Parsed("NAME", check)


def prefix_type(problem: str) -> Parsed[str]:
    """Return the type of prefixes of labels or annotations, with or without the slash at their end."""
    names = name_type(NAME_PATTERN, LONGEST_NAME, problem)
    return Parsed("PREFIX", lambda text: names.parse(text.removesuffix("/")))


def gather_options(argument: str, kind: Callable[..., object], *options: Decorator) -> Decorator:
    """Return a decorator that hands several options to a command as one argument, an object that `kind` makes of them.

    With `gather_options("weights", ScoreWeights)`, a command gets `weights=ScoreWeights(tps=0.7, util=0.2, cost=0.1)`
    in place of the options `tps`, `util` and `cost`.

    Every option that is named like a parameter of `kind` becomes that parameter, also one that another decorator adds.
    If `kind` has a parameter that is itself gathered, the decorator for the inner object stands above the one for the
    outer object. No type checker finds a misspelt name: each call of the command fails.

    Args:
        argument: name of the argument.
        kind: makes its value of the options; its parameters have their names.
        options: the options; what is no parameter of `kind` the command gets by its own name.
    """
    names = inspect.signature(kind).parameters

    # click calls `call` with a value for each option; `call` makes the object, and hands it to the command.
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        """Return the command with the options, behind a function that makes its `argument` of them.

        `names` are the parameters of `kind`. The options are applied in reverse, as decorators apply from the lowest
        up.
        """

        @functools.wraps(command)
        def call(*arguments: Any, **given: Any) -> Any:
            # `given` has the value of each option. Those of the object are taken out of it.
            gathered = {name: given.pop(name) for name in names if name in given}
            return command(*arguments, **{argument: kind(**gathered)}, **given)

        decorated: Callable[..., Any] = call
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def parse_port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of FIRST-LAST. Raises ValueError."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST_PORT):
        raise ValueError(f"{text!r} is not a range of ports: give one such as 18000-18999")
    return int(first), int(last)


def parse_listen_address(text: str) -> tuple[str, int] | None:
    """Return the address and port of ADDRESS:PORT; None for `off`. Raises ValueError."""
    if text == "off":
        return None
    address, _, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if port.isdecimal() and 0 < int(port) <= _LAST_PORT:
            return str(ipaddress.ip_address(address.strip("[]"))), int(port)
    raise ValueError(f"{text!r} is not an address and port: give one such as 127.0.0.1:17999, or off")


def parse_size(text: str) -> int:
    """Return the bytes, above 0, of a size such as `12Gi`, `12GB`, or `12.0 GiB` as Pomona prints it.

    Raises ValueError.
    """
    amount = parse_quantity(text)
    size_bytes = int(amount) if amount is not None else 0
    if size_bytes <= 0:
        raise ValueError(f"{text!r} is not a size: give {SIZE_FORMS}")
    return size_bytes


def parse_duration(text: str) -> float:
    """Return the seconds, above 0, of a time such as `90s`, `10m`, `1h` or `30d`. Raises ValueError."""
    # _DURATION: a number, then s, m, h or d, whose seconds are in _SECONDS
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"{text!r} is not a time: give one such as 90s, 10m, 1h or 30d")
    return seconds


def parse_overlap(text: str) -> int:
    """Return the whole seconds of a time, or of 0, in which a replaced key still works. Raises ValueError."""
    return 0 if _NO_TIME.fullmatch(text) else int(parse_duration(text))


def duration_between(least: float, most: float, hint: str) -> Parsed[float]:
    """Return the type of times from `least` to `most` seconds; `hint` ends the message about others."""

    def parse(text: str) -> float:
        """Return the seconds of a time in the range. Raises ValueError.

        The outer function's parameters are the range, and `hint`, the end of the message.
        """
        seconds = parse_duration(text)
        if not least <= seconds <= most:
            raise ValueError(f"{seconds:g}s is not between {least:g}s and {most:g}s: {hint}")
        return seconds

    return Parsed("TIME", parse)


def _parse_network(text: str) -> Network:
    """Return the network that a text such as 192.168.1.0/24 names. Raises ValueError with a message for the user."""
    try:
        return parse_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network: give one such as 192.168.1.0/24") from error


PORT_RANGE: Final = Parsed("FIRST-LAST", parse_port_range)
LISTEN_ADDRESS: Final = Parsed("ADDRESS:PORT", parse_listen_address)
SIZE: Final = Parsed("SIZE", parse_size)
DURATION: Final = Parsed("TIME", parse_duration)
OVERLAP: Final = Parsed("TIME", parse_overlap)
PATH: Final = click.Path(path_type=Path)
EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)

kubeconfig_option: Final = click.option(
    "--kubeconfig",
    type=EXISTING_FILE,
    help="Kubeconfig with cluster and credentials. Default: $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config.",
)
verbose_option: Final = click.option("--verbose", is_flag=True, help="Also log debug events.")
"""Options of the programs that others start."""

result_option: Final = click.option("--result", type=PATH, help="Also write result or error to this file, as JSON.")
"""Option of the commands that run in Jobs."""

file_root_option: Final = click.option("--file-root", type=PATH, help="Allow file:// sources in this folder.")
state_folder_option: Final = click.option(
    "--state-dir", type=PATH, help=f"Folder for weights, logs and records. Default: {STATE_FOLDER_TEXT}."
)
hosts_ca_option: Final = click.option(
    "--hosts-ca",
    type=EXISTING_FILE,
    help="CA of the certificates of hosts and engines, in PEM form. Default: those that the system trusts.",
)
manifests_option: Final = click.option(
    "--file",
    "-f",
    "paths",
    multiple=True,
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    help="Manifest, folder of manifests, or - for standard input. Repeatable.",
)
timeout_option: Final = click.option(
    "--timeout", type=DURATION, help="Longest wait, such as 10m, after which the exit code is 1. Default: no limit."
)
"""Option of the commands that wait for what the cluster does."""


allow_private_sources: Final = click.option(
    "--allow-private-sources",
    "allowed_networks",
    multiple=True,
    type=Parsed("CIDR", _parse_network),
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


metric_prefix_option: Final = click.option(
    "--metric-prefix",
    default=METRIC_PREFIX,
    show_default=True,
    type=name_type(r"[a-z][a-z0-9_]*", 63, "cannot begin a metric's name: give one such as pomona, of a-z, 0-9 and _"),
    metavar="TEXT",
    help="Prefix of the names of metrics that FlexInfer has, too, such as flexinfer. docs/metrics.md lists them.",
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


def read_vendors(_context: click.Context, parameter: click.Parameter, path: Path | None) -> Vendors:
    """Return the table of vendors with what the file changes. Raises click.BadParameter: it cannot be read."""
    from devices.vendor_file import VendorFileError, parse_vendors  # noqa: PLC0415 - not needed for --help
    from runtimes.registry import list_pod_engines  # noqa: PLC0415 - same

    try:
        return parse_vendors(path.read_text(), list_pod_engines()) if path else VENDORS
    except (VendorFileError, OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", param=parameter) from error


vendors_option = click.option(
    "--vendors", callback=read_vendors, type=EXISTING_FILE, help="YAML file of accelerators, that of the controller."
)
