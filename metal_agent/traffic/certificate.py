"""Check the owner's certificate before the agent starts, as a client of the services will check it.

The proxy would report an unreadable file only once there is a service, and the controller would report an untrusted
certificate only once an engine runs; the owner should see a mistake at once. The check is a handshake in memory that
trusts only this certificate, so that the TLS library itself checks dates, names and use.
"""

import contextlib
import ssl
from pathlib import Path
from typing import Final

import structlog

from gateway.proxy.config import Tls
from gateway.proxy.tls import load_certificate
from metal_agent.options import StartError

_OTHER_NAME: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

log = structlog.get_logger()


def check_certificate(tls: Tls, address: str) -> None:
    """Check that services can be served at `address` with `tls`. Blocks. Raises StartError.

    A certificate for another address only logs a warning: an address may change, and clients may use a name.
    """
    for option, path in (("--tls-certificate", tls.certificate), ("--tls-key", tls.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise StartError(f"cannot read {option} {path}: {error.strerror}") from error

    try:
        server = load_certificate(tls)
        problem = _verify_certificate(server, tls.certificate, address)
        if problem and problem.verify_code in _OTHER_NAME:  # the certificate is for another name or address
            hint = "the controller will not trust it: give one that names this address"
            log.warning("certificate_not_for_this_address", address=address, hint=hint)
            problem = _verify_certificate(server, tls.certificate, None)
    except ssl.SSLError as error:
        raise StartError(
            f"cannot use --tls-certificate {tls.certificate} with --tls-key {tls.key} ({error}): both have to be in "
            "PEM form, the certificate before those of its chain, and the key its own and without a password"
        ) from error

    if problem:
        reason = problem.verify_message
        raise StartError(f"--tls-certificate {tls.certificate} is trusted by no client ({reason}): renew it")


def _verify_certificate(
    server: ssl.SSLContext, certificate: str, address: str | None
) -> ssl.SSLCertVerificationError | None:
    """Return the error that a client of `address` (None: of any name) has with the certificate, or None.

    Client and server shake hands in memory, in three turns: the client says hello, the server sends its certificate,
    the client judges it. Raises ssl.SSLError.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its certificate authority is not known here
    client.check_hostname = address is not None

    # Each reads what the other has written.
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_tls = client.wrap_bio(to_client, to_server, server_hostname=address)
    server_tls = server.wrap_bio(to_server, to_client, server_side=True)

    with contextlib.suppress(ssl.SSLWantReadError):  # raised as the answer is not there yet
        client_tls.do_handshake()  # hello
    with contextlib.suppress(ssl.SSLWantReadError):
        server_tls.do_handshake()  # the certificate
    try:
        client_tls.do_handshake()  # the verdict
    except ssl.SSLCertVerificationError as error:
        return error
    return None
