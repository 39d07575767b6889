"""What must hold before an agent starts: options, and an address that the cluster can use."""

import ipaddress
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from artifacts import durable
from gateway.proxy.config import Tls

_ADDRESS = "address.json"

log = structlog.get_logger()


class StartError(Exception):
    """The agent cannot start as it was told; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the owner says. `address` and `memory_budget_bytes` are found out where they are None."""

    name: str
    folder: Path
    address: str | None = None
    first_port: int = 18000
    last_port: int = 18999
    file_root: Path | None = None
    memory_budget_bytes: int | None = None
    metrics_place: tuple[str, int] | None = None
    """Address and port where the agent tells its metrics; None: nowhere."""
    tls: Tls | None = None
    """Certificate and key of the listeners, which serve plain HTTP without."""


def identity(folder: Path) -> str:
    """Return who this agent is among all that may have its name: the same for as long as its state folder lives.

    Raises OSError: it cannot be read, or written down.
    """
    path = folder / "identity.json"
    known = durable.read(path, str)
    if known is None:
        known = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        durable.write(path, known)
    return known


def route_address(server: str) -> str:
    """Find the address of this host on the route to the API server; no packet is sent. Raises StartError."""
    parts = urlsplit(server)
    try:
        family, kind, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(target)
            return str(route.getsockname()[0])
    except OSError as error:
        raise StartError(f"no route to the API server {server} ({error}): give --address") from error


def find_address(options: Options, server: str) -> str:
    """Decide the address of this host; where the route to `server` cannot be found now, the last one serves.

    Raises:
        StartError: there is none, or it is not one that the cluster can use.
        OSError: the last one cannot be read.
    """
    if options.address:
        return usable_address(options.address)
    try:
        return find_route(options, server)
    except StartError as error:
        last = durable.read(options.folder / _ADDRESS, str)
        if last is None:
            raise
        log.warning("starting with the last known address", address=last, error=str(error))
        return usable_address(last)


def find_route(options: Options, server: str) -> str:
    """Find the address of this host on the route to `server`, and remember it. Blocks while a name is resolved.

    Raises:
        StartError: there is no route now, or its address is not one that the cluster can use.
    """
    address = usable_address(route_address(server))
    path = options.folder / _ADDRESS
    try:
        if durable.read(path, str) != address:
            durable.write(path, address)
    except OSError as error:
        log.warning("cannot remember this host's address", address=address, error=str(error))
    return address


def usable_address(text: str) -> str:
    """Check that the cluster may use the address and that it is this host's. Raises StartError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise StartError(f"--address {text!r} is no IP address") from error
    if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
        raise StartError(f"the cluster cannot reach address {text}: give the one of this host's network with --address")
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:  # noqa: PLR2004 - IPv6
            probe.bind((text, 0))
    except OSError as error:
        raise StartError(f"address {text} is not one of this host ({error}): give --address") from error
    return text
