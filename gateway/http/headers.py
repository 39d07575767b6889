"""The header fields of a message: in the order and spelling in which they came, found by name without case."""

import re
from collections.abc import Collection, Iterable

Field = tuple[bytes, bytes]
"""Name and value."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
"""Fields, in lower case, that belong to one connection and are never forwarded."""

_LOCAL_HOST = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE | re.ASCII)
_PORT = re.compile(r":\d*$", re.ASCII)


class Headers:
    """The fields of one message."""

    def __init__(self, fields: Iterable[Field] = ()) -> None:
        self.fields = list(fields)
        """Name and value of each field as they came, in their order."""
        self._names = [field[0].lower() for field in self.fields]  # in the order of `fields`
        # From the last one to the first, so that the first value of a repeated field stays.
        self._first = {name: value for name, (_, value) in zip(self._names[::-1], self.fields[::-1], strict=True)}

    def value(self, name: bytes) -> bytes | None:
        """Return the first value of the field `name`, which is in lower case."""
        return self._first.get(name)

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of the field `name`, which is in lower case."""
        return [value for field_name, (_, value) in zip(self._names, self.fields, strict=True) if field_name == name]

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of the field `name` as text; bytes that are no UTF-8 become lone surrogates."""
        value = self._first.get(name.lower().encode())
        return default if value is None else value.decode(errors="surrogateescape")

    def connection_options(self) -> frozenset[bytes]:
        """Return the options of the Connection fields, in lower case: `close`, or names of fields of this hop."""
        return self._options(b"connection")

    def offered_protocols(self) -> frozenset[bytes]:
        """Return the protocols that the client offers to go on with, in lower case, such as `websocket`."""
        return self._options(b"upgrade")

    def _options(self, name: bytes) -> frozenset[bytes]:
        return frozenset(option.strip().lower() for value in self.values(name) for option in value.split(b","))

    def encode_forwarded(self, withheld: frozenset[bytes]) -> bytes:
        """Return the lines to forward: all fields but `withheld` (lower-case names) and those that Connection names."""
        dropped = withheld | self.connection_options()
        lines = [
            b"%b: %b\r\n" % field for name, field in zip(self._names, self.fields, strict=True) if name not in dropped
        ]
        return b"".join(lines)


def encode_fields(fields: Iterable[Field]) -> bytes:
    """Return the lines of header fields."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


def is_from_local_program(headers: Headers) -> bool:
    """Decide whether a program of this machine sent the request, and not a web page in a browser of this machine."""
    return find_foreign_field(headers) is None


def find_foreign_field(
    headers: Headers, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> tuple[str, str] | None:
    """Return the field that no local program sends, `Host` or `Origin`, and its value; None: the request is of one.

    A page of another origin sends that origin. A page whose own host name was made to resolve to this address (DNS
    rebinding) still sends that host name.

    Args:
        headers: the request's.
        hosts: further names of this machine, in lower case, that local programs use.
        origins: the origins of web pages that may ask all the same.
    """
    host, origin = headers.get("Host"), headers.get("Origin")
    if not _LOCAL_HOST.fullmatch(host) and remove_port(host).lower() not in hosts:
        return "Host", host
    if origin and not _LOCAL_HOST.fullmatch(origin.removeprefix("http://")) and origin not in origins:
        return "Origin", origin
    return None


def remove_port(host: str) -> str:
    """Return the name or address of a Host field."""
    return _PORT.sub("", host)
