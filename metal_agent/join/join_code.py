"""The join code: what a host needs to join a cluster, as one line of text that an administrator hands over.

The code is one half of the exchange: it has no token of the host, only the signature of one. The API server keeps the
other half and gives it away once, to whoever deletes the PodTemplate of the code first (`exchange.py`).
"""

import base64
import binascii
import re
import ssl
import zlib
from typing import Final

import msgspec

_FORMAT: Final = 2
"""Changes with the content of a code, and with what is deleted to use it."""
PREFIX: Final = f"pomona-join-{_FORMAT}."
"""Begins each code."""
_FAMILY: Final = re.compile(r"pomona-join-(?P<format>\d+)\.")
_ALPHABET: Final = re.compile(r"[A-Za-z0-9_-]*")
_CHECKSUM_BYTES: Final = 4
_MOST_BYTES: Final = 65536
"""Bound on the decompressed content: a code is text that somebody sent."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class JoinCodeError(Exception):
    """The text is no join code that this version can use; the message says how to get one."""


class JoinCode(msgspec.Struct, frozen=True, array_like=True):
    """The content of a code. It is compact, since people copy it: an array, without names of fields."""

    host: str
    server: str
    """Base URL of the API server, with https."""
    token: str
    """Token of the code's own ServiceAccount, whose only right is to delete the PodTemplate of the code."""
    signature: str
    """Signature of the host's first token; the API server gives the rest of that token away once."""
    expires_at: int
    """End of the life of `token` by the server's clock, in seconds since 1970."""
    authority: tuple[bytes, ...] = ()
    """Certificates, in DER form, one of which must have signed the server's; empty: those that the system trusts."""
    tls_server_name: str = ""
    """Name to check in the server's certificate, if it is not the URL's."""

    def __repr__(self) -> str:
        return f"JoinCode(host={self.host!r}, server={self.server!r})"

    @property
    def authority_pem(self) -> str:
        """The certificates in PEM form; empty if the system's are used."""
        return "".join(map(ssl.DER_cert_to_PEM_cert, self.authority))


def encode_join_code(code: JoinCode) -> str:
    """Return the code as text; `decode_join_code` is the inverse."""
    content = zlib.compress(msgspec.msgpack.encode(code), 9)
    checksum = zlib.crc32(content).to_bytes(_CHECKSUM_BYTES)
    return PREFIX + base64.urlsafe_b64encode(content + checksum).decode().rstrip("=")


def decode_join_code(text: str) -> JoinCode:
    """Return the content of a code; blanks and line breaks, as a mail or a terminal adds them, are ignored.

    Raises:
        JoinCodeError: it is no code, it is damaged or cut off, or another version of Pomona wrote it.
    """
    compact = "".join(text.split())
    family = _FAMILY.match(compact)  # the prefix of a code of any format
    if family is None:
        raise JoinCodeError(
            f"this is no join code, which begins with {PREFIX!r}: copy the whole line that `pomona host join` printed"
        )
    if family[0] != PREFIX:
        raise JoinCodeError(
            f"this join code has format {family['format']}, and this Pomona reads format {_FORMAT}: use the same "
            "version of Pomona on both machines"
        )

    try:
        return _decode_content(compact.removeprefix(PREFIX))
    except (ValueError, binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise JoinCodeError(
            "this join code is cut off or damaged: copy the whole line again, or pipe it: `pomona agent join -` reads "
            "it from standard input"
        ) from error


def split_certificates(pem: bytes) -> tuple[bytes, ...]:
    """Return the certificates of a PEM file in DER form. Raises ValueError if there is none, or one cannot be read."""
    text = pem.decode("ascii", errors="replace")
    certificates = tuple(ssl.PEM_cert_to_DER_cert(block) for block in _PEM.findall(text))
    if not certificates:
        raise ValueError("there is no certificate in it")
    return certificates


def _decode_content(text: str) -> JoinCode:
    """Return the content of a code without its prefix.

    Raises ValueError, binascii.Error, zlib.error and msgspec.DecodeError.
    """
    if not _ALPHABET.fullmatch(text):  # a decoder with `altchars` takes + and / as well
        raise ValueError("there is another character in it")
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    content, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if len(checksum) != _CHECKSUM_BYTES or zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) != checksum:
        raise ValueError("the checksum differs")
    expand = zlib.decompressobj()  # expands no more than _MOST_BYTES, whatever a crafted code claims
    return msgspec.msgpack.decode(expand.decompress(content, _MOST_BYTES), type=JoinCode)
