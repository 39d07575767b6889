"""The certificate of the listeners, read again when its files have changed.

Each handshake checks the files, which costs two system calls and needs no watch; open connections keep the certificate
that they began with. While the files do not fit together, as in the middle of a renewal, the last pair stays in use.
"""

import os
import ssl

from gateway.event_log import log
from gateway.proxy.config import Tls

_Stamp = tuple[tuple[int, int, int], ...]


class ReloadedCertificate:
    """The certificate and key in the files `tls`; listeners use `context`. Raises OSError if the files are unusable."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._last_stamp = self._read_stamp()
        self._current = load_certificate(tls)
        """The context with the current certificate, which is replaced when the files change."""
        # Listeners keep this one for ever; in each handshake its callback gives the connection the current one.
        self.context = load_certificate(tls)
        self.context.sni_callback = self._select_context

    def _select_context(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give the connection of a handshake the current certificate, read again if its files have changed."""
        del name, context
        try:
            stamp = self._read_stamp()
            if stamp != self._last_stamp:
                self._last_stamp = stamp
                self._current = load_certificate(self.tls)
                log.info("certificate_reloaded", certificate=self.tls.certificate)
        except OSError as error:
            log.warning("certificate_reload_failed", certificate=self.tls.certificate, error=str(error))
        connection.context = self._current

    def _read_stamp(self) -> _Stamp:
        """Return inode, size and modification time of both files."""
        stats = [os.stat(path) for path in (self.tls.certificate, self.tls.key)]  # noqa: PTH116 - on each handshake
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in stats)


def load_certificate(tls: Tls) -> ssl.SSLContext:
    """Read both files. Raises OSError; ssl.SSLError is a subclass."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without a password argument OpenSSL would ask a terminal for one, and the proxy would wait for ever.
    context.load_cert_chain(tls.certificate, tls.key, password="")
    return context
