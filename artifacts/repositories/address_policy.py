"""Addresses that a source may lead to: public ones, and those in the private networks that the operator allows.

Whoever may create a Model names the server that Jobs and hosts connect to, so without a limit a Model could read what
only they reach: metadata services, the API server, the owner's router. The address itself is checked when the socket
for it is opened, on every hop, so neither a redirect nor a name that resolves differently the second time helps.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

NETWORKS_VARIABLE: Final = "POMONA_ALLOW_PRIVATE_SOURCES"
"""Environment variable with the allowed networks, for `pomona` commands and for the Jobs of a controller."""

IN_PRIVATE_NETWORK: Final = (
    "in a private network: if that is wanted, allow the network with --allow-private-sources CIDR or "
    f"{NETWORKS_VARIABLE}"
)
"""The end of a message about a source that leads to a private address."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = tuple[Network, ...]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressInfo = tuple[int, int, int, str, tuple[object, ...]]

_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses of NAT64: the last 32 bits are the IPv4 address that is reached."""


_RELAYS: Final = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("192.88.99.0/24"))
"""Addresses of protocols and relays, some of which `ipaddress` calls global."""


class PrivateAddressError(OSError):
    """The address is not public, and no allowed network contains it."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "private address")


def parse_network(text: str) -> Network:
    """Return the network of a CIDR or of one address. Raises ValueError."""
    return ipaddress.ip_network(text)


def is_allowed(text: str, networks: Networks) -> bool:
    """Return whether a source may be read from the IP address `text`: a public one, or one in `networks`.

    `networks` are the private networks that the operator allows. False if `text` is no address.
    """
    try:
        address = _unwrap(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False
    return _is_public(address) or any(address in network for network in networks)


def open_socket(info: AddressInfo, networks: Networks) -> socket.socket:
    """Return a socket, not yet connected, for an address that a name was resolved to; aiohttp calls this for each.

    Raises PrivateAddressError, before anything is sent, for an address that `is_allowed` refuses.
    """
    family, kind, protocol, _, address = info
    if not is_allowed(str(address[0]), networks):
        raise PrivateAddressError
    return socket.socket(family, kind, protocol)


def find_stated_address(host: str) -> str | None:
    """Return the IP address that the host of a URL is, in any spelling that resolvers accept; None if it is a name.

    `localhost` and the names below it state loopback wherever they are resolved.
    """
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name.partition("%")[0]))
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(name))  # such as 127.1 and 0x7f000001
    return None


async def resolve_addresses(host: str) -> list[str]:
    """Return the IP addresses that a host of a URL states or resolves to here; none for a name that does not exist."""
    stated = find_stated_address(host)
    if stated is not None:
        return [stated]
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in addresses]


def networks_text(networks: Iterable[Network]) -> str:
    """Return the value of the environment variable for these networks."""
    return " ".join(map(str, networks))


def _unwrap(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address contains (NAT64, mapped, 6to4), else the address itself.

    A private IPv4 address must not pass in the form of an IPv6 address.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    # _TRANSLATED: addresses of NAT64.
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)  # the last 32 bits
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: Address) -> bool:
    """Decide whether an address is that of one host of the internet: neither private, nor special, nor of a relay."""
    # `is_global` alone calls multicast and site-local addresses global.
    special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    if isinstance(address, ipaddress.IPv6Address):
        # Only 2000::/3, whose first three bits are 001, is assigned to hosts of the internet.
        special = special or address.is_site_local or int(address) >> 125 != 1
    # _RELAYS: networks of protocols and relays, some of which count as global.
    return address.is_global and not special and not any(address in relays for relays in _RELAYS)
