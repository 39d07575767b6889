"""Certificates of the preflight webhook: when one is made, which one is served, and which ones are trusted.

Each signs itself. A new one is trusted for an hour before it is served, and the old one for as long as it is valid, so
that API servers and replicas that learn of a change late always agree.
"""

import secrets
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec
from msgspec import Meta

VALID_FOR: Final = timedelta(days=90)
RENEWED_BEFORE_END: Final = timedelta(days=30)
SETTLE_TIME: Final = timedelta(hours=1)
"""Time for which a new certificate is trusted before it is served."""
CLOCK_SKEW: Final = timedelta(hours=1)
"""Clocks of API servers may differ by this much."""
_TOKEN_BYTES: Final = 24

_Time = Annotated[datetime, Meta(tz=True)]


class WebhookCertificate(msgspec.Struct, frozen=True, rename="camel"):
    """A certificate with its key, and the path at which API servers ask."""

    certificate: str
    """In PEM form."""
    key: str
    """In PEM form, without a password."""
    token: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    """Last segment of the path, by which API servers are told from others that reach the port; a name as in DNS."""
    made_at: _Time
    expires_at: _Time

    def __repr__(self) -> str:
        """Return no secret."""
        return f"WebhookCertificate(made_at={self.made_at.isoformat()}, expires_at={self.expires_at.isoformat()})"


def decode_certificates(text: str | bytes) -> tuple[WebhookCertificate, ...]:
    """Return the certificates that are stored; none if they cannot be read, as they are made anew then."""
    try:
        return msgspec.json.decode(text, type=tuple[WebhookCertificate, ...])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


def encode_certificates(certificates: Iterable[WebhookCertificate]) -> bytes:
    """Return certificates as they are stored."""
    return msgspec.json.encode(tuple(certificates))


def plan_certificates(
    stored: Iterable[WebhookCertificate], now: datetime, make: Callable[[datetime], WebhookCertificate]
) -> tuple[WebhookCertificate, ...]:
    """Return the certificates to store, the oldest first: those that are valid, and a new one if the last ends soon.

    Args:
        stored: the certificates that are stored.
        now: the time.
        make: makes a certificate.
    """
    valid = _list_valid(stored, now)
    if not valid or valid[-1].expires_at - now < RENEWED_BEFORE_END:
        return (*valid[-1:], make(now))
    return valid


def choose_certificate(stored: Iterable[WebhookCertificate], now: datetime) -> WebhookCertificate | None:
    """Return the certificate to serve: the newest that is trusted everywhere, else the one trusted for longest."""
    valid = _list_valid(stored, now)
    settled = [each for each in valid if each.made_at <= now - SETTLE_TIME]
    return (settled[-1] if settled else valid[0]) if valid else None


def make_certificate(now: datetime, name: str) -> WebhookCertificate:
    """Return a new certificate for the DNS name `name`."""
    # Most controllers serve no webhook, and the library takes 10 MB.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pomona preflight")])
    expires_at = now + VALID_FOR
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(expires_at)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return WebhookCertificate(
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        token=secrets.token_hex(_TOKEN_BYTES),
        made_at=now,
        expires_at=expires_at,
    )


def _list_valid(stored: Iterable[WebhookCertificate], now: datetime) -> tuple[WebhookCertificate, ...]:
    """Return valid certificates, the oldest first. One of the future was made by a clock that was wrong."""
    valid = [each for each in stored if each.expires_at > now and each.made_at <= now + CLOCK_SKEW]
    return tuple(sorted(valid, key=lambda each: each.made_at))
