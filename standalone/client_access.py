"""Which clients `pomona up` serves: the address it listens on, its API keys, and the names and web pages it admits."""

import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from crds.gatewaykey import digest_key
from devices.sockets import LOOPBACK
from gateway.proxy.config import (
    EVERY_ORIGIN,
    HOST_PATTERN,
    KEY_NAME_PATTERN,
    MOST_KEYS,
    ORIGIN_PATTERN,
    RouterKey,
    RouterListener,
    is_loopback,
)

_GROUP_AND_OTHERS: Final = 0o077
_LARGEST_FILE_BYTES: Final = 1 << 20
_SHORTEST_KEY: Final = 16
_KEY: Final = re.compile(r"[!-~]{1,512}")
"""Characters that every client can send."""
_FORM: Final = "write a line NAME KEY for each, such as: phone 5f0c..., with a key from `openssl rand -hex 32`"
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class ApiKey(msgspec.Struct, frozen=True):
    """A key of clients of `pomona up`."""

    name: str
    """Its name in log and metrics."""
    secret: str

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r}, ...)"


class ClientAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The clients that the endpoint serves. Raises ValueError: this would be open to everybody."""

    address: str = LOOPBACK
    """The address that the endpoint listens on."""
    keys: tuple[ApiKey, ...] = ()
    """The keys of which every client needs one; empty: none is needed."""
    hosts: tuple[str, ...] = ()
    """Further names of this machine that clients without a key may use."""
    origins: tuple[str, ...] = ()
    """The origins whose web pages may ask."""

    def __post_init__(self) -> None:
        if self.keys:
            return
        if not is_loopback(self.address):
            raise ValueError(f"--listen {self.address}: other machines reach it: give keys by --api-key FILE; {_FORM}")
        if EVERY_ORIGIN in self.origins:
            raise ValueError(f"--allow-origin '*': any web page could ask: give keys by --api-key FILE; {_FORM}")

    def build_listener(self, port: int) -> RouterListener:
        """Return the listener of the endpoint, which knows digests of the keys only."""
        return RouterListener(
            address=self.address,
            port=port,
            keys=tuple(RouterKey(key.name, digest_key(key.secret)) for key in self.keys),
            allowed_hosts=self.hosts,
            allowed_origins=self.origins,
        )

    def build_url(self, port: int) -> str:
        """Return the base URL of the endpoint for clients on this machine."""
        address = ipaddress.ip_address(self.address)
        if address.is_unspecified:
            return f"http://{'[::1]' if address.version == 6 else LOOPBACK}:{port}"  # noqa: PLR2004 - IPv6
        return f"http://{_bracket(address)}:{port}"

    def describe(self, port: int) -> str:
        """Return the URL of OpenAI's API, where else it is reached, and what clients need."""
        address = ipaddress.ip_address(self.address)
        elsewhere = f" and port {port} of every IPv{address.version} address here" if address.is_unspecified else ""
        return f"{self.build_url(port)}/v1{elsewhere}{', with a key' if self.keys else ''}"


def parse_address(text: str) -> str:
    """Return an address to listen on. Raises ValueError."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        address = None
    if address is None or "%" in text:
        raise ValueError(f"{text!r} is not an address: give one of this machine, or 0.0.0.0 for all of them")
    return str(address)


def parse_host(text: str) -> str:
    """Return a name or address as it is in the Host field of requests. Raises ValueError."""
    host = text.lower()
    if ":" in host.strip("[]"):
        try:
            host = _bracket(ipaddress.ip_address(host.strip("[]")))
        except ValueError:
            host = ""
    if not re.fullmatch(HOST_PATTERN, host, re.ASCII):
        raise ValueError(f"{text!r} is not the name of a host: give one without a port, such as host.docker.internal")
    return host


def parse_origin(text: str) -> str:
    """Return an origin of web pages as browsers send it, or `*`. Raises ValueError."""
    if text == EVERY_ORIGIN:
        return text
    origin = text.lower().removesuffix("/")
    if not re.fullmatch(ORIGIN_PATTERN, origin, re.ASCII):
        raise ValueError(f"{text!r} is not an origin: give one without a path, such as https://chat.example.com, or *")
    return origin.removesuffix(_DEFAULT_PORTS.get(urlsplit(origin).scheme, "/"))


def read_api_keys(path: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file that only its owner can read. Raises ValueError, whose message quotes nothing of it."""
    try:
        with Path(path).expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & _GROUP_AND_OTHERS:
                mode = stat.S_IMODE(status.st_mode)
                raise ValueError(f"{path} has mode {mode:04o}, so that other users can read the keys: chmod 600 {path}")
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        # The path is not quoted: it may be a key.
        advice = "give a file of keys, and no key, which other users would see"
        raise ValueError(f"cannot read this file ({error.strerror}): {advice}") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise ValueError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 20} MiB: {_FORM}")
    return parse_api_keys(content.decode(errors="replace"), path)


def parse_api_keys(text: str, path: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file: lines NAME KEY, empty lines, and comments that begin with #. Raises ValueError."""
    keys: list[ApiKey] = []
    lines_of: dict[str, int] = {}  # by name and by secret
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue

        where = f"{path}:{number}"
        if len(words) != 2:  # noqa: PLR2004 - NAME and KEY
            raise ValueError(f"{where}: this is not a name and a key: {_FORM}")
        name, secret = words
        if not re.fullmatch(KEY_NAME_PATTERN, name, re.ASCII):
            raise ValueError(
                f"{where}: the name has other characters than letters, digits and .-_, or over 63: {_FORM}"
            )
        if not _KEY.fullmatch(secret):
            raise ValueError(f"{where}: the key has other characters than printable ASCII, or over 512: {_FORM}")
        if len(secret) < _SHORTEST_KEY:
            raise ValueError(f"{where}: the key has less than {_SHORTEST_KEY} characters: {_FORM}")
        for part, value in (("name", f"name {name}"), ("key", f"key {secret}")):
            if value in lines_of:
                raise ValueError(f"{where}: the {part} is that of line {lines_of[value]}: each has its own")
            lines_of[value] = number
        keys.append(ApiKey(name, secret))
    if not keys:
        raise ValueError(f"{path} has no key: {_FORM}")
    if len(keys) > MOST_KEYS:
        raise ValueError(f"{path} has {len(keys)} keys, more than {MOST_KEYS}: remove those that are not used")
    return tuple(keys)


def _bracket(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address as it is in URLs and in the Host field."""
    return f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else str(address)
