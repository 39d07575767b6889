"""The header fields of a message: in the order and spelling in which they came, found by name without case."""

from collections.abc import Iterable

Field = tuple[bytes, bytes]
"""Name and value."""

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"),
    }
)
"""Fields, in lower case, that belong to one connection and are never forwarded."""


class Headers:
    """The fields of one message."""

    __slots__ = ("_first", "fields")

    def __init__(self, fields: Iterable[Field] = ()) -> None:
        self.fields = list(fields)
        self._first = {name.lower(): value for name, value in reversed(self.fields)}

    def value(self, name: bytes) -> bytes | None:
        """Return the first value of the field `name`, which is in lower case."""
        return self._first.get(name)

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of the field `name`, which is in lower case."""
        if name not in self._first:
            return []
        if len(self._first) == len(self.fields):  # none is repeated
            return [self._first[name]]
        return [value for each, value in self.fields if each.lower() == name]

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of the field `name` as text; bytes that are no UTF-8 become lone surrogates."""
        value = self._first.get(name.lower().encode())
        return default if value is None else value.decode(errors="surrogateescape")

    def connection_options(self) -> frozenset[bytes]:
        """Return the options of the Connection fields, in lower case: `close`, or names of fields of this hop."""
        if b"connection" not in self._first:
            return frozenset()
        return frozenset(option.strip().lower() for value in self.values(b"connection") for option in value.split(b","))

    def forward(self, withheld: frozenset[bytes]) -> list[Field]:
        """Return the fields except `withheld`, which has names in lower case, and those that Connection names."""
        if b"connection" in self._first:
            withheld |= self.connection_options()
        return [(name, value) for name, value in self.fields if name.lower() not in withheld]


def encode_fields(start_line: bytes, fields: Iterable[Field]) -> bytes:
    """Return the head of a message: `start_line`, which ends with CRLF, and `fields`."""
    return start_line + b"".join([b"%b: %b\r\n" % field for field in fields]) + b"\r\n"
