"""A unix socket that listens without a name first, and then takes its name in the place of any other.

A client finds the old socket or the new one, never none, and the socket that a dead process left is replaced.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

TEMPORARY_SUFFIX: Final = ".new"
"""The suffix of a socket that has not taken its name yet."""
_SOCKET_MASK: Final = 0o177
_BACKLOG: Final = 128


class SocketError(Exception):
    """A control socket cannot be used; the message says why, and what to change."""


class NamedSocket:
    """A unix socket that listens, first without a name for others, and at `path` from `take_name` on.

    Raises SocketError if it cannot listen.
    """

    def __init__(self, path: Path) -> None:
        """Listen at a temporary path, which nobody connects to; `take_name` renames it to `path`. Raises SocketError.

        Only the owner may connect. A temporary socket that a dead process left is replaced.
        """
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        temporary_path = path.with_suffix(TEMPORARY_SUFFIX)
        self._owned_path: Path | None = temporary_path  # the file that `close` removes; None after `abandon_name`

        # With this mask, `bind` makes a file that only the owner may use.
        mask = os.umask(_SOCKET_MASK)
        try:
            temporary_path.unlink(missing_ok=True)
            self.socket.bind(str(temporary_path))
            self._inode = temporary_path.stat().st_ino  # by it `close` recognizes its own file
            self.socket.listen(_BACKLOG)
        except OSError as error:
            self.socket.close()
            raise self._explain(error) from error
        finally:
            os.umask(mask)

    def take_name(self) -> None:
        """Move the socket from its temporary path to its path, in the place of any other. Raises SocketError."""
        try:
            self.path.with_suffix(TEMPORARY_SUFFIX).rename(self.path)
        except OSError as error:
            raise self._explain(error) from error
        self._owned_path = self.path

    def abandon_name(self) -> None:
        """Leave the name to a socket that will take it."""
        self._owned_path = None

    def close(self) -> None:
        """Stop listening, and remove the socket's file.

        The file stays after `abandon_name`, and if it is another one by now (it has another inode): a newer process
        has put its own socket there.
        """
        with suppress(FileNotFoundError):
            if self._owned_path and self._owned_path.stat().st_ino == self._inode:
                self._owned_path.unlink()
        self.socket.close()

    def _explain(self, error: OSError) -> SocketError:
        return SocketError(f"cannot listen on {self.path}: {error}; use a shorter path or a local disk")
