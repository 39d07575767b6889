"""Tokens that end when a test wants it, signed with the key of the control plane: servers grant ten minutes or more."""

import base64
import hashlib
import json
import ssl

_SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")
"""DigestInfo of SHA-256 in PKCS #1 v1.5."""


def end_token(token: str, key_pem: str, expires_at: int) -> str:
    """Return `token` with another end of its life, an hour after its new beginning, signed with an RSA key."""
    header, claims, _ = token.split(".")
    times = {"exp": expires_at, "iat": expires_at - 3600, "nbf": expires_at - 3600}
    content = json.loads(base64.urlsafe_b64decode(claims + "==")) | times
    signed = f"{header}.{_encode(json.dumps(content).encode())}"
    return f"{signed}.{_encode(_sign(signed.encode(), key_pem))}"


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _sign(message: bytes, key_pem: str) -> bytes:
    body = key_pem.replace("RSA PRIVATE KEY", "CERTIFICATE").strip()
    modulus, _, exponent = _read_integers(ssl.PEM_cert_to_DER_cert(body))[1:4]
    size = (modulus.bit_length() + 7) // 8
    digest = _SHA256_PREFIX + hashlib.sha256(message).digest()
    padded = b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest
    return pow(int.from_bytes(padded), exponent, modulus).to_bytes(size)


def _read_integers(der: bytes) -> list[int]:
    """Read the sequence of integers that an RSAPrivateKey is: version, modulus, public and private exponent, ..."""
    _, rest, _ = _read_value(der)
    numbers = []
    while rest:
        _, value, rest = _read_value(rest)
        numbers.append(int.from_bytes(value))
    return numbers


def _read_value(der: bytes) -> tuple[int, bytes, bytes]:
    """Return tag, content and rest."""
    size, start = der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start])
    return der[0], der[start : start + size], der[start + size :]
