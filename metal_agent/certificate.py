"""The owner's certificate, looked at before the agent starts, as who asks the services will look at it.

The proxy tells what it cannot read only once there is a service, and the controller what it does not trust only once
an engine runs; an owner who made a mistake is to hear of it at once. The look is a handshake in memory with the
certificate alone as what is trusted, so that the TLS library itself judges dates, names and use.
"""

import contextlib
import ssl
from pathlib import Path
from typing import Final

import structlog

from gateway.proxy.config import Tls
from gateway.proxy.tls import load
from metal_agent.start import StartError

_OTHER_NAME: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

log = structlog.get_logger()


def check(tls: Tls, address: str) -> None:
    """See that services can be served at `address` with `tls`. Blocks. Raises StartError.

    A certificate for another address is only warned of: an address may change, and this host may be asked by a name.
    """
    for option, path in (("--tls-certificate", tls.certificate), ("--tls-key", tls.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise StartError(f"cannot read {option} {path}: {error.strerror}") from error
    try:
        server = load(tls)
        problem = _judge(server, tls.certificate, address)
        if problem and problem.verify_code in _OTHER_NAME:
            log.warning("certificate is not for this address, so the controller will not trust it", address=address)
            problem = _judge(server, tls.certificate, None)
    except ssl.SSLError as error:
        raise StartError(
            f"cannot use --tls-certificate {tls.certificate} with --tls-key {tls.key} ({error}): both have to be in "
            "PEM form, the certificate before those of its chain, and the key its own and without a password"
        ) from error
    if problem:
        raise StartError(
            f"--tls-certificate {tls.certificate} would not be trusted by anybody ({problem.verify_message}): renew it"
        )


def _judge(server: ssl.SSLContext, certificate: str, address: str | None) -> ssl.SSLCertVerificationError | None:
    """Shake hands as a client of `address`, or of whatever it is called. Raises ssl.SSLError."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever vouches for it is not known here
    client.check_hostname = address is not None
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=address)
    asked = server.wrap_bio(to_server, to_client, server_side=True)
    with contextlib.suppress(ssl.SSLWantReadError):
        asking.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        asked.do_handshake()
    try:
        asking.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error
    return None
