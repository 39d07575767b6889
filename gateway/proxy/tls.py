"""The certificate of the listeners, read again when its files have changed.

Each handshake looks at the files, which costs two system calls and needs nobody who watches; connections that are open
keep what they began with. Files that do not fit together, as in the middle of a renewal, leave the last pair in use.
"""

import os
import ssl

import structlog

from gateway.proxy.config import Tls

_Stamp = tuple[tuple[int, int, int], ...]

_log = structlog.get_logger()


class Certificate:
    """The pair of files `tls`; `context` is what listeners use. Raises OSError when they cannot be read or used."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._stamp = self._look()
        self._tried = self._stamp
        self._current = load(tls)
        self.context = load(tls)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        try:
            stamp = self._look()
            if stamp != self._tried:
                self._tried = stamp
                self._current = load(self.tls)
                _log.info("certificate read again", certificate=self.tls.certificate)
        except OSError as error:
            _log.warning("certificate not read again", certificate=self.tls.certificate, error=str(error))
        connection.context = self._current

    def _look(self) -> _Stamp:
        stats = [os.stat(path) for path in (self.tls.certificate, self.tls.key)]  # noqa: PTH116 - on each handshake
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in stats)


def load(tls: Tls) -> ssl.SSLContext:
    """Read both files. Raises OSError, of which ssl.SSLError is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without a password of ours OpenSSL would ask a terminal for one, and the proxy would wait for ever.
    context.load_cert_chain(tls.certificate, tls.key, password="")
    return context
